"""One side of the comparison, as the demo wants it: how it is started, sent to and looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Call", "Side"]

Call = tuple[str, str, int]
"""Path, tier, number."""


class Side(Protocol):
    """One side.

    Attributes:
        name: short, for files and JSON.
        title: for people.
    """

    name: str
    title: str

    def worker(self, slots: int) -> list[str]:
        """Return the command of its worker."""

    def send(self, tier: str, calls: Sequence[Call]) -> list[int]:
        """Submit calls; return the numbers of those that a full queue refused."""

    def depths(self) -> dict[str, int] | None:
        """Return {tier: messages waiting} as the broker counts them; None where one queue holds all tiers."""

    def close(self) -> None:
        """Close the connections."""
