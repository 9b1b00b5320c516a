"""Which dead letters are meant: by task, reason, tier, age and id."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from inference_tasks.errors import CallerError
from inference_tasks.routes import full_tier_name
from inference_tasks.state.records import DeadLetter

__all__ = ["Filter", "duration_s"]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def duration_s(text: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``2h`` or ``1d12h``.

    Raises:
        CallerError: it is none.
    """
    compact = text.replace(" ", "")
    if not _DURATION.fullmatch(compact):
        raise CallerError(f"Expected a duration such as 90s, 15m, 2h or 1d12h, found {text!r}.")
    return sum(float(amount) * _UNITS_S[unit] for amount, unit in _PART.findall(compact))


@dataclass(frozen=True, slots=True)
class Filter:
    """All conditions must hold; one that is not given holds always.

    Attributes:
        task: pattern of the task's name, with ``*`` and ``?``.
        reason: pattern of the reason, likewise.
        tier: the tier the task was served in.
        older_than_s: dead for at least so long. A letter whose time is unknown counts as old.
        younger_than_s: dead for at most so long.
        ids: only these; empty for any.
    """

    task: str | None = None
    reason: str | None = None
    tier: str | None = None
    older_than_s: float | None = None
    younger_than_s: float | None = None
    ids: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        *,
        task: str | None = None,
        reason: str | None = None,
        tier: str | None = None,
        older_than: str | None = None,
        younger_than: str | None = None,
        ids: Iterable[str] = (),
    ) -> Self:
        """Return the filter that these words of an operator ask for.

        Raises:
            CallerError: a duration or a tier is none.
        """
        return cls(
            task=task,
            reason=reason,
            tier=None if tier is None else full_tier_name(tier),
            older_than_s=None if older_than is None else duration_s(older_than),
            younger_than_s=None if younger_than is None else duration_s(younger_than),
            ids=frozenset(ids),
        )

    @property
    def is_open(self) -> bool:
        """Whether every letter matches."""
        return self == Filter()

    def matches(self, letter: DeadLetter, now_s: float) -> bool:
        """Whether a letter is meant."""
        age_s = now_s - letter.dead_at_s if letter.dead_at_s else float("inf")
        return (
            (not self.ids or letter.id in self.ids)
            and (self.task is None or fnmatchcase(letter.task, self.task))
            and (self.reason is None or fnmatchcase(letter.reason, self.reason))
            and (self.tier is None or letter.tier == self.tier)
            and (self.older_than_s is None or age_s >= self.older_than_s)
            and (self.younger_than_s is None or age_s <= self.younger_than_s)
        )
