"""The two calls of the state store that the publisher makes, for an asyncio loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from inference_tasks.state import keys, packing
from inference_tasks.state.calling import DEFAULT_NAMESPACE
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
        namespace: str = DEFAULT_NAMESPACE,
        bounds: Mapping[str, int] | None = None,
    ) -> None:
        self.prefix = prefix
        self._client = client
        self._unfinished_ttl_s = max(1, int(unfinished_ttl_s))
        self._bounds = packing.pack_bounds(bounds or {})
        self._counted_keys = (keys.accounts(prefix), keys.away(prefix))
        self._ready = keys.ready(prefix, namespace)
        self._submit = load("submit")
        self._retract = load("retract")

    async def submit(self, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        """As ``TaskStore.submit``."""
        if not tasks:
            return []
        names, packed = packing.pack_submit(self.prefix, tasks)
        args: list[str | int] = [self._ready, self._unfinished_ttl_s, self._bounds, *packed]
        return packing.unpack_submit(await self._submit.call_async(self._client, (*self._counted_keys, *names), args))

    async def retract(self, task_ids: Iterable[str], nonce: str) -> int:
        """As ``TaskStore.retract``."""
        names = [keys.task(self.prefix, task_id) for task_id in task_ids]
        if not names:
            return 0
        reply = await self._retract.call_async(self._client, (*self._counted_keys, *names), (self._ready, nonce))
        return int(reply)
