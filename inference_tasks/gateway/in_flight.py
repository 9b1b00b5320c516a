"""How many tasks the holder of a key has under way."""

from __future__ import annotations

import time
from collections.abc import Callable

from inference_tasks.gateway.keys import ApiKey
from inference_tasks.gateway.problems import ProblemError
from inference_tasks.state.aio import AsyncTaskStore

__all__ = ["InFlight"]

_LOOK_EVERY_S = 0.5
_RECORDS_AT_ONCE = 500
# How long a task may be under way without a record: it is written after the task was counted.
_WITHOUT_RECORD_S = 60.0


class InFlight:
    """Counts tasks under way for each key that has a limit.

    In Redis, so the limit holds across gateways and restarts. Ends are not followed one by one: only when the limit is
    reached, and at most twice a second, are the records looked at and those that have ended counted out.
    """

    def __init__(self, store: AsyncTaskStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._looked_at_s_by_key: dict[str, float] = {}

    async def enter(self, key: ApiKey, task_id: str) -> None:
        """Count one more task.

        Raises:
            ProblemError: 429, there is no room.
            StateUnavailableError: Redis is away.
        """
        limit = key.in_flight_max
        if limit is None or await self._store.enter(key.id, task_id, limit):
            return
        if await self._found_ended(key, limit) and await self._store.enter(key.id, task_id, limit):
            return
        raise ProblemError(
            429,
            "too-many-in-flight",
            "Too many tasks under way",
            f"This key may have {limit} tasks under way; wait until one of them has ended.",
            extensions={"reason": "in_flight", "limit": limit, "retry_after_s": 1.0},
        )

    async def leave(self, key: ApiKey, task_id: str) -> None:
        """Count a task no longer: it was not accepted."""
        if key.in_flight_max is not None:
            await self._store.leave(key.id, [task_id])

    async def _found_ended(self, key: ApiKey, limit: int) -> bool:
        now_s = self._clock()
        if now_s - self._looked_at_s_by_key.get(key.id, -_LOOK_EVERY_S) < _LOOK_EVERY_S:
            return False
        self._looked_at_s_by_key[key.id] = now_s
        entered = await self._store.entered(key.id, limit)
        ended: list[str] = []
        for start in range(0, len(entered), _RECORDS_AT_ONCE):
            some = entered[start : start + _RECORDS_AT_ONCE]
            records = await self._store.get_many([task_id for task_id, _ in some])
            for (task_id, at_s), record in zip(some, records, strict=True):
                is_gone = record is None and time.time() - at_s > _WITHOUT_RECORD_S
                if is_gone or (record is not None and record.is_finished):
                    ended.append(task_id)
        await self._store.leave(key.id, ended)
        return bool(ended)
