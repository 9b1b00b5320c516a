"""How long a task will keep its slot, predicted from how long such tasks did."""

from typing import Final

COLD_START_S: Final = 0.1
"""Prediction while a tier has measured nothing at all."""

SMOOTHING: Final = 0.2
"""Weight of the newest measurement once there are enough of them."""


class MovingMean:
    """Mean that follows a changing quantity.

    Algorithm: exponential smoothing (Brown, 1956; as in TCP's round-trip estimate, Jacobson, 1988). The first
    ``1 / SMOOTHING`` values are averaged plainly, so that no start value biases the mean.

    Invariant: the mean lies between the least and the greatest value added. Cost: constant, no allocation kept.
    Not promised: anything of the spread.
    """

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        """Move the mean towards ``value``."""
        self.count += 1
        gain = 1.0 / self.count
        self.value += (value - self.value) * (gain if gain > SMOOTHING else SMOOTHING)


class CostModel:
    """Predicts the cost of a task from its name and tier.

    A kind of task that was never measured costs what its tier costs on average, and `COLD_START_S` if the tier was
    never measured either. One measurement is enough to leave the cold start: the first value *is* the mean.

    Cost per call: two dictionary look-ups. Memory: one mean per (task name, tier) that ran.

    Not promised: the cost of one call. Lengths that depend on the input have the mean of their kind; the picker charges
    a running task what it has really used as soon as that is more than predicted.
    """

    __slots__ = ("_mean_by_kind", "_mean_by_tier")

    def __init__(self) -> None:
        self._mean_by_kind: dict[tuple[str, str], MovingMean] = {}
        self._mean_by_tier: dict[str, MovingMean] = {}

    def predict_s(self, task_name: str, tier: str) -> float:
        """Return the seconds that such a task is expected to keep its slot."""
        mean = self._mean_by_kind.get((task_name, tier))
        return mean.value if mean is not None else self.tier_mean_s(tier)

    def tier_mean_s(self, tier: str) -> float:
        """Return the mean over all kinds of the tier, or `COLD_START_S`."""
        mean = self._mean_by_tier.get(tier)
        return mean.value if mean is not None else COLD_START_S

    def observe(self, task_name: str, tier: str, cost_s: float) -> None:
        """Learn that such a task kept its slot for ``cost_s`` seconds."""
        self._mean_by_kind.setdefault((task_name, tier), MovingMean()).add(cost_s)
        self._mean_by_tier.setdefault(tier, MovingMean()).add(cost_s)
