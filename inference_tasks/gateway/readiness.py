"""Whether the broker and Redis answer, and what the tiers are doing: looked up once for all who ask in a second."""

from __future__ import annotations

import asyncio
import logging
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

log = logging.getLogger(__name__)

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
        self._publisher = inference.publisher
        self._is_declared = False
        # A connection attempt, and one question more on a connection that turns out to be dead.
        self._patience_s = 2 * inference.settings.broker.connect_timeout_s
        self._tiers = _Shared(self._ask_tiers)
        self._missing = _Shared(self._ask_missing)
        self._told: dict[str, str] = {}

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
        self._tell({name: str(answer) for name, answer in found.items()})
        # The errors name addresses and users; who asks here needs no key.
        return dict.fromkeys(found, "does not answer")

    def _tell(self, why: dict[str, str]) -> None:
        """Write into the log what is new."""
        if why == self._told:
            return
        self._told = why
        if why:
            log.warning("Tasks cannot be accepted now: %s", "; ".join(f"{name}: {text}" for name, text in why.items()))
        else:
            log.info("Tasks can be accepted again")

    async def _ask_broker(self) -> None:
        if not self._is_declared:
            await self._in_time(self._declare)
        queue = self._inference.topology.queues[0].name
        await self._in_time(lambda: self._depths.of_queues([queue]))

    def _declare(self) -> None:
        """Declare the queues; otherwise the first request would wait for it, some hundred round trips."""
        self._inference.declare_topology()
        self._publisher.topology_exists()
        self._is_declared = True

    async def _ask_state(self) -> None:
        await self._store.ping()

    async def _in_time(self, ask: Callable[[], T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.to_thread(ask), self._patience_s)
        except TimeoutError:
            raise BrokerUnavailableError("it does not answer in time") from None
