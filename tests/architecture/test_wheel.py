"""What an installation puts on a user's machine."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built without any download."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"inference_tasks", "inference_routing"}


def test_the_wheel_holds_the_scripts_and_type_marks_that_the_code_needs(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = [*ROOT.glob("inference_tasks/**/*"), *ROOT.glob("routing/inference_routing/**/*")]
    data = {
        path.relative_to(ROOT / "routing" if "routing" in path.relative_to(ROOT).parts[:1] else ROOT).as_posix()
        for path in sources
        if path.is_file() and path.suffix not in {".py", ".pyc"} and not path.name.startswith(".")
    }
    assert data <= names
    assert {"inference_tasks/py.typed", "inference_routing/py.typed"} <= names


def test_the_licence_travels_with_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]


def test_the_commands_are_announced_to_the_shell_and_to_celery(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    text = wheel.read(name).decode()
    assert "inference-tasks = inference_tasks.cli:main" in text
    assert "[celery.commands]\ninference = inference_tasks.cli:celery_command" in text
