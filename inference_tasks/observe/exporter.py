"""What the two kinds of ``--metrics-port`` tell: each worker of its own work, the maintenance worker of the fleet."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import TYPE_CHECKING

from inference_tasks.errors import BrokerUnavailableError, InferenceError
from inference_tasks.observe import fleet as fleet_view
from inference_tasks.observe.events import subscribe, unsubscribe
from inference_tasks.observe.exposition import Address, MetricsServer
from inference_tasks.observe.fleet_metrics import FLEET_METRICS, Reading
from inference_tasks.observe.metrics import EVENT_METRICS, Family, Metric, Recorder

if TYPE_CHECKING:
    from inference_tasks.app import Inference
    from inference_tasks.observe.fleet import Fleet

__all__ = ["EXPORTER_METRICS", "WORKER_INFO", "FleetExporter", "WorkerExporter", "catalogue"]

log = logging.getLogger(__name__)

EVERY_S = 2.0
#: A look at the fleet that is older than this is not told any more.
STALE_S = 15.0
#: Over which the deepest depth is kept; longer than the usual time between two scrapes.
WINDOW_S = 60.0

WORKER_INFO = Metric(
    "inference_worker_info",
    "gauge",
    "Always 1; the labels say what the worker is.",
    ("gpu", "pool", "version"),
)
EXPORTER_METRICS = (
    Metric(
        "inference_exporter_up",
        "gauge",
        "1 while the server can be read; without it there is no other metric of the fleet.",
        ("server",),
        told_by="maintenance",
    ),
    Metric(
        "inference_exporter_read_seconds",
        "gauge",
        "How long the last look at the fleet took.",
        (),
        told_by="maintenance",
    ),
)


def catalogue() -> tuple[Metric, ...]:
    """Return every metric of the two: of events, of the workers, of the fleet."""
    return (*EVENT_METRICS, WORKER_INFO, *EXPORTER_METRICS, *FLEET_METRICS)


class WorkerExporter:
    """Counts what one worker does, from the moment that it is made, and tells it."""

    def __init__(self, address: Address, *, gpu: str | None, pool: str, version: str) -> None:
        """Take the port and begin to count.

        Raises:
            DeploymentError: the port cannot be had.
        """
        self._recorder = Recorder(metric for metric in EVENT_METRICS if metric.told_by == "worker")
        self._info = WORKER_INFO.family([((gpu or "", pool, version), 1.0)])
        self.server = MetricsServer(address, self, lambda: None)
        subscribe(self._recorder)
        self.server.start()

    def collect(self) -> Iterator[Family]:
        """Return what is told now."""
        yield self._info
        yield from self._recorder.collect()

    def close(self) -> None:
        """Count no more, and give the port back."""
        unsubscribe(self._recorder)
        self.server.close()


class FleetExporter(threading.Thread):
    """Looks at the fleet every two seconds, and tells what it has seen last: a scrape waits for no server.

    Looks, and does not wait to be asked, so that a queue that is full for a moment between two scrapes is seen.
    """

    def __init__(self, inference: Inference, address: Address, *, every_s: float = EVERY_S) -> None:
        """Take the port; nothing is read before ``start``.

        Raises:
            DeploymentError: the port cannot be had.
        """
        super().__init__(name="inference-fleet", daemon=True)
        self._inference = inference
        self._every_s = every_s
        self._recorder = Recorder(metric for metric in EVENT_METRICS if metric.told_by == "maintenance")
        self._depths = inference.depths()
        self._stopped = threading.Event()
        self._fleet: Fleet | None = None
        self._stale_writes = 0
        self._read_at_s = float("-inf")
        self._read_s = 0.0
        self._up = {"broker": False, "state": False}
        self._fresh: deque[tuple[float, Mapping[str, int]]] = deque()
        self.server = MetricsServer(address, self, self._health)

    def start(self) -> None:
        """Begin to look, to count the events of this process, and to answer."""
        subscribe(self._recorder)
        super().start()
        self.server.start()

    def stop(self) -> None:
        """End it, and give the port back."""
        self._stopped.set()
        unsubscribe(self._recorder)
        self.server.close()
        self.join(timeout=5.0)
        self._depths.close()

    def run(self) -> None:
        """Look again and again, until it is stopped."""
        while not self._stopped.is_set():
            self.look()
            self._stopped.wait(self._every_s)

    def look(self) -> None:
        """Look once."""
        began_s = monotonic()
        try:
            fleet = fleet_view.read(self._inference, self._depths)
            stale_writes = self._inference.store.stale_writes()
        except InferenceError as exc:
            if all(self._up.values()):
                log.warning("the fleet cannot be seen: %s", exc)
            # The broker is asked first.
            is_broker = isinstance(exc, BrokerUnavailableError)
            self._up = {"broker": not is_broker, "state": is_broker and self._has_state()}
            return
        except Exception:
            log.exception("the fleet cannot be seen")
            return
        now_s = monotonic()
        self._fresh.append((now_s, {tier.tier: tier.ready_by_lane.get("fresh", 0) for tier in fleet.tiers}))
        while self._fresh[0][0] < now_s - WINDOW_S:
            self._fresh.popleft()
        self._fleet, self._stale_writes, self._read_at_s = fleet, stale_writes, now_s
        self._read_s = now_s - began_s
        self._up = {"broker": True, "state": True}

    def _has_state(self) -> bool:
        try:
            self._inference.store.server_time_s()
        except InferenceError:
            return False
        return True

    def collect(self) -> Iterator[Family]:
        """Return what is told now."""
        up, took = EXPORTER_METRICS
        yield up.family(((server,), float(is_up)) for server, is_up in self._up.items())
        yield took.family([((), self._read_s)])
        yield from self._recorder.collect()
        fleet = self._fleet
        if fleet is None or monotonic() - self._read_at_s > STALE_S:
            return
        reading = Reading(
            fleet=fleet,
            settings=self._inference.settings,
            deepest=self._deepest(),
            stale_writes=self._stale_writes,
        )
        for metric in FLEET_METRICS:
            yield metric.family(metric.read(reading))

    def _deepest(self) -> dict[str, int]:
        deepest: dict[str, int] = {}
        for _, depths in list(self._fresh):
            for tier, depth in depths.items():
                deepest[tier] = max(deepest.get(tier, 0), depth)
        return deepest

    def _health(self) -> str | None:
        down = [server for server, is_up in self._up.items() if not is_up]
        if down:
            return f"no answer from: {', '.join(down)}"
        return None if monotonic() - self._read_at_s <= STALE_S else "the fleet has not been seen for a while"
