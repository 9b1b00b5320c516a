"""The public names of both packages with their signatures, as text: `python -m tests.architecture.public_api`."""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PACKAGES = ("inference_tasks", "inference_tasks.testing", "inference_routing")
SNAPSHOT = Path(__file__).with_name("public_api.txt")


def described(package: ModuleType) -> Iterator[str]:
    """One line for each public name of a package, and one for each public member of a class that it defines."""
    for name in sorted(getattr(package, "__all__", ())):
        value = getattr(package, name)
        if not inspect.isclass(value):
            yield f"{name}{_signature(value)}" if callable(value) else f"{name}: {type(value).__name__}"
            continue
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases})" + ("" if issubclass(value, enum.Enum) else f"  {_signature(value)}")
        for member, what in sorted(vars(value).items()):
            if member.startswith("_"):
                continue
            if isinstance(what, property):
                yield f"    {member}: property"
            elif isinstance(what, classmethod | staticmethod) or inspect.isfunction(what):
                yield f"    {member}{_signature(inspect.unwrap(getattr(value, member)))}"


def _signature(value: object) -> str:
    """Names, kinds and optionality of the parameters: types are mypy's to keep, default values the documents'."""
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    bare = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=parameter.default if parameter.default is inspect.Parameter.empty else _Some(),
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class _Some:
    """Stands for any default value."""

    def __repr__(self) -> str:
        return "…"


def snapshot() -> str:
    """The text of all packages."""
    blocks = []
    for name in PACKAGES:
        lines = "\n".join(described(importlib.import_module(name)))
        blocks.append(f"# {name}\n{lines}\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    sys.stdout.write(snapshot())
