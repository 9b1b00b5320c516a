"""One connection for declarations and questions about exchanges, queues and bindings."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from kombu import Connection

from inference_routing.topology import BindingSpec, ExchangeSpec, QueueSpec
from inference_tasks.broker.dial import dial
from inference_tasks.errors import BrokerUnavailableError, DeploymentError

__all__ = ["Session", "open_session"]

log = logging.getLogger(__name__)

ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406

# The broker's words: inequivalent arg 'x-max-length' for queue 'q' in vhost '/': received '9' but current is '2', where
# either may be none, and where the values of some arguments come with their types.
_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>x-[^']+)'.* but current is (?:none|(?:the value )?'(?P<found>[^']*)')"
)


class Session:
    """One connection; its channel is replaced after every error, because the broker closes it then."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._channel: Any = None
        self._errors = connection.channel_errors

    @property
    def vhost(self) -> str:
        return self.connection.virtual_host or "/"

    @property
    def version(self) -> str:
        properties: Mapping[str, object] = getattr(self.connection.connection, "server_properties", {})
        return str(properties.get("version", ""))

    @property
    def channel(self) -> Any:
        if self._channel is None:
            self._channel = self.connection.channel()
        return self._channel

    def _attempt(self, method: str, *args: object, **kwargs: object) -> tuple[int, str]:
        """Call a method of the channel; return 0 or the broker's code, and its text."""
        try:
            getattr(self.channel, method)(*args, **kwargs)
        except self._errors as exc:
            self._channel = None
            return int(getattr(exc, "code", 0) or 0) or -1, str(exc)
        return 0, ""

    def exchange(self, wanted: ExchangeSpec, arguments: Mapping[str, str] | None = None) -> None:
        """Declare an exchange; one that exists otherwise is used as it is."""
        code, text = self._attempt(
            "exchange_declare",
            wanted.name,
            wanted.type,
            durable=wanted.durable,
            auto_delete=False,
            arguments=dict(arguments or {}),
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

    def bind(self, wanted: BindingSpec, *, is_needed: bool = False) -> None:
        """Bind, if it is not bound yet.

        Args:
            is_needed: whether being refused is an error; else it is logged.
        """
        method = f"{wanted.destination_type}_bind"
        code, text = self._attempt(method, wanted.destination, wanted.source, wanted.routing_key)
        if code == ACCESS_REFUSED and not is_needed:
            # Who may not bind may still publish; whether the binding exists cannot be asked here.
            log.warning("%s could not be bound to %s: %s", wanted.destination, wanted.source, text)
        elif code:
            raise DeploymentError(f"{wanted.destination!r} could not be bound to {wanted.source!r}: {text}")

    def unbind(self, unwanted: BindingSpec) -> None:
        """Remove a binding; one that does not exist is fine."""
        method = f"{unwanted.destination_type}_unbind"
        code, text = self._attempt(method, unwanted.destination, unwanted.source, unwanted.routing_key)
        if code and code != NOT_FOUND:
            raise DeploymentError(f"{unwanted.destination!r} could not be unbound from {unwanted.source!r}: {text}")

    def exists_exchange(self, name: str) -> bool:
        """Whether there is an exchange of this name."""
        return self._exists(name, self._attempt("exchange_declare", name, "topic", passive=True))

    def exists_queue(self, name: str) -> bool:
        """Whether there is a queue of this name."""
        return self._exists(name, self._attempt("queue_declare", name, passive=True))

    def ready(self, name: str) -> int:
        """How many messages a queue has that nobody holds; 0 if there is no such queue."""
        try:
            return int(self.channel.queue_declare(name, passive=True).message_count)
        except self._errors as exc:
            self._channel = None
            self._exists(name, (int(getattr(exc, "code", 0) or 0) or -1, str(exc)))
            return 0

    def delete_queue(self, name: str) -> None:
        """Delete a queue, whatever is in it; one that does not exist is fine."""
        self._delete("queue_delete", name)

    def delete_exchange(self, name: str) -> None:
        """Delete an exchange with its bindings; one that does not exist is fine."""
        self._delete("exchange_delete", name)

    def _delete(self, method: str, name: str) -> None:
        code, text = self._attempt(method, name)
        if code and code != NOT_FOUND:
            raise DeploymentError(f"{name!r} could not be deleted: {text}")

    def lock(self, name: str) -> bool:
        """Take a name for as long as this connection lives; False if another connection has it."""
        code, text = self._attempt("queue_declare", name, exclusive=True, durable=False, auto_delete=True)
        if code and code != RESOURCE_LOCKED:
            raise DeploymentError(f"Queue {name!r} could not be declared: {text}")
        return not code

    def pause(self, seconds: float) -> None:
        """Wait, and keep the connection alive meanwhile."""
        end = monotonic() + seconds
        while (left := end - monotonic()) > 0:
            try:
                self.connection.drain_events(timeout=min(left, 1.0))
            except TimeoutError:
                self.connection.heartbeat_check()

    def _exists(self, name: str, answer: tuple[int, str]) -> bool:
        code, text = answer
        if code and code != NOT_FOUND:
            raise DeploymentError(f"The broker does not say whether {name!r} exists: {text}")
        return not code


@contextmanager
def open_session(
    url: str, connect_timeout_s: float, *, heartbeat_s: int = 0, answer_timeout_s: float | None = None
) -> Iterator[Session]:
    """Connect, and close at the end.

    Args:
        answer_timeout_s: longest wait for any one answer of the broker; None waits for as long as the connection lives.

    Raises:
        BrokerUnavailableError: the broker cannot be reached, or the connection is lost.
    """
    connection = dial(url, connect_timeout_s, heartbeat_s=heartbeat_s, answer_timeout_s=answer_timeout_s)
    try:
        yield Session(connection)
    except connection.connection_errors as exc:
        # Not release(): it would say good-bye to a peer that may be frozen, and wait for the answer.
        with suppress(Exception):
            connection.collect()
        raise BrokerUnavailableError(str(exc) or type(exc).__name__) from exc
    finally:
        connection.release()
