"""What ``inference-tasks top`` shows: the fleet, the latest dead letters, and what operators did lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_tasks.observe import fleet as fleet_view

if TYPE_CHECKING:
    from inference_tasks.app import Inference
    from inference_tasks.observe.fleet import Fleet
    from inference_tasks.observe.tiers import CountsWaiting
    from inference_tasks.state.records import DeadLetter
    from inference_tasks.state.switches import OperatorLine

__all__ = ["Top", "look"]

LATEST = 5


@dataclass(frozen=True, slots=True)
class Top:
    """One look.

    Attributes:
        dead_letters: the latest, the newest first.
        operator_log: likewise.
    """

    fleet: Fleet
    dead_letters: tuple[DeadLetter, ...]
    operator_log: tuple[OperatorLine, ...]

    def as_dict(self) -> dict[str, object]:
        """All of it, ready for JSON; of dead letters what they are and why, not what their errors say."""
        return {
            **self.fleet.as_dict(),
            "dead_letters": [
                {
                    "id": one.id,
                    "task": one.task,
                    "tier": one.tier_first,
                    "reason": one.reason,
                    "dead_at_s": one.dead_at_s,
                }
                for one in self.dead_letters
            ],
            "operator_log": [one.as_dict() for one in self.operator_log],
        }


def look(inference: Inference, depths: CountsWaiting) -> Top:
    """Look at everything; costs two round trips to Redis more than a look at the fleet.

    Raises:
        BrokerUnavailableError, StateUnavailableError: one of them does not answer.
    """
    store = inference.store
    return Top(
        fleet=fleet_view.read(inference, depths),
        dead_letters=tuple(store.dead_letters(limit=LATEST)),
        operator_log=tuple(store.operator_log(LATEST)),
    )
