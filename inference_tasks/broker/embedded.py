"""The embedded broker: task queues in a Valkey of the project's own, for development without RabbitMQ.

Shares, late binding, status, claims and dead letters hold as on RabbitMQ, and so does the bound: it is checked in the
step that stores the message. What differs is said in ``DIFFERENCES``, in the log when a worker starts. Remote control,
events and queues that are not of the tiers go through kombu's Redis transport, unchanged.

Life of a message: ``publish`` puts it into its queue's list and rings the queue's bell → ``take`` moves it to what its
consumer holds → an acknowledgement deletes it there. What is returned, and what a dead consumer held, goes back to its
place at the head of the queue. A consumer is alive as long as it renews its lease.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any, cast

from kombu.transport.virtual import Message
from kombu.utils.json import dumps, loads

from inference_routing.topology import Topology
from inference_tasks.broker.messages import Outgoing
from inference_tasks.broker.tickets import Encoded
from inference_tasks.errors import BrokerUnavailableError, StateUnavailableError
from inference_tasks.state.script import Script
from inference_tasks.state.store import client_from_url

__all__ = ["DIFFERENCES", "EmbeddedDepths", "delivery", "encode_envelope", "load_broker_script", "parked"]

DIFFERENCES = (
    "one machine, no replication; a power cut may lose the last second",
    "delayed messages are moved to their queues by a running worker",
    "waiting tasks do not move up, and what `drop-head` drops goes to the dead letters",
    "topology apply, policies and the management API do not exist",
    "what a killed worker held comes back after 3 s, not at once",
)
"""How the embedded broker differs from RabbitMQ."""

_PARKED = re.compile(r"^((?:[01]\.){28})(.+)$")


@cache
def load_broker_script(name: str) -> Script:
    """Read a script of the embedded broker, with the prelude that all share before it."""
    folder = resources.files(__package__).joinpath("scripts")
    prelude = folder.joinpath("prelude.lua").read_text("utf-8")
    return Script(name, prelude + folder.joinpath(f"{name}.lua").read_text("utf-8"))


def parked(routing_key: str) -> tuple[str, int]:
    """Return queue and delay in seconds of a routing key of kombu's native delayed delivery; 0 if it is none."""
    found = _PARKED.match(routing_key)
    if found is None:
        return routing_key, 0
    return found[2], int(found[1].replace(".", ""), 2)


def encode_envelope(outgoing: Outgoing) -> Encoded:
    """Write a message as kombu's virtual transports do, headers first; may be called in any thread."""
    properties = outgoing.properties
    try:
        body, body_encoding = outgoing.body.decode(), None
    except UnicodeDecodeError:
        body, body_encoding = base64.b64encode(outgoing.body).decode(), "base64"
    fields: dict[str, object] = {
        "correlation_id": properties.correlation_id,
        "reply_to": properties.reply_to,
        "delivery_mode": properties.delivery_mode,
        "delivery_info": {"exchange": outgoing.exchange, "routing_key": outgoing.routing_key},
        "priority": properties.priority or 0,
        "body_encoding": body_encoding,
        "delivery_tag": properties.message_id or secrets.token_hex(16),
    }
    headers = dumps(properties.headers)
    rest = dumps(
        {
            "body": body,
            "content-type": properties.content_type,
            "content-encoding": properties.content_encoding,
            "properties": fields,
        }
    )
    # The scripts add headers to a message that begins like this.
    head = f'{{"headers": {headers}, {rest[1:]}'.encode()
    return Encoded(head, b"", len(outgoing.body) + len(headers), None)


def delivery(message: bytes, tag: str, channel: object, accept: set[str]) -> Any:
    """Return a fetched message as kombu's own.

    What is no envelope becomes a message without headers, which the worker sends to the dead letters.

    Args:
        message: the envelope.
        tag: what the message is acknowledged by.
        channel: takes ``basic_ack``, ``basic_reject`` and ``decode_body``, whose argument is decoded already.
        accept: content types that may be decoded.
    """
    try:
        envelope = loads(message)
        properties = dict(envelope["properties"])
        body = envelope["body"]
        if properties.get("body_encoding") == "base64":
            body = base64.b64decode(body)
        body = body if isinstance(body, str | bytes) else dumps(body)
        headers = envelope.get("headers")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, binascii.Error):
        envelope, properties, headers, body = {}, {}, {}, message
    properties["delivery_tag"] = tag
    properties.setdefault("delivery_info", {})
    made = Message({**envelope, "properties": properties, "body": body, "headers": headers}, channel=cast(Any, channel))
    made.accept = accept
    return made


class EmbeddedDepths:
    """Counts the waiting messages of the embedded broker's queues; safe to share between threads."""

    def __init__(self, url: str, *, connect_timeout_s: float = 3.0) -> None:
        self._client = client_from_url(url, socket_timeout_s=connect_timeout_s)

    def of(self, topology: Topology) -> dict[str, int]:
        """Return {queue: ready messages} of the tiers and the dead letters."""
        return self.of_queues(queue.name for queue in topology.queues)

    def of_queues(self, names: Iterable[str]) -> dict[str, int]:
        """Return {queue: ready messages}; here every queue exists, and may be empty.

        Raises:
            BrokerUnavailableError: the broker cannot be reached.
        """
        queues = list(names)
        try:
            found: Sequence[int] = load_broker_script("depths").call(self._client, (), queues)
        except StateUnavailableError as exc:
            raise BrokerUnavailableError(str(exc)) from exc
        return dict(zip(queues, map(int, found), strict=True))

    def close(self) -> None:
        """Close the connection; it is opened again when needed."""
        disconnect = getattr(getattr(self._client, "connection_pool", None), "disconnect", None)
        if disconnect is not None:
            disconnect()
