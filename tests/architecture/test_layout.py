"""Where code lies, how its files are called, how long they are, and what must not stand in them."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A name that says nothing invites code that belongs nowhere.
NAMELESS = frozenset({"common", "core", "helper", "helpers", "misc", "model", "shared", "util", "utils"})

LONGEST_MODULE = 400
# A module may be longer if it is still one noun; the reason stands here.
LONGER_BECAUSE: dict[str, str] = {
    "inference_tasks/errors.py": "every error that a user can meet, in one place",
    "inference_tasks/broker/pipeline.py": "the one loop through which every message goes, from end to end",
    "inference_tasks/settings/sections.py": "every setting with what it means, to be read from top to bottom",
    "inference_tasks/task.py": "the options of the decorator, which type checkers need to be told twice",
    "inference_tasks/state/records.py": "every value that goes into and comes out of the state store",
    "tests/contract/test_task_store.py": "one suite of the store's contract, run on the fake and on Redis",
    "tests/properties/test_state_machine.py": "all that may happen to a task, in one machine",
    "tests/integration/test_publisher.py": "the publisher's promises, with the fixtures that they share",
}

LARGEST_FILE_BYTES = 300_000

# Written in pieces, so that this file does not name what it looks for.
REGISTRY_HOST = re.compile(
    r"(?i)\b(?:"
    + "|".join(["py" + "pi", "python" + "hosted", "npm" + "js", "crates", "debian", "docker"])
    + r")\.(?:org|com|net|io)\b"
    r"|registry\.(?:yarn" + r"pkg|npm)"
)
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:wor" + r"k|far" + r"m|roo" + r"t|hom" + r"e/\w+|opt/(?:pyp" + r"i|whee" + r"ls)|tmp/bash_)(?:/|\b)"
)


@cache
def tracked() -> list[Path]:
    """The files that are, or are about to be, part of the repository."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a checkout: the files of the repository are unknown")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def modules() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines_that_match(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{relative(path)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    return found


def test_no_file_has_a_name_that_says_nothing() -> None:
    names = {relative(path) for path in tracked() if path.stem in NAMELESS or path.parent.name in NAMELESS}
    assert not names


def test_no_module_is_long_without_a_reason() -> None:
    long = {
        relative(path): count for path in modules() if (count := len(path.read_text().splitlines())) > LONGEST_MODULE
    }
    assert long.keys() == LONGER_BECAUSE.keys(), f"{long}: ask whether each is still one noun"


def test_no_registry_is_named() -> None:
    assert not lines_that_match(REGISTRY_HOST)


def test_no_path_of_one_machine_is_named() -> None:
    assert not lines_that_match(MACHINE_PATH)


def test_no_large_file_is_part_of_the_repository() -> None:
    assert not [relative(path) for path in tracked() if path.stat().st_size > LARGEST_FILE_BYTES]


@pytest.mark.parametrize("name", ["routing", "config"])
def test_a_folder_with_a_common_name_is_no_package(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists(), f"{name} collides with modules of users"


def test_the_ban_on_celery_kept_parts_is_silenced_nowhere() -> None:
    silenced = re.compile(r"noqa.*TID251")
    assert not [line for line in lines_that_match(silenced) if line.startswith(("inference_tasks/", "routing/"))]
