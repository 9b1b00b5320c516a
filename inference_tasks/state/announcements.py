"""Hearing of the ends of tasks: one connection to Redis for everybody in a process who waits."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from inference_tasks.errors import StateUnavailableError
from inference_tasks.state import keys
from inference_tasks.state.store import plain_url

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

__all__ = ["Announcements"]

logger = logging.getLogger(__name__)

PING_EVERY_S = 5.0
PAUSE_LONGEST_S = 2.0
CHANNELS_AT_ONCE = 500


class Announcements:
    """Subscribes to the channels on which the results of single tasks are announced.

    not a pattern: that would bring every result of every task to every process.

    A lost connection is opened again, and every channel is subscribed to again. What was announced in between is
    lost, so ``on_gap`` tells of which tasks that may be: whoever waits for one of them looks at its record.
    A line that went silent counts as lost after two pings.

    Attributes:
        is_up: whether the connection stands.
        gaps: how often it was lost.
    """

    def __init__(
        self,
        url: str,
        prefix: str = keys.DEFAULT_PREFIX,
        *,
        on_announced: Callable[[str], None],
        on_gap: Callable[[str], None],
        timeout_s: float = 2.0,
        ping_every_s: float = PING_EVERY_S,
    ) -> None:
        """Prepare; nothing is connected before ``run``.

        Args:
            on_announced: called with the id of a task of which something was announced.
            on_gap: called with the id of a task that is subscribed to again, once that is confirmed.
            timeout_s: longest wait for a connection, and for a subscription to be confirmed.
        """
        self.is_up = False
        self.gaps = 0
        self._prefix = prefix
        self._on_announced = on_announced
        self._on_gap = on_gap
        self._timeout_s = timeout_s
        self._ping_every_s = ping_every_s
        # Its pool makes the connection as the address says; retries are this class's own business.
        options: dict[str, Any] = {"protocol": 2, "retry": Retry(NoBackoff(), 0)}
        self._client = Redis.from_url(plain_url(url), socket_timeout=None, socket_connect_timeout=timeout_s, **options)
        self._connection: AbstractConnection | None = None
        self._confirmed_by_id: dict[str, asyncio.Future[None]] = {}
        self._id_by_channel: dict[bytes, str] = {}
        self._to_send: list[tuple[str, str]] = []
        self._has_to_send = asyncio.Event()
        self._missed: set[str] = set()
        self._is_answered = False

    async def add(self, task_id: str) -> None:
        """Subscribe, and return once Redis has confirmed it: what is announced from then on is heard.

        Raises:
            StateUnavailableError: Redis is away. The subscription stays wanted until ``drop``.
        """
        confirmed = self._confirmed_by_id.get(task_id)
        if confirmed is None:
            confirmed = asyncio.get_running_loop().create_future()
            self._confirmed_by_id[task_id] = confirmed
            self._id_by_channel[keys.result(self._prefix, task_id).encode()] = task_id
            self._say("SUBSCRIBE", task_id)
        while True:
            try:
                await asyncio.wait_for(asyncio.shield(confirmed), self._timeout_s)
            except TimeoutError:
                # While the line stands it is this process that is slow; that the line does not is found by the pings.
                if not self.is_up:
                    raise StateUnavailableError("a subscription was not confirmed in time") from None
            else:
                return

    def drop(self, task_id: str) -> None:
        """Unsubscribe."""
        if self._confirmed_by_id.pop(task_id, None) is not None:
            self._missed.discard(task_id)
            self._id_by_channel.pop(keys.result(self._prefix, task_id).encode(), None)
            self._say("UNSUBSCRIBE", task_id)

    async def run(self) -> None:
        """Keep the connection, for as long as this is not cancelled."""
        failures = 0
        while True:
            try:
                await self._connect()
                failures = 0
                await self._serve()
            except (RedisError, OSError, TimeoutError) as error:
                if self.is_up or not failures:
                    logger.warning("The line on which Redis tells of finished tasks is lost: %s", error)
                failures += 1
            finally:
                was_up, self.is_up = self.is_up, False
                self.gaps += was_up
                connection, self._connection = self._connection, None
                if connection is not None:
                    await connection.disconnect(nowait=True)
            # Chance, so that many processes do not come back at once.
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(0.1 * 2.0**failures, PAUSE_LONGEST_S))

    def _say(self, verb: str, task_id: str) -> None:
        self._to_send.append((verb, task_id))
        self._has_to_send.set()

    async def _connect(self) -> None:
        connection = self._client.connection_pool.make_connection()
        self._connection = connection
        await asyncio.wait_for(connection.connect(), self._timeout_s)
        # All that is wanted is subscribed to below.
        self._to_send.clear()
        loop = asyncio.get_running_loop()
        again = [task_id for task_id, confirmed in self._confirmed_by_id.items() if confirmed.done()]
        for task_id in again:
            self._confirmed_by_id[task_id] = loop.create_future()
        self._missed.update(again)
        await self._send("SUBSCRIBE", list(self._confirmed_by_id))
        self._is_answered = True
        self.is_up = True
        if again:
            logger.info("The line to Redis stands again; %d tasks are waited for", len(again))

    async def _serve(self) -> None:
        parts = [asyncio.create_task(part) for part in (self._read(), self._write(), self._ping())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _read(self) -> None:
        assert self._connection is not None
        while True:
            reply: Any = await self._connection.read_response()
            self._is_answered = True
            if isinstance(reply, list) and len(reply) > 1:
                self._heard(bytes(reply[0]), bytes(reply[1]))

    def _heard(self, kind: bytes, channel: bytes) -> None:
        task_id = self._id_by_channel.get(channel)
        if task_id is None:
            return
        if kind == b"message":
            self._on_announced(task_id)
        elif kind == b"subscribe":
            confirmed = self._confirmed_by_id[task_id]
            if not confirmed.done():
                confirmed.set_result(None)
                if task_id in self._missed:
                    self._missed.discard(task_id)
                    self._on_gap(task_id)

    async def _write(self) -> None:
        while True:
            await self._has_to_send.wait()
            self._has_to_send.clear()
            said, self._to_send = self._to_send, []
            # The last word on each id counts; what was said before it has no effect.
            verbs = {task_id: verb for verb, task_id in said}
            for verb in ("UNSUBSCRIBE", "SUBSCRIBE"):
                await self._send(verb, [task_id for task_id, last in verbs.items() if last == verb])

    async def _send(self, verb: str, task_ids: Sequence[str]) -> None:
        assert self._connection is not None
        for start in range(0, len(task_ids), CHANNELS_AT_ONCE):
            some = task_ids[start : start + CHANNELS_AT_ONCE]
            await self._connection.send_command(verb, *(keys.result(self._prefix, one) for one in some))

    async def _ping(self) -> None:
        assert self._connection is not None
        while True:
            self._is_answered = False
            await self._connection.send_command("PING")
            await asyncio.sleep(self._ping_every_s)
            if not self._is_answered:
                raise TimeoutError(f"Redis has said nothing for {self._ping_every_s:g} s")
