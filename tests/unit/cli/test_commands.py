"""The commands as a table, their help, and which app they work on; no server is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from inference_tasks.cli import COMMANDS, celery_command, main

APP = """
from inference_tasks import InferenceApp
app = InferenceApp("shop", broker="amqp://guest:secret@127.0.0.1:1/", state="redis://127.0.0.1:1/0",
                   tiers={"realtime": {"bound": 7}}, set_as_current=False)
@app.inference(tier="realtime")
def classify(path: str) -> dict: return {"path": path}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with apps in it, whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("INFERENCE_APP", "INFERENCE_CONFIG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "broken.py").write_text("import nothing_like_it\n")
    (tmp_path / "empty.py").write_text("")
    yield tmp_path
    for name in {"shop", "broken", "empty"} & (set(sys.modules) - before):
        del sys.modules[name]


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), env=env, prog_name="inference-tasks")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    ran = run(name, "--help")
    assert ran.exit_code == 0
    assert ran.stdout.startswith(f"Usage: inference-tasks {name}")


def test_celerys_command_line_has_the_same_commands() -> None:
    ran = CliRunner().invoke(celery_command, ["--help"])
    assert all(f"  {name} " in ran.stdout for name in COMMANDS)


def test_a_misspelled_command_names_the_right_one() -> None:
    ran = run("statsu", "x")
    assert ran.exit_code == 2
    assert "Did you mean 'status'?" in ran.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("-A", "shop", "settings", "show", "--json"), {}),
        (("settings", "show", "--json", "-A", "shop:app"), {}),
        (("settings", "show", "--json"), {"INFERENCE_APP": "shop.app"}),
        (("-A", "empty", "settings", "show", "--json", "-A", "shop"), {"INFERENCE_APP": "broken"}),
    ],
)
def test_the_app_may_be_named_before_or_after_the_command_or_by_a_variable(
    arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    ran = run(*arguments, env=env)
    assert ran.exit_code == 0, ran.stderr
    rows = {row["setting"]: row for row in json.loads(ran.stdout)}
    assert rows["tiers.realtime.bound"] == {"setting": "tiers.realtime.bound", "value": 7, "origin": "argument"}
    assert "secret" not in ran.stdout


@pytest.mark.usefixtures("folder")
def test_settings_are_shown_without_an_app_or_a_broker() -> None:
    ran = run("settings", "show", env={"INFERENCE_TIERS__BATCH__BOUND": "9"})
    assert ran.exit_code == 0, ran.stderr
    assert "INFERENCE_TIERS__BATCH__BOUND" in ran.stdout


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("shoppe", 2, "there is no module 'shoppe'"),
        ("shop:nothing", 2, "nothing"),
        ("empty", 2, "-A empty"),
        ("shop:classify", 2, "not an app"),
        ("broken", 7, "nothing_like_it"),
    ],
)
def test_an_app_that_cannot_be_loaded_says_why(name: str, code: int, said: str) -> None:
    ran = run("settings", "show", "-A", name)
    assert (ran.exit_code, said in ran.stderr) == (code, True), ran.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [("worker",), ("submit", "classify")])
def test_worker_and_submit_need_an_app(command: tuple[str, ...]) -> None:
    ran = run(*command)
    assert ran.exit_code == 2
    assert "-A vision:app" in ran.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("clasify", "x"), 2, "Did you mean 'classify'?"),
        (("classify", "x", "y"), 2, "takes 1 positional argument"),
        (("classify", "--kwargs", "{"), 2, "expected JSON"),
        (("classify", "--kwargs", "[1]"), 2, "expected an object"),
        (("classify", "x", "--tier", "realtme"), 2, "realtime"),
        (("classify", "x"), 5, "inference-tasks doctor"),
    ],
)
def test_a_submit_that_cannot_work_says_why(arguments: tuple[str, ...], code: int, said: str) -> None:
    ran = run("submit", "-A", "shop", *arguments)
    assert (ran.exit_code, said in ran.stderr) == (code, True), ran.stderr


@pytest.mark.usefixtures("folder")
def test_the_topology_is_shown_without_a_broker() -> None:
    ran = run("topology", "show", "-A", "shop", "--json")
    assert ran.exit_code == 0, ran.stderr
    queues = {queue["name"]: queue for queue in json.loads(ran.stdout)["queues"]}
    assert queues["inference.realtime"]["arguments"]["x-max-length"] == 7
