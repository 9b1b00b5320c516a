"""Switching tiers, lanes and workers off and on, as operators name them.

Everything here is one line in the operator log. What a switch does is done elsewhere: workers and the aging sweep stop
taking, the submit script refuses; see ``inference_tasks.state.switches.Action``.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inference_routing.lane import LANE_NAMES
from inference_routing.tier import TIER_NAMES, tier_name
from inference_routing.tier import UnknownTierError as CoreUnknownTierError
from inference_tasks.errors import CallerError, nearest
from inference_tasks.state.switches import Action, Switch, lane_target, tier_target, worker_target

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["UnknownTargetError", "drain", "is_drained", "operator_name", "pause", "resume", "target_of"]


class UnknownTargetError(CallerError, LookupError):
    """What was to be paused is no tier, no lane and no worker.

    Attributes:
        name: what was asked for.
        nearest: the name most like it, None if none is near.
    """

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.nearest = nearest(name, known)
        hint = f"Did you mean {self.nearest!r}?" if self.nearest else f"There are: {', '.join(known)}."
        super().__init__(
            f"There is no tier, lane or live worker {name!r}. {hint} A lane is written tier.lane, a worker that does "
            "not run now worker:NODE."
        )


def pause(
    inference: Inference, target: str, *, by: str | None = None, because: str = "", refuse: bool = False
) -> Switch:
    """Stop starts from a tier or lane, and promotions out of it, or stop a worker's taking of new work.

    What runs goes on. Workers see it within about two seconds.

    Args:
        inference: the app.
        target: a tier (``batch``, ``P1``), a lane (``batch.returned``), or a worker (its node name, or what is left of
            the @, or ``worker:NODE``).
        by: who wants it; None takes the user and host of this process.
        because: why, for the log and for those who ask why their task waits.
        refuse: submits from outside are refused too, with the reason ``paused``.

    Returns:
        The switch that is set now.

    Raises:
        UnknownTargetError: there is none of that name.
        StateUnavailableError: Redis does not answer.
    """
    return _set(inference, target, Action.REFUSE if refuse else Action.PAUSE, by, because)


def drain(inference: Inference, target: str, *, by: str | None = None, because: str = "") -> Switch:
    """Let a tier, lane or worker finish what it has, and give it nothing new; arguments as for ``pause``.

    A tier's submits from outside are refused while what waits in it runs. A worker finishes what runs and then stays
    idle; a worker that is started under the same node name is idle too, until ``resume``.
    """
    return _set(inference, target, Action.DRAIN, by, because)


def resume(inference: Inference, target: str, *, by: str | None = None, because: str = "") -> Switch | None:
    """Undo ``pause`` or ``drain``; return what was undone, None if nothing was.

    A worker that is gone can be named as well, if it has a switch.
    """
    switches = inference.store.switches()
    named = worker_target(target)
    name = named if named in switches.by_target else target_of(inference, target)
    return inference.store.unswitch(name, by=by or operator_name(), because=because)


def is_drained(inference: Inference, switch: Switch) -> bool:
    """Return whether a target has finished what it had: a tier or lane is empty, a worker idle, as far as is known."""
    kind, _, name = switch.target.partition(":")
    beats = inference.store.workers()
    if kind == "worker":
        own = next((beat for beat in beats if beat.node == name), None)
        return own is None or (own.state != "running" and not own.busy)
    tier, _, lane = name.partition(".")
    queues = [inference.queue_by_lane[tier, one] for one in LANE_NAMES if lane in ("", one)]
    if any(one.waiting for one in inference.store.waiting(queues).values()):
        return False
    # Which lane a running or parked task came from is not told: a lane has finished when its tier has. Heartbeats know
    # what has risen into the tier, the counts what has just started.
    accounts = inference.store.accounts()
    runs = accounts.by_tier.get(tier, {}).get("processing") or any(beat.busy_by_tier.get(tier) for beat in beats)
    return not runs and not accounts.away.get(tier)


def _set(inference: Inference, target: str, action: Action, by: str | None, because: str) -> Switch:
    name, who = target_of(inference, target), by or operator_name()
    if action is Action.REFUSE and name.startswith("worker:"):
        action = Action.PAUSE  # nothing is submitted to a worker
    inference.store.switch(name, action, by=who, because=because)
    return inference.store.switches().by_target.get(name) or Switch(name, action, who, 0.0, because)


def target_of(inference: Inference, text: str) -> str:
    """Return what the store calls a target; see ``pause`` for what may be written.

    Raises:
        UnknownTargetError: there is none of that name.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "worker" and rest:
        return worker_target(rest)
    named = rest if colon and kind in ("tier", "lane") else text
    tier, dot, lane = named.partition(".")
    known_tier = _tier(tier)
    if known_tier and not dot:
        return tier_target(known_tier)
    if known_tier and lane in LANE_NAMES:
        return lane_target(known_tier, lane)
    nodes = [beat.node for beat in inference.store.workers()]
    matching = [node for node in nodes if text in (node, node.partition("@")[0], node.partition("@")[2])]
    if len(matching) == 1:
        return worker_target(matching[0])
    lanes = [f"{one}.{lane}" for one in TIER_NAMES for lane in LANE_NAMES] if dot else []
    raise UnknownTargetError(text, matching or [*TIER_NAMES, *lanes, *nodes])


def operator_name() -> str:
    """Return whom the log names for what is done by this process: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _tier(text: str) -> str | None:
    try:
        return tier_name(text)
    except CoreUnknownTierError:
        return None
