"""The three service classes and their names."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal

REALTIME: Final = "realtime"
BATCH: Final = "batch"
OFFLINE: Final = "offline"

TIER_NAMES: Final[tuple[str, str, str]] = (REALTIME, BATCH, OFFLINE)
"""All tiers, the highest first."""

_NAME_BY_ALIAS: Final = {"p0": REALTIME, "p1": BATCH, "p2": OFFLINE}
_NAME_BY_WORD: Final = {name: name for name in TIER_NAMES} | _NAME_BY_ALIAS

Overflow = Literal["reject-publish", "drop-head"]
"""What a full ``fresh`` queue does: refuse the newest message, or drop the oldest."""


class UnknownTierError(ValueError):
    """A tier was named that does not exist.

    Attributes:
        name: The text that was given.
        nearest: The tier name or alias that reads most like it, if one is close.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        close = get_close_matches(name.strip().lower(), _NAME_BY_WORD, n=1, cutoff=0.5)
        self.nearest: str | None = _NAME_BY_WORD[close[0]] if close else None
        known = ", ".join(f"{full!r} ({alias.upper()})" for alias, full in _NAME_BY_ALIAS.items())
        hint = f"; did you mean {self.nearest!r}?" if self.nearest else ""
        super().__init__(f"expected one of {known}, found {name!r}{hint}")

    def __reduce__(self) -> tuple[type["UnknownTierError"], tuple[str]]:
        return type(self), (self.name,)


@dataclass(frozen=True, slots=True)
class Tier:
    """One service class: how much it is served, how much may wait, when it ages.

    Attributes:
        name: One of `TIER_NAMES`.
        weight: Share relative to the other tiers' weights, above 0.
        bound: Messages that may wait in the ``fresh`` lane.
        floor: Least share, 0 to 1, whatever the weights say; 0 means none.
        overflow: What happens to a submit while ``fresh`` is full.
        ages_after_s: Waiting time after which a task moves one tier up; None means never.
    """

    name: str
    weight: int | float
    bound: int
    floor: float = 0
    overflow: Overflow = "reject-publish"
    ages_after_s: float | None = None


def tier_name(text: str) -> str:
    """Resolve a tier name or alias (``"P0"``, ``"P1"``, ``"P2"``), whatever its case.

    Raises:
        UnknownTierError: There is no such tier; the message names the nearest one.
    """
    name = _NAME_BY_WORD.get(text.strip().lower())
    if name is None:
        raise UnknownTierError(text)
    return name
