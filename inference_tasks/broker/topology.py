"""Declaring the topology, and comparing it with what the broker has."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kombu import Connection

from inference_routing.topology import BindingSpec, Difference, ExchangeSpec, QueueSpec, Topology, differences
from inference_tasks.broker.management import Management, ManagementError
from inference_tasks.errors import BrokerUnavailableError, DeploymentError

__all__ = ["TopologyReport", "broker_version", "check", "declare"]

log = logging.getLogger(__name__)

ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED = 403, 404, 406

# The broker's words: inequivalent arg 'x-max-length' for queue 'q' in vhost '/': received the value '9' of type 'long'
# but current is the value '2' of type 'long' (or: received none, current is none).
_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)'.*?received (?:none|the value '(?P<wanted>[^']*)'.*?|'(?P<wanted2>[^']*)')"
    r" but current is (?:none|the value '(?P<found>[^']*)'|'(?P<found2>[^']*)')"
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
        refused = {queue.name: text for queue in found if (text := session.queue(queue)) is not None}
        for binding in (*topology.bindings, *topology.delay.bindings):
            session.bind(binding)
    if topology.policies:
        _set_policies(topology, management)
    differing = _differences(found, refused, management)
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
    refused: dict[str, str] = {}
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
            text = session.queue(queue)
            if text is not None:
                refused[queue.name] = text
    return TopologyReport(tuple(_differences(existing, refused, management)), tuple(missing))


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

    def queue(self, wanted: QueueSpec) -> str | None:
        """Declare a queue; return None, or the broker's words if it exists with other arguments."""
        code, text = self._attempt(
            "queue_declare", wanted.name, durable=wanted.durable, auto_delete=False, arguments=dict(wanted.arguments)
        )
        if code == PRECONDITION_FAILED:
            return text
        if code and not (code == ACCESS_REFUSED and self.exists_queue(wanted.name)):
            raise DeploymentError(f"Queue {wanted.name!r} could not be declared: {text}")
        return None

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
    connection = Connection(url, connect_timeout=connect_timeout_s)
    try:
        connection.connect()
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
    queues: list[QueueSpec], refused: Mapping[str, str], management: Management | None
) -> list[Difference]:
    """Say how the refused queues differ: all of it from the management API, else the first of it from the refusal."""
    if not refused:
        return []
    found: Mapping[str, Mapping[str, object]] = {}
    if management is not None:
        try:
            found = management.arguments_by_queue()
        except ManagementError as exc:
            log.debug("arguments of queues are read from the broker's refusals: %s", exc)
    differing: list[Difference] = []
    for queue in queues:
        if queue.name not in refused:
            continue
        if queue.name in found:
            differing += differences(queue, found[queue.name])
        else:
            differing += _from_refusal(queue, refused[queue.name])
    return differing


def _from_refusal(queue: QueueSpec, text: str) -> list[Difference]:
    matched = _INEQUIVALENT.search(text)
    if matched is None:
        return [Difference(queue.name, "arguments", None, text, "new queue")]
    argument = matched["argument"]
    value = matched["found"] if matched["found"] is not None else matched["found2"]
    current = {name: wanted for name, wanted in queue.arguments.items() if name != argument}
    if value is not None:
        current[argument] = value
    return differences(queue, current)
