"""Whether the broker and Redis answer, and what the tiers are doing: looked up once for all who ask in a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from inference_tasks.app import Inference
from inference_tasks.errors import BrokerUnavailableError, InferenceError
from inference_tasks.gateway.waiting import Waiters
from inference_tasks.observe.tiers import TierReport, report
from inference_tasks.state.aio import AsyncTaskStore

__all__ = ["Readiness"]

T = TypeVar("T")

KEPT_S = 1.0


class _Shared(Generic[T]):
    """The answer to a question, asked by one on behalf of all, and kept for a moment."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[T] | None = None
        self._answered_at_s = float("-inf")

    async def get(self) -> T:
        asking = self._asking
        is_old = asking is None or (asking.done() and time.monotonic() - self._answered_at_s >= KEPT_S)
        if asking is None or is_old:
            asking = self._asking = asyncio.create_task(self._asked())
        return await asyncio.shield(asking)

    async def _asked(self) -> T:
        try:
            return await self._ask()
        finally:
            self._answered_at_s = time.monotonic()


class Readiness:
    """Asks the broker in a thread, over one connection that stays open."""

    def __init__(self, inference: Inference, store: AsyncTaskStore, waiters: Waiters) -> None:
        self._inference = inference
        self._store = store
        self._waiters = waiters
        self._depths = inference.depths()
        # A connection attempt, and one question more on a connection that turns out to be dead.
        self._patience_s = 2 * inference.settings.broker.connect_timeout_s
        self._tiers = _Shared(self._ask_tiers)
        self._missing = _Shared(self._ask_missing)

    async def tiers(self) -> list[TierReport]:
        """Return what each tier is doing.

        Raises:
            BrokerUnavailableError, StateUnavailableError: one of them does not answer.
        """
        return await self._tiers.get()

    async def missing(self) -> dict[str, str]:
        """Return {part: why it cannot be used}; nothing if the gateway can accept tasks."""
        return await self._missing.get()

    async def close(self) -> None:
        """Close the connection."""
        await asyncio.to_thread(self._depths.close)

    async def _ask_tiers(self) -> list[TierReport]:
        return await self._in_time(lambda: report(self._inference, self._depths))

    async def _ask_missing(self) -> dict[str, str]:
        asked = (("broker", self._ask_broker()), ("state", self._ask_state()))
        answers = await asyncio.gather(*(one for _, one in asked), return_exceptions=True)
        found = {name: answer for (name, _), answer in zip(asked, answers, strict=True) if answer is not None}
        for answer in found.values():
            if not isinstance(answer, InferenceError):
                raise answer
        # The errors name addresses and users; who asks here needs no key.
        return dict.fromkeys(found, "does not answer")

    async def _ask_broker(self) -> None:
        queue = self._inference.topology.queues[0].name
        await self._in_time(lambda: self._depths.of_queues([queue]))

    async def _ask_state(self) -> None:
        await self._store.ping()

    async def _in_time(self, ask: Callable[[], T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.to_thread(ask), self._patience_s)
        except TimeoutError:
            raise BrokerUnavailableError("it does not answer in time") from None
