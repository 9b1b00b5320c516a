"""What operators have switched off: the values; ``switching`` keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

__all__ = [
    "ALL_ON",
    "OPERATOR_LOG_LENGTH",
    "Action",
    "OperatorLine",
    "Switch",
    "Switches",
    "lane_target",
    "read_switch",
    "read_switches",
    "tier_target",
    "worker_target",
]

OPERATOR_LOG_LENGTH = 1000
"""So many lines of the operator log are kept."""


class Action(StrEnum):
    """What a switch does to its target."""

    PAUSE = "pause"
    """Nothing starts. Submits go on, to the bound."""
    REFUSE = "refuse"
    """Nothing starts, and submits from outside are refused."""
    DRAIN = "drain"
    """Submits from outside are refused; what waits runs. A worker finishes what runs and takes nothing new."""


def tier_target(tier: str) -> str:
    """Return what a tier is called as a target."""
    return f"tier:{tier}"


def lane_target(tier: str, lane: str) -> str:
    """Return what a lane is called as a target."""
    return f"lane:{tier}.{lane}"


def worker_target(node: str) -> str:
    """Return what a worker is called as a target."""
    return f"worker:{node}"


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch.

    Attributes:
        target: ``tier:<tier>``, ``lane:<tier>.<lane>`` or ``worker:<node>``.
        action: see ``Action``.
        by: who did it.
        at_s: when, unix seconds by the Redis server's clock.
        because: why, in the operator's words; may be empty.
    """

    target: str
    action: str
    by: str
    at_s: float
    because: str = ""

    @property
    def stops_starts(self) -> bool:
        """Whether nothing starts from a tier or lane with this switch."""
        return self.action in (Action.PAUSE, Action.REFUSE)

    @property
    def refuses(self) -> bool:
        """Whether submits from outside are refused."""
        return self.action in (Action.REFUSE, Action.DRAIN)

    @property
    def name(self) -> str:
        """The target without its kind."""
        return self.target.partition(":")[2]

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Switches:
    """All switches at one moment, {target: switch}."""

    by_target: Mapping[str, Switch] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Switch]:
        return iter(self.by_target.values())

    def __bool__(self) -> bool:
        return bool(self.by_target)

    def of(self, tier: str, lane: str) -> tuple[Switch, ...]:
        """Return the switches that a lane stands under: its tier's, its own."""
        found = (self.by_target.get(tier_target(tier)), self.by_target.get(lane_target(tier, lane)))
        return tuple(one for one in found if one is not None)

    def stopped(self, tier: str, lane: str) -> Switch | None:
        """Return the switch by which nothing starts from a lane, None if starts go on."""
        return next((one for one in self.of(tier, lane) if one.stops_starts), None)

    def refusing(self, tier: str, lane: str = "fresh") -> Switch | None:
        """Return the switch by which submits from outside are refused, None if they are not."""
        return next((one for one in self.of(tier, lane) if one.refuses), None)

    def worker(self, node: str) -> Switch | None:
        """Return the switch by which a worker takes nothing new, None if it does."""
        return self.by_target.get(worker_target(node))


ALL_ON = Switches()


@dataclass(frozen=True, slots=True)
class OperatorLine:
    """One line of the operator log: who did what to which target, when and why."""

    at_s: float
    by: str
    action: str
    target: str
    because: str = ""

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)


def read_switches(stored: Mapping[str, str]) -> Switches:
    """Read what Redis keeps, {target: JSON}; a switch of another release that cannot be read counts as none."""
    found = {}
    for target, text in sorted(stored.items()):
        switch = read_switch(target, text)
        if switch is not None:
            found[target] = switch
    return Switches(found) if found else ALL_ON


def read_switch(target: str, text: str) -> Switch | None:
    """Read one of them."""
    try:
        said = json.loads(text)
        return Switch(target, Action(said["action"]), str(said["by"]), float(said["at_s"]), str(said["because"]))
    except (ValueError, TypeError, KeyError):
        return None
