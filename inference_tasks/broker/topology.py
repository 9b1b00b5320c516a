"""Declaring the topology, and comparing it with what the broker has."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kombu import Connection

from inference_routing.topology import BindingSpec, Difference, ExchangeSpec, QueueSpec, Topology, differences
from inference_tasks.broker.dial import dial
from inference_tasks.broker.management import Management, ManagementError
from inference_tasks.errors import BrokerUnavailableError, DeploymentError

__all__ = ["TopologyReport", "broker_version", "check", "declare"]

log = logging.getLogger(__name__)

ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED = 403, 404, 406

# The broker's words: inequivalent arg 'x-max-length' for queue 'q' in vhost '/': received '9' but current is '2', where
# either may be none, and where the values of some arguments come with their types.
_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>x-[^']+)'.* but current is (?:none|(?:the value )?'(?P<found>[^']*)')"
)


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
    management API, if it can be reached.

    Returns:
        How existing queues differ from the description.

    Raises:
        BrokerUnavailableError: the broker cannot be reached.
        DeploymentError: the user may not declare what is missing, or see whether it is.
    """
    with _session(url, connect_timeout_s) as session:
        management = _management(management_url, session.vhost)
        for exchange in (topology.exchange, *topology.delay.exchanges):
            session.exchange(exchange)
        found = [*topology.queues, *topology.delay.queues]
        other = {queue.name: arguments for queue in found if (arguments := session.queue(queue)) is not None}
        for binding in (*topology.bindings, *topology.delay.bindings):
            session.bind(binding)
    if topology.policies:
        _set_policies(topology, management)
    differing = _differences(found, other, management)
    for name in dict.fromkeys(one.queue for one in differing):
        told = (f"{one.argument} is {one.found!r}, not {one.wanted!r}" for one in differing if one.queue == name)
        log.warning(
            "Queue %s differs from the settings and is used as it is: %s. `inference-tasks topology apply` changes it.",
            name,
            "; ".join(told),
        )
    return differing


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
    with _session(url, connect_timeout_s) as session:
        management = _management(management_url, session.vhost)
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
    return TopologyReport(tuple(_differences(existing, other, management)), tuple(missing))


def broker_version(url: str, *, connect_timeout_s: float = 3.0) -> tuple[int, ...]:
    """Return RabbitMQ's version, for example ``(3, 13, 7)``.

    Raises:
        BrokerUnavailableError: the broker cannot be reached.
    """
    with _session(url, connect_timeout_s) as session:
        return tuple(int(part) for part in re.findall(r"\d+", session.version)[:3])


