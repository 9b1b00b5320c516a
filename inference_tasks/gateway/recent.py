"""The tasks that this process has accepted lately, for the page that shows them."""

from __future__ import annotations

from collections import deque

from inference_tasks.gateway.keys import ApiKey
from inference_tasks.state.aio import AsyncTaskStore
from inference_tasks.state.records import TaskRecord

__all__ = ["Recent"]

KEPT = 500
SHOWN = 25


class Recent:
    """Remembers ids, the latest first; what became of them is in their records."""

    def __init__(self, store: AsyncTaskStore) -> None:
        self._store = store
        self._ids: deque[str] = deque(maxlen=KEPT)

    def add(self, task_id: str) -> None:
        """Remember a task that was accepted just now."""
        self._ids.appendleft(task_id)

    async def tasks(self, key: ApiKey) -> list[TaskRecord]:
        """Return the latest ones that a key may see; few or none of them if others have submitted much since.

        Raises:
            StateUnavailableError: Redis is away.
        """
        # What was joined by several submits is there once.
        ids = list(dict.fromkeys(self._ids))
        found: list[TaskRecord] = []
        for start in range(0, len(ids), SHOWN):
            records = await self._store.get_many(ids[start : start + SHOWN])
            found += [one for one in records if one is not None and key.may_see(one.tenant)]
            if len(found) >= SHOWN:
                break
        return found[:SHOWN]
