"""The brokers behind one handle: what a test of the broker contract submits to and looks at."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kombu import Connection

from inference_tasks import InferenceApp
from inference_tasks.app import Inference, inference_of
from inference_tasks.broker.messages import Outcome, Outgoing, Properties
from tests.support.history import History
from tests.support.processes import WorkerProcess
from tests.support.tier_app import OPTIONS_VARIABLE, make_app

_POLL_S = 0.01
# How long a test waits for what must come: it costs nothing where it comes soon, and a slow machine needs it.
PATIENCE_S = 60.0


def until(reached: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: It did not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Gate:
    """What a gated task waits for."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> None:
        self.path.touch()


@dataclass
class Broker:
    """One broker with a namespace of the test's own.

    `is_exact`: the bound is never exceeded, not even by one message. `environment`: what the processes need beside
    the options.
    """

    options: Mapping[str, Any]
    history: History
    directory: Path
    is_exact: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    _apps: list[InferenceApp] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return str(self.options["namespace"])

    def app(self, **options: Any) -> InferenceApp:
        """The application in this process; further options by section are added to those of the broker."""
        merged = self._merged(options)
        app = make_app(merged)
        self._apps.append(app)
        return app

    def worker(self, *arguments: str, name: str = "worker", **options: Any) -> WorkerProcess:
        """A worker process with the same options; one slot of the prefork pool unless the arguments say otherwise."""
        return WorkerProcess.celery(
            "tests.support.tier_app",
            *(arguments or ("--concurrency", "1")),
            directory=self.directory,
            env={OPTIONS_VARIABLE: json.dumps(self._merged(options)), **self.history.env, **self.environment},
            name=name,
        )

    def gate(self, name: str = "gate") -> Gate:
        return Gate(self.directory / name)

    def _merged(self, options: Mapping[str, Any]) -> dict[str, Any]:
        merged = dict(self.options)
        for section, values in options.items():
            merged[section] = {**merged.get(section, {}), **values}
        return merged

    def close(self) -> None:
        for app in self._apps:
            inference_of(app).publisher.close()
            inference_of(app).store.close()
            cast(Any, app.backend).client.close()


def step(app: InferenceApp, tier: str) -> Any:
    """The tier's task that naps; Celery's stubs know nothing of options of ours."""
    return app.tasks[f"step.{tier}"]


def gated(app: InferenceApp, tier: str) -> Any:
    """The tier's task that waits for a gate."""
    return app.tasks[f"gated.{tier}"]


def depth(app: InferenceApp, tier: str, lane: str = "fresh") -> int:
    """How many messages wait in one queue."""
    return depths(app)[inference_of(app).topology.queue(tier, lane).name]


def depths(app: InferenceApp) -> dict[str, int]:
    """How many messages wait in each queue."""
    counter = inference_of(app).depths()
    try:
        return counter.of(inference_of(app).topology)
    finally:
        counter.close()


def publish_raw(app: InferenceApp, tier: str, body: bytes, headers: Mapping[str, Any], **properties: Any) -> Outcome:
    """Put a message into a tier's queue past everything that would check it."""
    inference = inference_of(app)
    queue = inference.topology.queue(tier).name
    outgoing = Outgoing(body, inference.settings.namespace, queue, Properties(headers=headers, **properties))
    return inference.publisher.send(outgoing)


def dead_letters(app: InferenceApp, count: int, timeout_s: float = PATIENCE_S) -> list[Any]:
    """Take `count` messages out of the dead-letter queue, waiting for them."""
    return taken_from(app, inference_of(app).topology.dead.name, count, timeout_s)


def taken_from(app: InferenceApp, queue: str, count: int, timeout_s: float = PATIENCE_S) -> list[Any]:
    """Take `count` messages out of a queue, waiting for them."""
    inference: Inference = inference_of(app)
    taken: list[Any] = []
    with Connection(cast(str, inference.settings.broker.url)) as connection:
        channel: Any = connection.default_channel

        def take() -> bool:
            message = channel.basic_get(queue, no_ack=True)
            if message is not None:
                taken.append(message)
            return len(taken) >= count

        until(take, f"{count} messages in {queue}", timeout_s)
    return taken


def reasons(messages: Sequence[Any]) -> list[str]:
    """Why each dead letter is one."""
    return [message.headers["inference_dead"]["reason"] for message in messages]
