"""Batches: which tasks belong to one upload, and how many of them have ended in which way."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from inference_tasks.state import keys
from inference_tasks.state.packing import FIELD, joined
from inference_tasks.state.records import State
from inference_tasks.state.script import AsyncCommands, as_text, load, translated

__all__ = ["Batch", "BatchLine", "Batches", "line_task_id"]

# mirrors LETTER in batches.lua.
_STATE_BY_LETTER = {
    "s": State.SUCCESS,
    "f": State.FAILED,
    "c": State.CANCELLED,
    "e": State.EXPIRED,
    "d": State.DROPPED,
}
_ENDED = tuple(str(state) for state in _STATE_BY_LETTER.values())
_CUSTOM = uuid.UUID("5f0e6a0c-8a58-4c57-a3a2-0d3c4b1f7e21")


class BatchLine(NamedTuple):
    """A line that was accepted.

    Attributes:
        number: in the upload, from 1.
        custom_id: empty if it has none.
        ended_as: its end state, None before that.
    """

    number: int
    task_id: str
    custom_id: str
    ended_as: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One upload.

    Attributes:
        state: ``uploading``, ``uploaded``, or ``broken``: the client left in its midst.
        lines: that were read; while it is uploaded those accepted so far.
        ended: {end state: how many}. One that failed and is replayed counts as failed until it ends again.
    """

    id: str
    tenant: str | None
    state: str
    created_at_s: float
    lines: int
    accepted: int
    refused: int
    ended: dict[str, int]


def line_task_id(tenant: str | None, custom_id: str) -> str:
    """Return the id of a line's task, always the same one for a ``custom_id``.

    The scripts know tasks of batches by how their ids begin.

    Args:
        custom_id: empty for a new task each time.
    """
    made = uuid.uuid5(_CUSTOM, f"{tenant or ''}\0{custom_id}") if custom_id else uuid.uuid4()
    return f"batch-{made}"


class Batches:
    """The batches in Redis, for an asyncio loop. Lost with Redis; their tasks are not."""

    def __init__(self, client: AsyncCommands, prefix: str, ttl_s: int) -> None:
        self._client = client
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._enlist = load("enlist")

    async def begin(self, batch_id: str, tenant: str | None) -> None:
        """Make an empty batch.

        Raises:
            StateUnavailableError: Redis is away; so do all calls here.
        """
        name = keys.batch(self._prefix, batch_id)
        fields = ("tenant", tenant or "", "state", "uploading", "created_at_s", f"{time.time():.3f}")
        await self._ask("HSET", name, *fields)
        await self._ask("EXPIRE", name, self._ttl_s)

    async def enlist(self, batch_id: str, lines: Sequence[BatchLine]) -> None:
        """Add lines whose tasks have been accepted; from now on their ends count."""
        if not lines:
            return
        own = [make(self._prefix, batch_id) for make in (keys.batch, keys.batch_lines, keys.batch_states)]
        counted = [keys.accounts(self._prefix), keys.away(self._prefix)]
        names = [*counted, *own, *(keys.task(self._prefix, line.task_id) for line in lines)]
        told = [joined(line.number, line.task_id, line.custom_id) for line in lines]
        await self._enlist.call_async(self._client, names, ["", batch_id, self._ttl_s, *told])

    async def end(self, batch_id: str, *, lines: int, refused: int, is_whole: bool) -> None:
        """Note that nothing more comes."""
        fields = ("state", "uploaded" if is_whole else "broken", "lines", lines, "refused", refused)
        await self._ask("HSET", keys.batch(self._prefix, batch_id), *fields)

    async def get(self, batch_id: str) -> Batch | None:
        """Return a batch, None if there is none; the same work however large it is."""
        reply = await self._ask("HGETALL", keys.batch(self._prefix, batch_id))
        pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
        found = {as_text(name): as_text(value) for name, value in pairs}
        if "created_at_s" not in found:
            return None
        accepted = int(found.get("accepted", 0))
        return Batch(
            id=batch_id,
            tenant=found["tenant"] or None,
            state=found["state"],
            created_at_s=float(found["created_at_s"]),
            lines=int(found.get("lines", accepted)),
            accepted=accepted,
            refused=int(found.get("refused", 0)),
            ended={name: int(found.get(name, 0)) for name in _ENDED},
        )

    async def lines(self, batch_id: str, start: int, count: int) -> list[BatchLine]:
        """Return lines in the order of their acceptance, from place ``start`` on."""
        end = start + count - 1
        rows = await self._ask("LRANGE", keys.batch_lines(self._prefix, batch_id), start, end)
        letters = as_text(await self._ask("GETRANGE", keys.batch_states(self._prefix, batch_id), start, end))
        found = []
        for place, row in enumerate(rows):
            number, task_id, custom_id = as_text(row).split(FIELD)
            ended_as = _STATE_BY_LETTER.get(letters[place : place + 1])
            found.append(BatchLine(int(number), task_id, custom_id, ended_as))
        return found

    async def documents(self, task_ids: Sequence[str]) -> list[str | None]:
        """Return Celery's result documents of tasks, None where there is none."""
        if not task_ids:
            return []
        reply = await self._ask("MGET", *(keys.result(self._prefix, task_id) for task_id in task_ids))
        return [None if one is None else as_text(one) for one in reply]

    async def _ask(self, *command: str | int) -> Any:
        try:
            return await self._client.execute_command(*command)
        except RedisError as error:
            raise translated(error) from error
