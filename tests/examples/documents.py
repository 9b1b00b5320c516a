"""The documents of the repository, taken apart: code blocks, commands, names of files and functions, links."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from inference_tasks.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "config/README.md",
    "routing/README.md",
    "docs/migration.md",
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def text(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of one language, in order."""
    return [code for found, code in _BLOCK.findall(text(document)) if found == language]


def commands(document: str) -> list[list[str]]:
    """The command lines in the blocks for a console, without variables before them and remarks after them."""
    found = []
    for block in blocks(document, "console"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                found.append(words)
    return found


def links(document: str) -> list[Path]:
    """The files that a document links to; addresses elsewhere are left out."""
    return [(ROOT / document).parent / link for link in _LINK.findall(text(document)) if "://" not in link]


def definitions(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    return set(_definitions(ast.parse(path.read_text()).body, ""))


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{prefix}{node.name}.")


def problem(command: list[str]) -> str | None:
    """Say what a command line names that does not exist here; None if all is well."""
    program, *words = command
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if words[0] in targets else f"no target {words[0]}"
    if program == "inference-tasks":
        return _problem_of_ours(words)
    known = {"pip", "curl", "docker", "celery", "pre-commit", "rabbitmqctl"}
    return None if program in known else f"unknown program {program}"


def _problem_of_ours(words: list[str]) -> str | None:
    command: click.Command = main
    context = click.Context(main, info_name="inference-tasks")
    # A group that runs by itself takes options before, or in place of, a command of its own.
    while isinstance(command, click.Group) and words and not (command.invoke_without_command and words[0][0] == "-"):
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            return f"no command {name}"
        command = found
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in options]
    return f"no option {unknown[0]} of {command.name}" if unknown else None


def parsed(words: list[str]) -> dict[str, object]:
    """What one of our commands makes of its arguments, by the names of its parameters.

    Raises:
        click.UsageError: It does not take them.
    """
    assert words[0] == "inference-tasks", words
    context = click.Context(main, info_name="inference-tasks")
    command = main.get_command(context, words[1])
    assert command is not None, words
    return command.make_context(words[1], words[2:], parent=context).params
