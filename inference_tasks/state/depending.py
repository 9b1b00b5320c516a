"""The part of the state store that knows which tasks wait for which."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from inference_tasks.state import packing
from inference_tasks.state.calling import Calling
from inference_tasks.state.packing import FIELD, RECORD
from inference_tasks.state.records import Freed, Lift, Visit, Visitor
from inference_tasks.state.script import as_text

__all__ = ["Depending", "unpack_freed"]

#: One call looks at no more tasks than these.
MOST_LIFTED = 1000

logger = logging.getLogger(__name__)


class Depending(Calling):
    """A task's success frees those that waited for it alone, any other end fails them, in the same step as it ends.

    Of more than 1000 that wait for one task the rest learns it when their messages come round.

    Attributes:
        on_freed: called with what a success has freed, after it was written, by the writer's thread. Whoever is told
            publishes the messages; what it does not publish comes round by itself.
    """

    on_freed: Callable[[Sequence[Freed]], None] | None = None

    def visited(self, visitors: Sequence[Visitor]) -> list[Visit]:
        """Look at tasks that wait for others, when their messages have come round; answers in their order.

        A task whose dependency has failed fails, and one whose deadline has passed expires. A missing record is made
        from the message, and waits for what the message says.
        """
        if not visitors:
            return []
        args: list[str | int] = [self._unfinished_ttl_s, self._finished_ttl_s]
        for visitor in visitors:
            args += (packing.pack_claimant(visitor.claimant), FIELD.join(visitor.needs), visitor.message)
        reply = self._change("visited", self._task_keys(visitor.claimant.id for visitor in visitors), args)
        return [_visit(line) for line in as_text(reply).split(RECORD)]

    def to_lift(self, wishes: Sequence[tuple[str, str, str]]) -> list[Lift]:
        """Find what is to be lifted, given as (id, tier that it should have, id of the task that waits for it).

        What waits itself is noted only, and what that waits for is found too. The copies are published, and marked by
        ``promoted``.
        """
        if not wishes:
            return []
        args: list[str | int] = [self._unfinished_ttl_s, MOST_LIFTED, *(part for wish in wishes for part in wish)]
        return _lifts(self._change("lift", (), args))

    def to_lower(self) -> list[Lift]:
        """Find lifted tasks that nobody needs in that tier any more, among the 1000 that were lifted first."""
        return _lifts(self._change("lower", (), (MOST_LIFTED,)))

    def _tell_freed(self, freed: Sequence[Freed]) -> None:
        if not freed or self.on_freed is None:
            return
        try:
            self.on_freed(freed)
        except Exception:
            # Whatever it is: the end of the task is written, and what it has freed comes round by itself.
            logger.exception("%d freed task(s) start later", len(freed))


def _lifts(reply: object) -> list[Lift]:
    found = []
    for line in filter(None, as_text(reply).split(RECORD)):
        task_id, generation, hop, tier, because, message = line.split(FIELD, 5)
        found.append(Lift(task_id, int(generation), int(hop), tier, because, message))
    return found


def _visit(line: str) -> Visit:
    outcome, _, rest = line.partition(FIELD)
    if outcome == "free":
        return Visit(outcome, tier=rest)
    needs, _, missing = rest.partition(FIELD)
    return Visit(outcome, packing.listed(needs), packing.listed(missing))


def unpack_freed(lines: Sequence[str]) -> list[Freed]:
    """Read what ``finish.lua`` says of the tasks that an end has freed."""
    found = []
    for line in lines:
        task_id, generation, hop, tier, message = line.split(FIELD, 4)
        found.append(Freed(task_id, int(generation), int(hop), tier, message))
    return found
