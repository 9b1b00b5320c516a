"""Declaring the topology, and comparing it with what the broker has."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference_routing.topology import Difference, QueueSpec, Topology, differences
from inference_tasks.broker.in_effect import Policies, by_queue, compare
from inference_tasks.broker.management import Management, ManagementError
from inference_tasks.broker.session import Session, open_session

__all__ = [
    "TopologyReport",
    "broker_version",
    "check",
    "declare",
    "declare_missing",
    "find_differences",
    "management_of",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """How the broker's objects differ from the description."""

    differences: tuple[Difference, ...]
    missing: tuple[str, ...] = ()

    @property
    def is_as_wanted(self) -> bool:
        """Whether everything exists with the arguments wanted."""
        return not self.differences and not self.missing


def declare(
    topology: Topology, url: str, *, management_url: str | None = None, connect_timeout_s: float = 3.0
) -> list[Difference]:
    """Declare what is missing; whoever comes first does it, everybody may.

    A queue that exists with other arguments is logged and used as it is. Bounds that are policies are set through the
    management API, if it can be reached; a policy that exists is not changed, lest a process with old settings undo
    what was applied.

    Returns:
        How existing queues differ from the description.

    Raises:
        BrokerUnavailableError: the broker cannot be reached.
        DeploymentError: the user may not declare what is missing, or see whether it is.
    """
    with open_session(url, connect_timeout_s) as session:
        management = management_of(management_url, session.vhost)
        other = declare_missing(session, topology)
    if topology.policies:
        _set_policies(topology, management)
    differing: Sequence[Difference] = ()
    if other or topology.policies:
        differing = find_differences(topology, (*topology.queues, *topology.delay.queues), other, management)
    for name in dict.fromkeys(one.queue for one in differing):
        told = (f"{one.argument} is {one.found!r}, not {one.wanted!r}" for one in differing if one.queue == name)
        log.warning(
            "Queue %s differs from the settings and is used as it is: %s. `inference-tasks topology apply` changes it.",
            name,
            "; ".join(told),
        )
    return list(differing)


def declare_missing(session: Session, topology: Topology) -> dict[str, Mapping[str, object]]:
    """Declare what is missing; return {queue: its arguments, as far as told} of those that have others."""
    for exchange in (topology.exchange, *topology.delay.exchanges):
        session.exchange(exchange)
    found = (*topology.queues, *topology.delay.queues)
    other = {queue.name: arguments for queue in found if (arguments := session.queue(queue)) is not None}
    for binding in (*topology.bindings, *topology.delay.bindings):
        session.bind(binding)
    return other


def check(
    topology: Topology, url: str, *, management_url: str | None = None, connect_timeout_s: float = 3.0
) -> TopologyReport:
    """Compare the broker with the description, and change nothing.

    Raises:
        BrokerUnavailableError: the broker cannot be reached.
    """
    missing: list[str] = []
    other: dict[str, Mapping[str, object]] = {}
    existing: list[QueueSpec] = []
    with open_session(url, connect_timeout_s) as session:
        management = management_of(management_url, session.vhost)
        missing.extend(
            f"exchange {exchange.name}"
            for exchange in (topology.exchange, *topology.delay.exchanges)
            if not session.exists_exchange(exchange.name)
        )
        for queue in (*topology.queues, *topology.delay.queues):
            if not session.exists_queue(queue.name):
                missing.append(f"queue {queue.name}")
                continue
            existing.append(queue)
            # It exists, so declaring it creates nothing; it only asks whether the arguments agree.
            arguments = session.queue(queue)
            if arguments is not None:
                other[queue.name] = arguments
    return TopologyReport(tuple(find_differences(topology, existing, other, management)), tuple(missing))


def broker_version(url: str, *, connect_timeout_s: float = 3.0) -> tuple[int, ...]:
    """Return RabbitMQ's version, for example ``(3, 13, 7)``.

    Raises:
        BrokerUnavailableError: the broker cannot be reached.
    """
    with open_session(url, connect_timeout_s) as session:
        return tuple(int(part) for part in re.findall(r"\d+", session.version)[:3])


def management_of(url: str | None, vhost: str) -> Management | None:
    """Return the virtual host's management API, if its address is known."""
    return Management(url, vhost) if url else None


def find_differences(
    topology: Topology,
    queues: Sequence[QueueSpec],
    other: Mapping[str, Mapping[str, object]],
    management: Management | None,
) -> list[Difference]:
    """Compare existing queues with the description.

    With the management API policies count, and every argument is known; without it those that the broker itself
    compares.

    Args:
        other: {queue: its arguments, as far as the broker told them} of those whose arguments are not as described.
    """
    found, policies = other, None
    if management is not None:
        try:
            policies = Policies(management.policies())
            if other:
                found = {**other, **management.arguments_by_queue()}
        except ManagementError as exc:
            log.debug("arguments of queues are known only from the broker's refusals: %s", exc)
    if policies is None:
        return [one for queue in queues if queue.name in other for one in differences(queue, found[queue.name])]
    wanted = by_queue(topology.policies)
    return [
        one
        for queue in queues
        for one in compare(
            queue,
            found[queue.name] if queue.name in other else queue.arguments,
            wanted.get(queue.name),
            policies,
        )
    ]


def _set_policies(topology: Topology, management: Management | None) -> None:
    names = ", ".join(policy.name for policy in topology.policies)
    if management is None:
        log.warning("The policies %s are not set: broker.management_url is not known.", names)
        return
    try:
        existing = management.policies()
        for policy in topology.policies:
            if policy.name not in existing:
                management.put_policy(policy)
    except ManagementError as exc:
        log.warning("The policies %s are not set: %s", names, exc)
