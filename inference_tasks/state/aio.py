"""The calls of the state store that are made on an asyncio loop: the publisher's and the gateway's."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from inference_tasks.state import keys, packing, submits
from inference_tasks.state.batches import Batches
from inference_tasks.state.calling import DEFAULT_NAMESPACE
from inference_tasks.state.records import NewTask, SubmitAnswer, TaskRecord
from inference_tasks.state.scenes import Scene, scene_call, unpack_scene
from inference_tasks.state.script import AsyncCommands, as_text, load, translated
from inference_tasks.state.store import UNFINISHED_TTL_S, plain_url

__all__ = ["AsyncTaskStore", "async_store"]

T = TypeVar("T")

CONNECTIONS_MAX = 16


class AsyncTaskStore:
    """Makes, takes back and reads records as ``TaskStore`` does, on a ``redis.asyncio`` client."""

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
        self._bounds = submits.pack_bounds(bounds or {})
        self._counted_keys = (keys.accounts(prefix), keys.away(prefix))
        self._ready = keys.ready(prefix, namespace)
        self._confirmed = load("confirmed")
        self._retract = load("retract")
        self._get = load("get")
        self._enter = load("enter")

    def batches(self) -> Batches:
        """Return the batches beside the records, on the same connections."""
        return Batches(self._client, self.prefix, self._unfinished_ttl_s)

    async def submit(self, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        """As ``TaskStore.submit``."""
        by_script = submits.parted(tasks)
        answers = {script: await self._make(script, found) for script, found in by_script.items()}
        return submits.brought_together(tasks, answers)

    async def _make(self, script: str, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        names, packed = submits.pack_submit(self.prefix, tasks, script=script)
        args: list[str | int] = [self._ready, self._unfinished_ttl_s, self._bounds, *packed]
        return submits.unpack_submit(await load(script).call_async(self._client, (*self._counted_keys, *names), args))

    async def confirmed(self, task_ids: Iterable[str]) -> None:
        """As ``TaskStore.confirmed``."""
        names = [keys.task(self.prefix, task_id) for task_id in task_ids]
        if names:
            await self._confirmed.call_async(self._client, names, ())

    async def retract(self, task_ids: Iterable[str], nonce: str, refused: str = "") -> int:
        """As ``TaskStore.retract``."""
        names = [keys.task(self.prefix, task_id) for task_id in task_ids]
        if not names:
            return 0
        args = (self._ready, nonce, refused)
        reply = await self._retract.call_async(self._client, (*self._counted_keys, *names), args)
        return int(reply)

    async def get_many(self, task_ids: Sequence[str]) -> list[TaskRecord | None]:
        """As ``TaskStore.get_many``."""
        if not task_ids:
            return []
        names = [keys.task(self.prefix, task_id) for task_id in task_ids]
        reply = as_text(await self._get.call_async(self._client, names, packing.RECORD_FIELDS))
        lines = reply.split(packing.RECORD)
        return [packing.unpack_record(task_id, line) for task_id, line in zip(task_ids, lines, strict=True)]

    async def scene(self, task_id: str, queues: Sequence[str]) -> Scene | None:
        """As ``TaskStore.scene``."""
        names, args = scene_call(self.prefix, task_id, queues)
        return unpack_scene(await load("scene").call_async(self._client, names, args), task_id, queues)

    async def document(self, task_id: str) -> str | None:
        """Return Celery's result document of a task as JSON; None where there is none."""
        reply = await _answer(self._client.execute_command("GET", keys.result(self.prefix, task_id)))
        return None if reply is None else as_text(reply)

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones."""
        pool = getattr(self._client, "connection_pool", None)
        if pool is not None:
            await pool.disconnect()

    async def ping(self) -> None:
        """Ask whether Redis answers.

        Raises:
            StateUnavailableError: it does not.
        """
        await _answer(self._client.execute_command("PING"))

    async def enter(self, key_id: str, task_id: str, limit: int) -> bool:
        """Count a task among those that the holder of an API key has under way; False if it has ``limit`` of them."""
        name = keys.holder(self.prefix, key_id)
        return int(await self._enter.call_async(self._client, (name,), (task_id, limit, self._unfinished_ttl_s))) == 1

    async def entered(self, key_id: str, limit: int) -> list[tuple[str, float]]:
        """Return the first ``limit`` tasks that count as under way, and since when, the oldest first."""
        name = keys.holder(self.prefix, key_id)
        reply = await _answer(self._client.execute_command("ZRANGE", name, 0, limit - 1, "WITHSCORES"))
        # Pairs, or one after the other, as the version of the client has it.
        flat = [part for pair in reply for part in (pair if isinstance(pair, list | tuple) else (pair,))]
        return [(as_text(one), float(as_text(at_s))) for one, at_s in zip(flat[::2], flat[1::2], strict=True)]

    async def leave(self, key_id: str, task_ids: Sequence[str]) -> None:
        """Count tasks no longer among those under way."""
        if task_ids:
            await _answer(self._client.execute_command("ZREM", keys.holder(self.prefix, key_id), *task_ids))


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except RedisError as error:
        raise translated(error) from error


def async_store(
    url: str,
    prefix: str = keys.DEFAULT_PREFIX,
    *,
    socket_timeout_s: float = 2.0,
    connections_max: int = CONNECTIONS_MAX,
) -> AsyncTaskStore:
    """Return a store with a pool of its own; nothing is connected before the first call.

    Args:
        connections_max: how many calls may be under way at a time; more of them wait for a free connection.
    """
    options: dict[str, Any] = {
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": socket_timeout_s,
        # As the store for threads: a lost connection is tried once more at once, a time-out is not.
        "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    }
    pool: Any = BlockingConnectionPool.from_url(
        plain_url(url), max_connections=connections_max, timeout=socket_timeout_s, **options
    )
    return AsyncTaskStore(Redis(connection_pool=pool), prefix)
