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

    Remote control (``add_consumer``, ``cancel_consumer``) comes through here too: a queue is served when neither has
    taken it away.

    Attributes:
        state: of the worker, as its heartbeat tells it: ``running``, ``paused`` or ``draining``.
    """

    def __init__(self, dispatcher: Dispatcher, served: Iterable[QueueKey], *, node: str) -> None:
        self._dispatcher = dispatcher
        self._served = tuple(served)
        self._node = node
        self._off: set[str] = set()
        self._taken: set[str] = set()
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
        is_off = own is not None
        self._off = {key.name for key in self._served if is_off or switches.stopped(key.tier, key.lane) is not None}
        for key in self._served:
            self._apply(key.name)
        self._log(switches)

    def serve(self, queue: str, *, on: bool) -> None:
        """Start or stop serving a queue by remote control."""
        (self._taken.discard if on else self._taken.add)(queue)
        self._apply(queue)

    def _apply(self, queue: str) -> None:
        self._dispatcher.serve(queue, on=queue not in self._off and queue not in self._taken)

    def _log(self, switches: Switches) -> None:
        for target in self._switches.by_target.keys() - switches.by_target.keys():
            logger.info("%s is resumed", target)
        for target, switch in switches.by_target.items():
            if self._switches.by_target.get(target) != switch:
                logger.info(
                    "%s: %s by %s%s", target, switch.action, switch.by, switch.because and f": {switch.because}"
                )
        self._switches = switches
