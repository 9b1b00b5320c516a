"""What an operator of dead letters does, and sees from outside."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

from click.testing import CliRunner
from kombu import Connection

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.cli import main
from inference_tasks.dead_letters.index import depth
from tests.support.brokers import Broker, until
from tests.support.processes import LoggedProcess, WorkerProcess
from tests.support.rig import Rig, task


def settings(rig: Rig, **more: str) -> dict[str, str]:
    options = cast("dict[str, Any]", rig.options)
    return {
        "INFERENCE_NAMESPACE": options["namespace"],
        "INFERENCE_BROKER__URL": options["broker"]["url"],
        "INFERENCE_BROKER__QUEUE_TYPE": options["broker"]["queue_type"],
        "INFERENCE_STATE__URL": options["state"]["url"],
        "INFERENCE_STATE__PREFIX": options["state"]["prefix"],
        **more,
    }


def command(rig: Rig, *arguments: str, code: int = 0, **env: str) -> Any:
    """Run a command by the settings alone and return its answer, or what it said instead of one."""
    done = CliRunner().invoke(main, [*arguments, "--json"], env=settings(rig, **env), catch_exceptions=False)
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def process(rig: Rig, *arguments: str) -> LoggedProcess:
    """A command in a process of its own, to be sent signals."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {**os.environ, "PYTHONPATH": path, **settings(rig)}
    argv = (sys.executable, "-m", "inference_tasks.cli", *arguments)
    return LoggedProcess(argv, log=rig.directory / "command.log", env=env)


def ids_in_queue(app: InferenceApp) -> list[str]:
    """Ids of the dead letters in the order of the queue, looked at without this package."""
    inference = inference_of(app)
    wanted = depth(inference)
    with Connection(cast(str, inference.settings.broker.url)) as connection:
        channel: Any = connection.channel()
        found: list[Any] = []
        channel.basic_consume(inference.topology.dead.name, callback=found.append)
        while len(found) < wanted:
            connection.drain_events(timeout=5)
        channel.close()
    return [message.headers.get("id", "") for message in map(channel.message_to_python, found)]


def worker_without_the_tasks(rig: Rig) -> WorkerProcess:
    """A worker of an older release: it knows only the steps, so everything else is an unknown task to it."""
    return Broker.worker(rig, name="old")


def perish(rig: Rig, app: InferenceApp, numbers: Sequence[int], name: str = "add") -> list[str]:
    """Submit tasks to a worker that does not know them, and wait until all are dead letters."""
    before = depth(inference_of(app))
    report = task(app, name).submit_many([(number, 1) for number in numbers])
    assert not report.refused
    with worker_without_the_tasks(rig):
        until(lambda: depth(inference_of(app)) == before + len(numbers), "all are dead")
    return [handle.id for handle in report.accepted]


def run(steps: Any) -> Any:
    """Work off a replay or a drop and return its last tally."""
    return list(steps)[-1]
