"""What ``inference-tasks top`` shows: the fleet, refusals, the latest dead letters, what operators did lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from inference_tasks.observe import fleet as fleet_view

if TYPE_CHECKING:
    from inference_tasks.app import Inference
    from inference_tasks.observe.fleet import Fleet
    from inference_tasks.observe.tiers import CountsWaiting
    from inference_tasks.state.records import DeadLetter
    from inference_tasks.state.switches import OperatorLine

__all__ = ["Looker", "RefusalWindow", "Refusals", "Top"]

LATEST = 5
WINDOW_S = 60.0

Refusals: TypeAlias = dict[str, dict[str, int]]
"""{tier: {reason: number}}."""


@dataclass(frozen=True, slots=True)
class Top:
    """One look.

    Attributes:
        dead_letters: the latest, the newest first.
        operator_log: likewise.
        refused_lately: submits that were refused while this looked on, at most of the last minute; None at a first
            look. All since the counts began are in the fleet's accounts.
    """

    fleet: Fleet
    dead_letters: tuple[DeadLetter, ...]
    operator_log: tuple[OperatorLine, ...]
    refused_lately: Refusals | None = None

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
            "refused_lately": self.refused_lately,
        }


class RefusalWindow:
    """Tells how much the counts of refusals have grown in the last minute, of looks at their totals."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Refusals]] = deque()

    def lately(self, now_s: float, total: Refusals) -> Refusals | None:
        """Note the totals of this moment; return what came since the oldest of the last minute, None at the first."""
        is_first = not self._seen
        self._seen.append((now_s, total))
        while self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()
        before = self._seen[0][1]
        grown = {tier: _growth(before.get(tier, {}), counts) for tier, counts in total.items()}
        return None if is_first else {tier: counts for tier, counts in grown.items() if counts}


class Looker:
    """Looks at one deployment, and remembers a minute of its refusals."""

    def __init__(self, inference: Inference, depths: CountsWaiting) -> None:
        self._inference = inference
        self._depths = depths
        self._refused = RefusalWindow()

    def look(self) -> Top:
        """Look at everything; costs two round trips to Redis more than a look at the fleet.

        Raises:
            BrokerUnavailableError, StateUnavailableError: one of them does not answer.
        """
        store = self._inference.store
        fleet = fleet_view.read(self._inference, self._depths)
        return Top(
            fleet=fleet,
            dead_letters=tuple(store.dead_letters(limit=LATEST)),
            operator_log=tuple(store.operator_log(LATEST)),
            refused_lately=self._refused.lately(fleet.at_s, fleet.accounts.refused),
        )


def _growth(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    # Less than before: Redis was lost, and the counts began anew.
    grown = {reason: number - before.get(reason, 0) for reason, number in now.items()}
    return {reason: number if number > 0 else now[reason] for reason, number in grown.items() if number}