class _Session:
    """One connection; its channel is replaced after every error, because the broker closes it then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: Any = None
        self._errors = connection.channel_errors

    @property
    def vhost(self) -> str:
        return self._connection.virtual_host or "/"

    @property
    def version(self) -> str:
        properties: Mapping[str, object] = getattr(self._connection.connection, "server_properties", {})
        return str(properties.get("version", ""))

    @property
    def channel(self) -> Any:
        if self._channel is None:
            self._channel = self._connection.channel()
        return self._channel

    def _attempt(self, method: str, *args: object, **kwargs: object) -> tuple[int, str]:
        """Call a method of the channel; return 0 or the broker's code, and its text."""
        try:
            getattr(self.channel, method)(*args, **kwargs)
        except self._errors as exc:
            self._channel = None
            return int(getattr(exc, "code", 0) or 0) or -1, str(exc)
        return 0, ""

    def exchange(self, wanted: ExchangeSpec) -> None:
        code, text = self._attempt(
            "exchange_declare", wanted.name, wanted.type, durable=wanted.durable, auto_delete=False
        )
        if code == PRECONDITION_FAILED:
            log.warning("Exchange %s is used as it is: %s", wanted.name, text)
        elif code and not (code == ACCESS_REFUSED and self.exists_exchange(wanted.name)):
            raise DeploymentError(f"Exchange {wanted.name!r} could not be declared: {text}")

    def queue(self, wanted: QueueSpec) -> Mapping[str, object] | None:
        """Declare a queue; return None, or its arguments, as far as the broker tells them, if they are others.

        The broker names one argument in each refusal, so the next attempt takes that one over, until none is left.
        """
        arguments: dict[str, object] = dict(wanted.arguments)
        for attempt in itertools.count():
            code, text = self._attempt(
                "queue_declare", wanted.name, durable=wanted.durable, auto_delete=False, arguments=arguments
            )
            if not code:
                return arguments if attempt else None
            if code == ACCESS_REFUSED and self.exists_queue(wanted.name):
                return None
            if code != PRECONDITION_FAILED:
                raise DeploymentError(f"Queue {wanted.name!r} could not be declared: {text}")
            refusal = _INEQUIVALENT.search(text)
            if refusal is None or str(arguments.get(refusal["argument"])) == refusal["found"]:
                log.warning("Queue %s is used as it is: %s", wanted.name, text)
                return arguments
            if refusal["found"] is None:
                arguments.pop(refusal["argument"], None)
            else:
                arguments[refusal["argument"]] = (
                    int(refusal["found"]) if refusal["found"].isdigit() else refusal["found"]
                )
        raise AssertionError("unreachable")

    def bind(self, wanted: BindingSpec) -> None:
        method = f"{wanted.destination_type}_bind"
        code, text = self._attempt(method, wanted.destination, wanted.source, wanted.routing_key)
        if code == ACCESS_REFUSED:
            # Who may not bind may still publish; whether the binding exists cannot be asked here.
            log.warning("%s could not be bound to %s: %s", wanted.destination, wanted.source, text)
        elif code:
            raise DeploymentError(f"{wanted.destination!r} could not be bound to {wanted.source!r}: {text}")

    def exists_exchange(self, name: str) -> bool:
        return self._exists(name, self._attempt("exchange_declare", name, "topic", passive=True))

    def exists_queue(self, name: str) -> bool:
        return self._exists(name, self._attempt("queue_declare", name, passive=True))

    def _exists(self, name: str, answer: tuple[int, str]) -> bool:
        code, text = answer
        if code and code != NOT_FOUND:
            raise DeploymentError(f"The broker does not say whether {name!r} exists: {text}")
        return not code


@contextmanager
def _session(url: str, connect_timeout_s: float) -> Iterator[_Session]:
    connection = dial(url, connect_timeout_s)
    try:
        yield _Session(connection)
    except connection.connection_errors as exc:
        raise BrokerUnavailableError(str(exc) or type(exc).__name__) from exc
    finally:
        connection.release()


def _management(url: str | None, vhost: str) -> Management | None:
    return Management(url, vhost) if url else None


def _set_policies(topology: Topology, management: Management | None) -> None:
    names = ", ".join(policy.name for policy in topology.policies)
    if management is None:
        log.warning("The policies %s are not set: broker.management_url is not known.", names)
        return
    try:
        existing = management.policies()
        for policy in topology.policies:
            if existing.get(policy.name, {}).get("definition") != dict(policy.definition):
                management.put_policy(policy)
    except ManagementError as exc:
        log.warning("The policies %s are not set: %s", names, exc)


def _differences(
    queues: list[QueueSpec], other: Mapping[str, Mapping[str, object]], management: Management | None
) -> list[Difference]:
    """Compare the arguments: all of them with the management API, without it those that the broker itself compares."""
    if not other:
        return []
    found = other
    if management is not None:
        try:
            found = management.arguments_by_queue()
        except ManagementError as exc:
            log.debug("arguments of queues are known only from the broker's refusals: %s", exc)
    return [
        difference
        for queue in queues
        if queue.name in other
        for difference in differences(queue, found.get(queue.name, other[queue.name]))
    ]
