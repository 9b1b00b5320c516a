"""How fast the workers empty the tiers, as a publisher knows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from inference_routing.admission import most_ahead
from inference_tasks.state.records import NewTask

__all__ = ["Rates"]

log = logging.getLogger(__name__)

FRESH_S = 1.0
USABLE_S = 10.0


class Rates:
    """{tier: tasks drained per second}, asked for at most once a second."""

    def __init__(self, ask: Callable[[], Mapping[str, float]] | None) -> None:
        """Know nothing yet.

        Args:
            ask: blocking; called in a thread. None where nobody knows.
        """
        self._ask = ask
        self._known: Mapping[str, float] = {}
        self._asked_at_s = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None

    def of(self, tier: str) -> float | None:
        """Return the rate of a tier, None if it is not known."""
        return self._known.get(tier)

    async def refresh(self, *, may_be_old: bool = False) -> None:
        """Ask, unless that was done just now.

        Args:
            may_be_old: whether what was known some seconds ago will do, while the answer is on its way.
        """
        age_s = asyncio.get_running_loop().time() - self._asked_at_s
        if self._ask is None or age_s < FRESH_S:
            return
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        if not may_be_old or age_s > USABLE_S:
            await self._refreshing

    async def _refresh(self) -> None:
        assert self._ask is not None, "only called with somebody to ask"
        try:
            self._known = await asyncio.to_thread(self._ask)
        except Exception:
            log.debug("the rates could not be read", exc_info=True)
        self._asked_at_s = asyncio.get_running_loop().time()

    async def limited(self, tasks: list[NewTask]) -> list[NewTask]:
        """Return the tasks, each that may be refused and has a deadline with the number that may wait before it."""
        if not any(_has_limit(task) for task in tasks):
            return tasks
        await self.refresh(may_be_old=True)
        return [task._replace(max_ahead=self._most_ahead(task)) if _has_limit(task) else task for task in tasks]

    def _most_ahead(self, task: NewTask) -> int | None:
        assert task.expires_at_s is not None, "asked of tasks with a deadline"
        assert task.submitted_at_s is not None, "asked of tasks with a deadline"
        return most_ahead(task.expires_at_s - task.submitted_at_s, self.of(task.tier))


def _has_limit(task: NewTask) -> bool:
    has_deadline = task.expires_at_s is not None and task.submitted_at_s is not None
    return has_deadline and task.due_at_s is None and task.may_be_refused
