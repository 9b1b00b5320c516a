"""What every benchmark needs: private servers, workers, backlogs, the hand-over log, and the report."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from inference_tasks.inference_app import InferenceApp
from inference_tasks.task import InferenceTask
from tests.support.processes import WorkerProcess
from tests.support.servers import RabbitMQNode, RedisNode

__all__ = ["Bench", "Report", "Start", "app_for", "quantile", "starts", "task_of", "wait_until"]

APP = "tests.benchmarks.tasks:app"
OUT = Path("build/bench")


class Start(NamedTuple):
    """One hand-over to the pool, as its worker logged it. Times on that worker's monotonic clock, in seconds."""

    at_s: float
    tier: str
    task_id: str
    held_s: float
    cost_s: float


def quantile(values: list[float], ratio: float) -> float:
    """Return the smallest value that at least ``ratio`` of all do not exceed; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(ratio * len(ordered)))]


@dataclass
class Report:
    """Figures and bars of one benchmark; a bar that falls short is reported, not hidden."""

    name: str
    figures: dict[str, object] = field(default_factory=dict)
    bars: dict[str, dict[str, object]] = field(default_factory=dict)

    def bar(self, what: str, value: float, limit: str, *, ok: bool) -> None:
        """Hold a value against a stated bound, such as ``">= 1.0"``."""
        self.bars[what] = {"value": round(value, 4), "limit": limit, "ok": ok}
        print(f"  {'ok ' if ok else 'NOT'} {what}: {value:.4g} ({limit})", file=sys.stderr)

    def say(self, text: str) -> None:
        """Tell the reader where the benchmark is."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Write the file and print the JSON line."""
        # With other work on the machine, only ratios say anything: the load average tells.
        load = os.getloadavg()[1]
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}"
        line = json.dumps({"name": self.name, "machine": machine, "figures": self.figures, "bars": self.bars})
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / f"{self.name}.json").write_text(line + "\n")
        print(line)


class Bench:
    """Private RabbitMQ and Redis nodes for the time of one benchmark, and what runs on them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._count = 0

    def __enter__(self) -> Self:
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="inference-bench-")))
        self.rabbitmq = self._stack.enter_context(RabbitMQNode())
        self.redis = self._stack.enter_context(RedisNode())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def setting(self, **settings: object) -> dict[str, str]:
        """Return the environment of one scenario: a vhost and a namespace of its own, and these settings."""
        self._count += 1
        log = self.directory / f"starts-{self._count}"
        log.mkdir()
        namespace = f"bench{self._count}"
        environment = {
            "INFERENCE_NAMESPACE": namespace,
            "INFERENCE_BROKER__URL": self.rabbitmq.create_vhost(namespace),
            "INFERENCE_BROKER__MANAGEMENT_URL": self.rabbitmq.management_url,
            "INFERENCE_STATE__URL": self.redis.url(),
            "BENCH_STARTS": str(log),
        }
        return environment | {f"INFERENCE_{key.upper()}": str(value) for key, value in settings.items()}

    def purge(self, namespace: str, *queues: str) -> None:
        """Empty queues in the vhost of a scenario."""
        for queue in queues:
            self.rabbitmq.api("DELETE", f"/api/queues/{namespace}/{queue}/contents")

    @contextmanager
    def workers(
        self, environment: Mapping[str, str], count: int = 1, *options: str, app: str = APP, name: str = "w"
    ) -> Iterator[list[WorkerProcess]]:
        """Run ``count`` workers; each drains at the end. Two groups at once need two names."""
        workers: list[WorkerProcess] = []
        try:
            for number in range(count):
                worker = WorkerProcess.celery(
                    app, *options, directory=self.directory, env=environment, name=f"{name}{self._count}-{number}"
                )
                workers.append(worker)
                worker.start()
            for worker in workers:
                worker.wait_ready()
            yield workers
        finally:
            # All at once: each takes a second or two.
            with ThreadPoolExecutor(count) as closers:
                list(closers.map(lambda worker: worker.close(30.0), workers))


def app_for(environment: Mapping[str, str]) -> InferenceApp:
    """Return an app with the tasks of ``tests.benchmarks.tasks`` in this process, set up for one scenario."""
    for key in [key for key in os.environ if key.startswith(("INFERENCE_", "BENCH_"))]:
        del os.environ[key]
    os.environ.update(environment)
    from tests.benchmarks.tasks import make_app

    return make_app()


def task_of(app: InferenceApp, name: str) -> InferenceTask[..., object]:
    """Return one of the app's tasks as what it is; Celery's registry knows only its own kind."""
    task = app.tasks[name]
    assert isinstance(task, InferenceTask), task
    return task


def starts(environment: Mapping[str, str]) -> dict[str, list[Start]]:
    """Return every worker's hand-overs in their order: {worker's process id: starts}."""
    logs: dict[str, list[Start]] = {}
    for file in sorted(Path(environment["BENCH_STARTS"]).iterdir()):
        rows = [row.split() for row in file.read_text().splitlines() if row.endswith("\t")]
        if not rows:
            continue
        costs = {row[2]: float(row[3]) for row in rows if row[0] == "freed"}
        logs[file.name] = [
            Start(float(row[1]), row[3], row[2], float(row[4]), costs.get(row[2], float("nan")))
            for row in rows
            if row[0] == "taken"
        ]
    return logs


def wait_until(reached: object, timeout_s: float, what: str) -> None:
    """Poll a condition a few times a second."""
    assert callable(reached)
    end = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.05)
