"""Messages as the state store keeps them, for a copy that can be published without finding the message itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from kombu.utils.json import loads

from inference_tasks.broker.embedded import encode_envelope
from inference_tasks.broker.messages import Outgoing, Properties
from inference_tasks.routes import HEADER

__all__ = ["as_kept", "copy_of_kept"]


def as_kept(outgoing: Outgoing) -> str:
    """Return a message as text without control characters: kombu's envelope, as on the embedded broker."""
    return encode_envelope(outgoing).head.decode()


def copy_of_kept(text: str, changes: Mapping[str, object], *, exchange: str, routing_key: str) -> Outgoing:
    """Return a copy of a kept message for another place, with some entries of our header changed."""
    envelope: dict[str, Any] = loads(text)
    properties, body = envelope["properties"], envelope["body"]
    is_binary = properties.get("body_encoding") == "base64"
    headers = envelope["headers"]
    return Outgoing(
        body=base64.b64decode(body) if is_binary else body.encode(),
        exchange=exchange,
        routing_key=routing_key,
        properties=Properties(
            content_type=envelope.get("content-type"),
            content_encoding=envelope.get("content-encoding"),
            headers={**headers, HEADER: {**headers[HEADER], **changes}},
            delivery_mode=properties["delivery_mode"],
            priority=properties.get("priority"),
            correlation_id=properties.get("correlation_id"),
            reply_to=properties.get("reply_to"),
        ),
    )
