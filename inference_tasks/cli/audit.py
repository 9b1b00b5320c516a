"""The accounts of all work beside what the broker holds: whether every admitted task is accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import cast

from rich.console import Group
from rich.table import Table
from rich.text import Text

from inference_tasks.app import Inference
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.broker.management import ManagementError
from inference_tasks.broker.session import open_session
from inference_tasks.broker.topology import management_of
from inference_tasks.cli.screen import clock_time
from inference_tasks.state.records import Accounts, DeadKind, State

__all__ = ["Audit", "BrokerView", "audit", "audit_view"]

ANSWER_S = 10.0

_TOTAL = "total"
_DEAD = {kind: f"dead:{kind}" for kind in DeadKind}
_UNBURIED = "dead:unburied"
# The states of tasks that have a message; a waiting one gets its message when what it waits for has ended.
_WITH_MESSAGE = (State.PENDING, State.PROCESSING, State.RETRYING)


@dataclass(frozen=True, slots=True)
class BrokerView:
    """Messages in the broker.

    Attributes:
        ready: in the queues of the tiers, free to be taken.
        unacked: taken by workers and not acknowledged, some seconds old; None without the management API.
        parked: in the delay queues; None on the embedded broker.
        dropping: fallen off a drop-head queue, and not yet counted as dropped.
        dead: in the dead-letter queue.
    """

    ready: int
    unacked: int | None
    parked: int | None
    dropping: int
    dead: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of all admitted work.

    Attributes:
        since_s: since when it is counted, None if nothing was; later than the first work after a loss of Redis.
        is_exact: whether in every tier the states add up to what was admitted.
        moving: tasks whose message lies nowhere at the moment: a worker runs them, or they are on their way between
            two places. None where the broker cannot tell.
        tiers: {first tier, and ``total``: {name: count}}: ``admitted``, the states, and the parts of ``failed``.
        broker: beside it, what the broker holds.
        indexed: entries in the index of the dead letters.
    """

    since_s: float | None
    is_exact: bool
    moving: int | None
    tiers: dict[str, dict[str, int]]
    broker: BrokerView
    indexed: int

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)


def audit(inference: Inference) -> Audit:
    """Read the accounts and look at the broker.

    Raises:
        BrokerUnavailableError, StateUnavailableError: one of them does not answer.
    """
    broker = _look(inference)
    indexed = inference.store.dead_count()
    accounts = inference.store.accounts()
    tiers = _by_tier(accounts)
    return Audit(
        since_s=accounts.since_s,
        is_exact=all(one["admitted"] == sum(one[state] for state in State) for one in tiers.values()),
        moving=_moving(tiers[_TOTAL], broker, indexed),
        tiers=tiers,
        broker=broker,
        indexed=indexed,
    )


def _by_tier(accounts: Accounts) -> dict[str, dict[str, int]]:
    names = ("admitted", *State, *_DEAD.values())
    tiers = {
        tier or "-": {str(name): counts.get(name, 0) for name in names} for tier, counts in accounts.by_tier.items()
    }
    tiers[_TOTAL] = {str(name): sum(counts[name] for counts in tiers.values()) for name in names}
    for counts in tiers.values():
        counts[_UNBURIED] = counts[State.FAILED] - sum(counts[name] for name in _DEAD.values())
    return tiers


def _moving(total: Mapping[str, int], broker: BrokerView, indexed: int) -> int | None:
    if broker.parked is None:
        return None
    lying = broker.ready + broker.parked + broker.dropping
    between = abs(sum(total[state] for state in _WITH_MESSAGE) - lying)
    return between + abs(total[_UNBURIED]) + abs(indexed - broker.dead)


def _look(inference: Inference) -> BrokerView:
    topology = inference.topology
    of_tiers = [queue.name for queue in topology.queues if queue.tier is not None]
    settings = inference.settings
    url = cast(str, settings.broker.url)
    if is_embedded(url):
        depths = inference.depths()
        try:
            found = depths.of_queues((*of_tiers, topology.dead.name))
        finally:
            depths.close()
        return BrokerView(sum(found[name] for name in of_tiers), None, None, 0, found[topology.dead.name])
    with open_session(url, settings.broker.connect_timeout_s, answer_timeout_s=ANSWER_S) as session:
        management = management_of(settings.management_url, session.vhost)
        unacked: int | None = None
        if management is not None:
            with suppress(ManagementError):
                unacked = sum(_unacked(management.queue(name)) for name in of_tiers)
        return BrokerView(
            ready=sum(session.ready(name) for name in of_tiers),
            unacked=unacked,
            parked=sum(session.ready(queue.name) for queue in topology.delay.queues),
            dropping=session.ready(topology.dropped.name),
            dead=session.ready(topology.dead.name),
        )


def _unacked(queue: Mapping[str, object] | None) -> int:
    count = (queue or {}).get("messages_unacknowledged")
    return count if isinstance(count, int) else 0


def audit_view(found: Audit) -> Group:
    """Return the accounts as a table with a column for each tier, and what the broker holds below it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for tier in found.tiers:
        table.add_column(tier, justify="right")
    for name, label in _rows():
        table.add_row(label, *(str(counts[name]) for counts in found.tiers.values()))
    broker = found.broker
    known = [f"{broker.ready} ready"]
    known += [f"{broker.unacked} held by workers"] if broker.unacked is not None else []
    known += [f"{broker.parked} parked"] if broker.parked is not None else []
    known += [f"{broker.dropping} about to be counted as dropped", f"{broker.dead} dead letters"]
    return Group(table, Text("\nbroker: " + ", ".join(known)), _verdict(found))


def _rows() -> list[tuple[str, str]]:
    parts = {
        _DEAD[DeadKind.REPLAYABLE]: "to be replayed or dropped",
        _DEAD[DeadKind.UNFIT]: "can never run",
        _DEAD[DeadKind.DROPPED]: "dropped by an operator",
        _UNBURIED: "on the way to the dead letters",
    }
    rows = [("admitted", "admitted")]
    for state in State:
        rows.append((state, f"  {state}"))
        if state == State.FAILED:
            rows += [(name, f"    {label}") for name, label in parts.items()]
    return rows


def _verdict(found: Audit) -> Text:
    since = f"counted since {clock_time(found.since_s)}" if found.since_s else "nothing has been counted yet"
    if not found.is_exact:
        return Text(f"WRONG: the states do not add up to what was admitted; {since}", style="red")
    if found.moving is None:
        return Text(f"exact; {since}. The embedded broker does not tell what is parked.", style="green")
    moving = f"{found.moving} moving" if found.moving else "nothing is moving"
    return Text(f"exact; {moving}; {since}", style="green")
