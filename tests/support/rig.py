"""RabbitMQ, Redis and workers of one test of the worker, with its gates."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import psutil
from kombu import Connection

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from tests.support import faulty_app
from tests.support.brokers import PATIENCE_S, Broker, depths, until
from tests.support.history import Entry
from tests.support.processes import WorkerProcess
from tests.support.tier_app import OPTIONS_VARIABLE

POOLS: Mapping[str, tuple[str, ...]] = {
    "prefork": ("--pool", "prefork"),
    "threads": ("--pool", "threads"),
    "solo": ("--pool", "solo"),
}


@dataclass
class Rig(Broker):
    """One namespace on a real broker: the application in this process, workers beside it.

    `worker_options` go to the workers alone: a worker may reach the broker and Redis by another line than the test.
    """

    worker_options: Mapping[str, Any] = field(default_factory=dict)

    def app(self, **options: Any) -> InferenceApp:
        app = faulty_app.make_app(self._merged(options))
        self._apps.append(app)
        return app

    def worker(self, *arguments: str, name: str = "worker", **options: Any) -> WorkerProcess:
        """A worker of the prefork pool with one slot, unless the arguments say otherwise."""
        given = self._merged(options)
        for section, values in self.worker_options.items():
            given[section] = {**given.get(section, {}), **values}
        slots = () if any(one in arguments for one in ("--concurrency", "-c")) else ("--concurrency", "1")
        return WorkerProcess.celery(
            "tests.support.faulty_app",
            *slots,
            *arguments,
            directory=self.directory,
            env={OPTIONS_VARIABLE: json.dumps(given), **self.history.env, **self.environment},
            name=name,
        )

    def env(self, **options: Any) -> dict[str, str]:
        """The environment in which another process has this application."""
        return {OPTIONS_VARIABLE: json.dumps(self._merged(options)), **self.history.env, **self.environment}

    def _merged(self, options: Mapping[str, Any]) -> dict[str, Any]:
        merged = dict(self.options)
        for section, values in options.items():
            merged[section] = {**merged.get(section, {}), **values} if isinstance(values, Mapping) else values
        return merged

    # -- what is seen from outside -------------------------------------------------------------------------------------

    def waiting(self, app: InferenceApp) -> int:
        """Messages that lie in the broker, ready for any worker."""
        return sum(depths(app).values())

    def wait_waiting(self, app: InferenceApp, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until so many messages lie in the broker."""
        until(lambda: self.waiting(app) == count, f"{count} messages wait in the broker", timeout_s)

    def states(self, app: InferenceApp, ids: Sequence[str]) -> Counter[str]:
        """How many of the tasks are in each state."""
        found = inference_of(app).store.get_many(list(ids))
        return Counter(str(record.state) if record else "not found" for record in found)

    def wait_states(self, app: InferenceApp, ids: Sequence[str], timeout_s: float = PATIENCE_S, **wanted: int) -> None:
        """Wait until the tasks are in these states: `success=3`."""
        until(lambda: self.states(app, ids) == wanted, f"{wanted}, not {self.states(app, ids)}", timeout_s)

    def started(self, *numbers: int) -> bool:
        """Whether each of these has started, at least once."""
        return set(numbers) <= set(self.history.values("start", "number"))

    def wait_started(self, *numbers: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until each of these has started."""
        self.history.wait_until(lambda _: self.started(*numbers), timeout_s=timeout_s)

    def wait_known_as_running(self, app: InferenceApp, count: int, node: str = "worker@localhost") -> None:
        """Wait until a prefork worker's main process knows that so many tasks run.

        A task starts a moment before: of one that is on its way into its process when the connection is lost, the
        worker cannot tell whether it has started, and it may start once more.
        """
        inspect: Any = app.control.inspect([node], timeout=PATIENCE_S)
        until(lambda: len((inspect.active() or {}).get(node, ())) == count, f"{count} tasks run")

    def starts(self) -> Counter[Any]:
        """How often each number has started."""
        return self.history.counts("start", "number")

    def dead(self, app: InferenceApp, count: int, timeout_s: float = PATIENCE_S) -> list[Any]:
        """Take up to `count` dead letters: what has come in time."""
        taken: list[Any] = []
        with Connection(cast(str, inference_of(app).settings.broker.url)) as connection:
            channel: Any = connection.default_channel

            def got() -> bool:
                message = channel.basic_get(inference_of(app).topology.dead.name, no_ack=True)
                if message is not None:
                    taken.append(message)
                return len(taken) >= count

            with suppress(TimeoutError):
                until(got, "dead letters", timeout_s)
        return taken

    def take(self, app: InferenceApp, tier: str, lane: str = "fresh", timeout_s: float = PATIENCE_S) -> Any:
        """Take one message out of a queue, waiting for it."""
        return self.take_many(app, tier, 1, lane, timeout_s)[0]

    def take_many(
        self, app: InferenceApp, tier: str, count: int, lane: str = "fresh", timeout_s: float = PATIENCE_S
    ) -> list[Any]:
        """Take messages out of a queue, waiting for each."""
        queue = inference_of(app).topology.queue(tier, lane).name
        taken: list[Any] = []
        with Connection(cast(str, inference_of(app).settings.broker.url)) as connection:
            channel: Any = connection.default_channel

            def got() -> bool:
                while len(taken) < count and (found := channel.basic_get(queue, no_ack=True)) is not None:
                    taken.append(found)
                return len(taken) == count

            until(got, f"{count} messages in {queue}", timeout_s)
        return taken


def task(app: InferenceApp, name: str) -> Any:
    """A task of the application; Celery's stubs know nothing of options of ours."""
    return app.tasks[name]


def most_at_once(entries: Sequence[Entry]) -> int:
    """How many tasks ran at once at the most, by their own starts and ends."""
    running = most = 0
    for entry in sorted(entries, key=lambda one: one.mono_s):
        running += {"start": 1, "end": -1}.get(entry.event, 0)
        most = max(most, running)
    return most


def cpu_s(process: WorkerProcess) -> float:
    """Seconds of CPU that a worker's main process has used."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def connections_lost(process: WorkerProcess) -> int:
    """How often the worker has said that it lost its broker."""
    return len(re.findall(r"Connection to broker lost|consumer: Cannot connect", process.log))
