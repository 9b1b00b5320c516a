"""The page on migration, carried out: an old and a new release of one app, side by side on one broker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from tests.examples.documents import blocks, commands
from tests.support.brokers import until
from tests.support.processes import WorkerProcess, environment

PAGE = "docs/migration.md"
OLD, NEW = blocks(PAGE, "python")
QUEUES = ("celery", "online", "nightly")


@dataclass(frozen=True)
class Release:
    """One release of the app in a folder of its own."""

    folder: Path
    env: Mapping[str, str]

    def run(self, script: str) -> Any:
        """What a client of this release prints, as JSON."""
        done = subprocess.run(
            [sys.executable, "-c", f"import json\nfrom shop import *\n{script}"],
            cwd=self.folder,
            env=environment(self.folder, self.env),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def releases(tmp_path: Path, amqp_url: str, redis_url: str, namespace: str) -> tuple[Release, Release]:
    made = []
    for name, code in (("old", OLD), ("new", NEW)):
        folder = tmp_path / name
        folder.mkdir()
        code = code.replace("amqp://localhost//", amqp_url).replace("redis://localhost:6379/0", redis_url)
        (folder / "shop.py").write_text(code)
        env = {"INFERENCE_NAMESPACE": namespace, "INFERENCE_STATE__PREFIX": f"{namespace}:"} if name == "new" else {}
        made.append(Release(folder, env))
    return made[0], made[1]


def waiting(amqp_url: str) -> int:
    """Messages in the old queues, those in the memory of workers too: they come back when these end."""
    with Connection(amqp_url) as connection:
        channel: Any = connection.default_channel
        return sum(int(channel.queue_declare(name, passive=True).message_count) for name in QUEUES)


def test_old_work_is_finished_by_old_workers_while_new_work_goes_to_the_tiers(
    releases: tuple[Release, Release], amqp_url: str
) -> None:
    old, new = releases
    ids = old.run(
        "print(json.dumps([one.delay('a').id for one in (classify, embed, resize)]"
        " + [resize.apply_async(('b',), countdown=1).id]))"
    )
    assert waiting(amqp_url) == 4
    (start,) = (words for words in commands(PAGE) if words[:2] == ["inference-tasks", "worker"])
    with WorkerProcess.command(*start[2:], directory=new.folder, env=new.env) as worker:
        done = new.run(
            "sent = [one.delay('c') for one in (classify, embed, resize)]\n"
            "print(json.dumps([[one.get(timeout=60), inference.status(one.id).tier] for one in sent]))"
        )
        assert done == [["class of c", "realtime"], ["vectors of c", "offline"], ["small c", "batch"]]
        # The new worker takes nothing out of the old queues.
        assert waiting(amqp_url) == 4
        with WorkerProcess.celery(
            "shop", "-Q", ",".join(QUEUES), "--concurrency", "1", directory=old.folder, env=old.env, name="old"
        ) as before:
            fetch = f"print(json.dumps([app.AsyncResult(one).get(timeout=60) for one in {ids!r}]))"
            assert old.run(fetch) == ["class of a", "vectors of a", "small a", "small b"]
            assert before.terminate() == 0
        assert waiting(amqp_url) == 0
        assert new.run(f"print(json.dumps([app.AsyncResult(one).state for one in {ids!r}]))") == ["PENDING"] * 4
        # A task whose route stays goes to its old queue, past the tiers.
        new.run(
            "app.conf.task_routes = {'shop.resize': {'queue': 'celery'}}\n"
            "print(json.dumps(resize.apply_async(('d',), ignore_result=True).id))"
        )
        until(lambda: waiting(amqp_url) == 1, "it lies in the old queue")
        assert worker.terminate() == 0
