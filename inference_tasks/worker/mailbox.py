"""Calls left by any thread for the thread of the event loop, and the way to wake it."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from inference_tasks.worker import seam

__all__ = ["Mailbox"]

logger = logging.getLogger(__name__)


class Mailbox:
    """What other threads want done by the loop's own thread, in the order of posting.

    A socket pair wakes the loop. Not Celery's ``hub.call_soon``: what it is given by the loop's own timers and ticks
    waits for the next event, up to a second.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._owner = threading.get_ident()
        self._is_waking = False

    def register(self, hub: Any) -> None:
        """Let the loop watch for wake-ups; again after each reconnect, when it forgets what it watched."""
        hub.add_reader(self._reader, self._woken)

    @property
    def is_owner(self) -> bool:
        """Whether the caller is on the loop's own thread."""
        return threading.get_ident() == self._owner

    def post(self, call: Callable[[], None]) -> None:
        """Have something done soon."""
        self._calls.append(call)
        if not self.is_owner:
            self.wake()

    def wake(self) -> None:
        """Have the loop turn once more without waiting."""
        if not self._is_waking:
            self._is_waking = True
            with suppress(BlockingIOError):  # full: it wakes anyway
                self._writer.send(b"\0")

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            self._reader.recv(4096)
        # After the read: a wake-up between the two is seen by the calls that follow it in the same turn.
        self._is_waking = False

    def wait(self, timeout_s: float) -> None:
        """Wait until something was posted, without the loop; for the end, when it does not turn any more."""
        select.select([self._reader], [], [], timeout_s)
        self._woken()

    def run(self) -> None:
        """Do all that was posted. A call that finds the connection lost has nothing left to do."""
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except seam.CONNECTION_ERRORS as exc:
                logger.debug("the connection was lost before %r: %r", call, exc)
