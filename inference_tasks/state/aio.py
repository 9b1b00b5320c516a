"""The two calls of the state store that the publisher makes, for an asyncio loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference_tasks.state import keys, packing
from inference_tasks.state.records import NewTask, SubmitAnswer
from inference_tasks.state.script import AsyncCommands, load
from inference_tasks.state.store import UNFINISHED_TTL_S

__all__ = ["AsyncTaskStore"]


class AsyncTaskStore:
    """Makes and takes back records as ``TaskStore`` does, on a ``redis.asyncio`` client."""

    def __init__(
        self,
        client: AsyncCommands,
        prefix: str = keys.DEFAULT_PREFIX,
        *,
        unfinished_ttl_s: float = UNFINISHED_TTL_S,
    ) -> None:
        self.prefix = prefix
        self._client = client
        self._unfinished_ttl_s = max(1, int(unfinished_ttl_s))
        self._submit = load("submit")
        self._retract = load("retract")

    async def submit(self, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        """Make a ``pending`` record for each task that has none; answers in the order of ``tasks``."""
        if not tasks:
            return []
        names, args = packing.pack_submit(self.prefix, tasks, self._unfinished_ttl_s)
        return packing.unpack_submit(await self._submit.call_async(self._client, names, args))

    async def retract(self, task_ids: Iterable[str], nonce: str) -> int:
        """Delete the records that the submission ``nonce`` made and nobody has claimed; return how many."""
        names = [keys.task(self.prefix, task_id) for task_id in task_ids]
        return int(await self._retract.call_async(self._client, names, (nonce,))) if names else 0
