"""The thread that keeps this worker's claims alive and tells the others that the worker is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.switches import ALL_ON

if TYPE_CHECKING:
    from inference_tasks.state.records import Claimant, Renewal, WorkerBeat
    from inference_tasks.state.switches import Switches

__all__ = ["Leases", "Renewals"]

logger = logging.getLogger(__name__)


class Renewals(Protocol):
    """The part of the task store that this thread uses, on a connection of its own."""

    def renew(
        self,
        running: Sequence[tuple[str, int, Claimant]],
        worker: str,
        lease_s: float,
        heartbeat: WorkerBeat | None = None,
    ) -> Renewal: ...


class Leases(threading.Thread):
    """Renews all claims in one round trip, three times per lease.

    A thread of its own: neither a long hand-over nor a task of the solo pool, which blocks the main thread, may end a
    lease. ``on_state`` tells each time whether the state could be reached; ``on_stopping`` is told which tasks are
    asked to stop, and whether they are to be terminated, as long as they run; ``on_switches`` what operators have
    switched off, whenever that changes. Those switches are forgotten when the state has been away for a lease: nobody
    could take them back.
    """

    def __init__(
        self,
        store: Renewals,
        *,
        worker: str,
        lease_s: float,
        claimed: Callable[[], Sequence[tuple[str, int, Claimant]]],
        beat: Callable[[], WorkerBeat],
        on_state: Callable[[bool], None],
        on_stopping: Callable[[Mapping[str, bool]], None],
        on_switches: Callable[[Switches], None] = lambda switches: None,
        interval_s: float | None = None,
    ) -> None:
        super().__init__(name="inference-leases", daemon=True)
        self._store = store
        self._worker = worker
        self._lease_s = lease_s
        self._claimed = claimed
        self._beat = beat
        self._on_state = on_state
        self._on_stopping = on_stopping
        self._on_switches = on_switches
        self._switches: Switches | None = None
        self._interval_s = interval_s or min(lease_s / 3, 2.0)
        self._stop_event = threading.Event()
        self._hurry = threading.Event()

    def run(self) -> None:
        reachable = True
        lost_before: set[str] = set()
        renewed_s = monotonic()
        while not self._stop_event.is_set():
            try:
                lost, stopping, switches = self._store.renew(self._claimed(), self._worker, self._lease_s, self._beat())
            except StateUnavailableError as exc:
                if reachable:
                    logger.warning("cannot renew the claims of running tasks: %s", exc)
                reachable = False
            except Exception:
                logger.exception("renewing claims failed; it is tried again")
                reachable = False
            else:
                if not reachable:
                    logger.info("claims are renewed again")
                reachable = True
                renewed_s = monotonic()
                self._switched(switches)
                # A task that has just ended is found lost once, before this worker has taken note of its end.
                lost_twice = lost_before.intersection(lost)
                lost_before = set(lost)
                if lost_twice:
                    logger.warning("another worker holds %s now; results from here are refused", ", ".join(lost_twice))
                if stopping:
                    self._on_stopping(stopping)
            if not reachable and monotonic() - renewed_s > self._lease_s:
                self._switched(ALL_ON)
            self._on_state(reachable)
            self._hurry.wait(self._interval_s if reachable else min(1.0, self._interval_s))
            self._hurry.clear()

    def _switched(self, switches: Switches) -> None:
        if switches != self._switches:
            self._switches = switches
            self._on_switches(switches)

    def hurry(self) -> None:
        """Renew (and try the state) at once."""
        self._hurry.set()

    def stop(self) -> None:
        self._stop_event.set()
        self._hurry.set()
