"""Start-time fair queueing of one level, with charges that can be corrected."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import gcd, inf, lcm
from typing import Final

IDLE: Final = inf
"""Tag of a flow that has nothing waiting: never the smallest."""


def strides(shares: Mapping[str, Fraction]) -> dict[str, int]:
    """Return the smallest whole numbers that are inversely proportional to the shares.

    Stride scheduling (Waldspurger and Weihl, 1995): with shares 8 : 2 : 1 the strides are 1, 4 and 8. Whole numbers
    keep every tag exact, so a refund restores it exactly and nothing drifts in a process that runs for months.
    """
    inverse = {name: 1 / share for name, share in shares.items()}
    scale = lcm(*(value.denominator for value in inverse.values()))
    scaled = {name: int(value * scale) for name, value in inverse.items()}
    divisor = gcd(*scaled.values())
    return {name: value // divisor for name, value in scaled.items()}


class Flow:
    """One competitor of a level: a tier among the tiers, a lane in its tier, a queue in its lane.

    Its tag (virtual time of its next start) is ``max(entered_at, carried) + charged``:

    * ``entered_at``  virtual time of the level when the flow last became active;
    * ``carried``     what it had been charged before that, which counts only where it is more than ``entered_at``;
    * ``charged``     what it was charged since, and all of its picks that have not started yet.

    The split is what makes corrections right after an idle time. A refund of old work goes to ``carried``: where the
    flow was lifted to the level's virtual time the refund is already forgiven, so it earns no credit. A pick that has
    not started is work of *now*, so its refund is always whole.
    """

    __slots__ = (
        "_base",
        "_index",
        "_siblings",
        "_tags",
        "active",
        "carried",
        "charged",
        "entered_at",
        "epoch",
        "stride",
        "unstarted",
    )  # fmt: skip

    def __init__(self, tags: list[float], siblings: list["Flow"], stride: int) -> None:
        self._tags = tags
        self._siblings = siblings
        self._index = len(siblings)
        tags.append(IDLE)
        siblings.append(self)
        self.stride = stride
        self.entered_at = 0
        self.carried = 0
        self.charged = 0
        self._base = 0
        self.unstarted = 0
        self.epoch = 0
        self.active = False

    def enter(self, epoch: int) -> None:
        """Become active at the virtual time of the level: idleness earned nothing.

        The virtual time is the smallest tag of the active flows, or, without any, the greatest that was reached: then
        the busy period is over and all begin level (Goyal et al., rule 2). Picks that have not started are left out of
        both, so that one which turns out empty has moved nothing.
        """
        reached = self.reached()
        least = min((flow.reached() for flow in self._siblings if flow.active), default=None)
        if least is None:
            least = max(flow.reached() for flow in self._siblings)
        self.entered_at = least
        self.carried = reached
        self._base = least if least > reached else reached
        self.charged = self.unstarted * self.stride
        self.epoch = epoch
        self.active = True
        self._tags[self._index] = self._base + self.charged

    def reached(self) -> int:
        """Return the tag without the picks that have not started."""
        return self._base + self.charged - self.unstarted * self.stride

    def leave(self) -> None:
        """Become idle; what was charged is remembered."""
        self.active = False
        self._tags[self._index] = IDLE

    def charge(self, units: int, epoch: int) -> None:
        """Add ``units`` (negative: refund) for a pick that started in ``epoch``."""
        amount = units * self.stride
        if units > 0 or epoch >= self.epoch:
            self.charged += amount
        else:
            self.carried += amount
            self._base = max(self.entered_at, self.carried)
        if self.active:
            self._tags[self._index] = self._base + self.charged


class Level:
    """The flows that compete with each other, in the order that breaks ties.

    Algorithm: start-time fair queueing (Goyal, Vin and Cheng, 1996), whose tags advance by strides (Waldspurger and
    Weihl, 1995). The flow with the smallest tag is served; its tag grows by cost divided by share; a flow that was idle
    re-enters at the virtual time of the level.

    Invariant: while all flows are active and may be served, and each start costs one unit, the starts repeat with a
    period of the sum of the (whole, coprime) shares; so each sliding window of that length holds exactly each flow's
    share. After an idle time it holds from the flow's second start on: the first may come early, because a flow that
    re-enters goes ahead of lower ones in a tie, so that an online request never waits for the next long task as well.
    A flow that was kept from being served, or was the only one that could be, is first paid what it is owed, or waits.

    Cost: the tags lie in one list, so the smallest is found by `min` in C (64 flows: about 1 µs).
    Not promised: the least possible burst; flows whose tags meet are served in their order.
    """

    __slots__ = ("flows", "tags")

    def __init__(self, stride_by_flow: Iterable[int]) -> None:
        self.flows: list[Flow] = []
        self.tags: list[float] = []
        for stride in stride_by_flow:
            Flow(self.tags, self.flows, stride)
