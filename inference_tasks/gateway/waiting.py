"""Clients that wait: any number of them on one subscription, woken by the id of their task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from inference_tasks.errors import InferenceError
from inference_tasks.state.aio import AsyncTaskStore
from inference_tasks.state.announcements import Announcements
from inference_tasks.state.records import TaskRecord

__all__ = ["Waiters", "Watch", "version_of"]

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_RECORDS_AT_ONCE = 500


def version_of(record: TaskRecord) -> str:
    """Return a text that is another one after every change of a task that a client may see."""
    return f"{record.generation}.{record.attempts}.{record.hop}-{record.tier}-{record.state}"


class Watch:
    """One client's interest in one task."""

    def __init__(self, *, is_looking: bool) -> None:
        self.is_looking = is_looking
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Something may have happened to the task."""
        self._woken.set()

    async def woken(self, timeout_s: float) -> bool:
        """Wait until something may have happened; False if nothing has in time."""
        try:
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        except TimeoutError:
            return False
        self._woken.clear()
        return True


class Waiters:
    """Wakes those who wait.

    The end of a task is announced by Redis, on one connection for all. Its other changes are not: for the watches that
    ask for them all records are looked at once a second, in one round trip for hundreds of them.
    """

    def __init__(self, url: str, store: AsyncTaskStore, *, timeout_s: float) -> None:
        self.announcements = Announcements(
            url, store.prefix, on_announced=self._wake, on_gap=self._wake, timeout_s=timeout_s
        )
        self._store = store
        self._watches_by_id: dict[str, set[Watch]] = {}
        self._version_by_id: dict[str, str] = {}
        self._work: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return sum(map(len, self._watches_by_id.values()))

    def start(self) -> None:
        """Connect, and stay so; in the loop that is running."""
        self._work = [asyncio.create_task(self.announcements.run()), asyncio.create_task(self._look_for_ever())]

    async def stop(self) -> None:
        """Disconnect."""
        for one in self._work:
            one.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._work = []

    def wake_all(self) -> None:
        """Wake everybody: the gateway ends."""
        for task_id in list(self._watches_by_id):
            self._wake(task_id)

    @asynccontextmanager
    async def watch(self, task_id: str, *, is_looking: bool = False) -> AsyncIterator[Watch]:
        """Watch a task. What is announced once this has been entered wakes the watch; earlier ends are in the record.

        Args:
            is_looking: whether other changes than the end wake it too, within a second.

        Raises:
            StateUnavailableError: Redis is away.
        """
        watch = Watch(is_looking=is_looking)
        self._watches_by_id.setdefault(task_id, set()).add(watch)
        try:
            await self.announcements.add(task_id)
            yield watch
        finally:
            watches = self._watches_by_id[task_id]
            watches.discard(watch)
            if not watches:
                del self._watches_by_id[task_id]
                self._version_by_id.pop(task_id, None)
                self.announcements.drop(task_id)

    def _wake(self, task_id: str) -> None:
        for watch in self._watches_by_id.get(task_id, ()):
            watch.wake()

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # While Redis is away its return is noticed by the subscription.
            with suppress(InferenceError):
                await self._look()

    async def _look(self) -> None:
        looked_for = [
            task_id for task_id, watches in self._watches_by_id.items() if any(watch.is_looking for watch in watches)
        ]
        for start in range(0, len(looked_for), _RECORDS_AT_ONCE):
            some = looked_for[start : start + _RECORDS_AT_ONCE]
            for task_id, record in zip(some, await self._store.get_many(some), strict=True):
                version = "" if record is None else version_of(record)
                if task_id in self._watches_by_id and self._version_by_id.get(task_id) != version:
                    self._version_by_id[task_id] = version
                    for watch in self._watches_by_id[task_id]:
                        if watch.is_looking:
                            watch.wake()
