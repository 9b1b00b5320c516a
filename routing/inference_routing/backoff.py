"""How long a task that failed waits before it is tried again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite, log
from typing import Final

JITTER_RATIO: Final = 0.25
"""The most that chance adds to a delay, as a part of it."""

LARGEST_EXPONENT: Final = 700.0
"""Of e, in what is still a number."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that grow by a factor, or an explicit list of them.

    Binary exponential backoff (Metcalfe and Boggs 1976), with a cap. Chance only lengthens a delay, by up to a quarter:
    tasks that failed together come back apart, and none before its time.

    Invariant: ``nominal <= delay_s <= nominal * 1.25``, where nominal never shrinks from one retry to the next, unless
    a list says so. Cost per call: constant.

    Attributes:
        base_s: Delay of the first retry, in seconds. 0: at once, and so is every later one.
        factor: How much longer each further one is; at least 1.
        cap_s: Longest delay, before chance is added.
        jitter: Whether chance is added.
        steps_s: Delays to take instead, in order; the last repeats. Empty: none.
    """

    base_s: float = 1.0
    factor: float = 2.0
    cap_s: float = 300.0
    jitter: bool = True
    steps_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (
            ("base_s", self.base_s),
            ("cap_s", self.cap_s),
            *(("a delay", one) for one in self.steps_s),
        ):
            if not _is_number(value) or not 0 <= value < float("inf"):
                raise ValueError(f"expected {name} as a number of seconds from 0 on, found {value!r}")
        if not _is_number(self.factor) or not 1 <= self.factor < float("inf"):
            raise ValueError(f"expected factor as a number from 1 on, found {self.factor!r}")

    @classmethod
    def listed(cls, steps_s: Iterable[float], *, jitter: bool = True) -> Backoff:
        """Return explicit delays; the last repeats for every further retry.

        Raises:
            ValueError: There are none, or one is no number of seconds.
        """
        steps = tuple(steps_s)
        if not steps:
            raise ValueError("expected at least one delay, found none")
        return cls(jitter=jitter, steps_s=steps)

    def with_jitter(self, jitter: bool) -> Backoff:
        """Return the same delays with or without chance."""
        return replace(self, jitter=jitter)

    def nominal_s(self, retry: int) -> float:
        """Return the delay before chance is added. ``retry`` counts from 1."""
        step = max(0, retry - 1)
        if self.steps_s:
            return float(self.steps_s[min(step, len(self.steps_s) - 1)])
        if self.base_s <= 0 or self.base_s >= self.cap_s:
            return float(min(self.base_s, self.cap_s))
        if step * log(self.factor) > LARGEST_EXPONENT:
            return float(self.cap_s)
        return float(min(self.cap_s, self.base_s * self.factor**step))

    def delay_s(self, retry: int, chance: float) -> float:
        """Return seconds to wait before a retry.

        Args:
            retry: Which one, from 1 on.
            chance: A random number, 0 to 1.
        """
        nominal_s = self.nominal_s(retry)
        return nominal_s * (1 + JITTER_RATIO * chance) if self.jitter else nominal_s


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
