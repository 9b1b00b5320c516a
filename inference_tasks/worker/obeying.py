"""A worker's obedience to switches: it stops serving what is switched off, and all of it if it is itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.switches import ALL_ON, Action

if TYPE_CHECKING:
    from inference_routing.lane import QueueKey
    from inference_tasks.state.store import TaskStore
    from inference_tasks.state.switches import Switches
    from inference_tasks.worker.dispatcher import Dispatcher

__all__ = ["Obedience"]

logger = logging.getLogger(__name__)


class Obedience:
    """Tells the dispatcher which queues not to serve. What runs goes on, what has not started goes back.

    Queues that were taken from this worker by remote control stay off when a switch is taken away.

    Attributes:
        state: of the worker, as its heartbeat tells it: ``running``, ``paused`` or ``draining``.
    """

    def __init__(self, dispatcher: Dispatcher, served: Iterable[QueueKey], *, node: str) -> None:
        self._dispatcher = dispatcher
        self._served = tuple(served)
        self._node = node
        self._off: set[str] = set()
        self._switches = ALL_ON
        self.state = "running"

    def begin(self, store: TaskStore) -> None:
        """Take note before the first message is asked for: a worker that starts takes nothing from what is paused."""
        try:
            self.obey(store.switches())
        except StateUnavailableError as exc:
            logger.warning("what operators have paused is not known yet: %s", exc)

    def obey(self, switches: Switches) -> None:
        """Take note of what is switched off now."""
        own = switches.worker(self._node)
        self.state = "running" if own is None else "draining" if own.action == Action.DRAIN else "paused"
        for key in self._served:
            off = own is not None or switches.stopped(key.tier, key.lane) is not None
            if off == (key.name in self._off):
                continue
            if not off:
                self._off.discard(key.name)
                self._dispatcher.serve(key.name, on=True)
            elif self._dispatcher.serve(key.name, on=False):
                self._off.add(key.name)
        self._log(switches)

    def _log(self, switches: Switches) -> None:
        for target in self._switches.by_target.keys() - switches.by_target.keys():
            logger.info("%s is resumed", target)
        for target, switch in switches.by_target.items():
            if self._switches.by_target.get(target) != switch:
                logger.info(
                    "%s: %s by %s%s", target, switch.action, switch.by, switch.because and f": {switch.because}"
                )
        self._switches = switches
