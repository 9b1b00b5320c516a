"""Inheritance of tiers: while a task of a higher tier waits for a task of a lower one, that one runs at the higher.

A lift is a copy of the waiting task's message in ``returned`` of the higher tier, made from what Redis keeps of the
message, so nothing is searched for; the copy has a hop more, and so supersedes the message itself. It ends in the same
way, by a copy into the tier that the task had before. The copy is confirmed first, and marked only if its task has not
started; which of two messages runs is decided by the claim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inference_routing.tier import OFFLINE
from inference_tasks.dependencies import published
from inference_tasks.errors import InferenceError
from inference_tasks.state.records import Lift

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["SHARED", "Lifts"]

log = logging.getLogger(__name__)

#: For whose sake a task is lifted that several submits share, one of them in a higher tier.
SHARED = "shared"

#: The longest that a lift holds up the submit that needs it.
LIFT_S = 2.0


class Lifts:
    """Lifts and lowers; may be used in any thread but the publisher's. Three round trips, however many tasks."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    def lift(self, task_ids: Sequence[str], tier: str, because: str) -> int:
        """Lift tasks, and what they wait for in turn, into a tier; return how many were lifted at once.

        One that waits itself starts in that tier; one that runs, or has it already, is left alone. Nothing is raised:
        what was not lifted waits in its own tier, until the message of the one that waits for it comes round.
        """
        if tier == OFFLINE or not task_ids:
            return 0
        try:
            return self._move(self._inference.store.to_lift([(task_id, tier, because) for task_id in task_ids]))
        except InferenceError as exc:
            log.warning("what task %s waits for is not lifted to %s yet: %s", because, tier, exc)
            return 0

    def lower(self) -> int:
        """End the lifts that nobody needs any more; return how many tasks went back to their tiers.

        Raises:
            StateUnavailableError: Redis does not answer.
        """
        return self._move(self._inference.store.to_lower())

    def _move(self, found: Sequence[Lift]) -> int:
        return sum(published(self._inference, [(one, one.because) for one in found], LIFT_S)) if found else 0
