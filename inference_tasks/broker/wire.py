"""AMQP frames of ``basic.publish``, and a channel that matches confirms to messages by delivery tag.

``aiormq`` keeps the connection (handshake, heartbeat, alarms, other methods). Its own ``basic_publish`` costs about
290 µs a message, because it builds frame objects and waits in a task for each; here a message is encoded once, to
bytes, by whoever sends it, and many messages are one write.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from math import isfinite
from struct import Struct

from aiormq.abc import ChannelFrame, ConfirmationFrameType
from aiormq.channel import Channel
from aiormq.connection import Connection
from pamqp import commands
from pamqp.header import ContentHeader

from inference_tasks.broker.messages import Outgoing, Properties
from inference_tasks.broker.tickets import Encoded, Flight, Verdict

__all__ = ["CHANNEL_NUMBER", "ConfirmChannel", "encode", "encode_table"]

# Messages are encoded before a connection exists, so the channel's number is fixed.
CHANNEL_NUMBER = 1

# Smaller than the frame_max of every supported broker (at least 8192 from RabbitMQ 4.1 on), for the same reason.
BODY_FRAME_BYTES = 8_184

# The headers of a message must fit one frame, and RabbitMQ's frame_max is 131 072 unless somebody lowered it.
HEADER_FRAME_BYTES = 131_000

# Smaller writes are not waited for: what callers of single messages can put into the socket's buffer is little.
DRAIN_BYTES = 32_768

_FRAME_END = b"\xce"
_MESSAGE_ID_BYTES = 16

_frame_head = Struct(">BHI").pack
_method_head = Struct(">HHH").pack
_content_head = Struct(">HHQH").pack
_uint32 = Struct(">I").pack
_tagged_uint32 = Struct(">cI").pack
_tagged_int32 = Struct(">ci").pack
_tagged_int64 = Struct(">cq").pack
_tagged_double = Struct(">cd").pack
_tagged_uint64 = Struct(">cQ").pack
_tagged_decimal = Struct(">cBi").pack


@lru_cache(maxsize=4096)
def _shortstr(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 255:
        raise ValueError(f"A short string of AMQP holds at most 255 bytes, this one has {len(raw)}: {text[:40]!r}…")
    return bytes((len(raw),)) + raw


def _item(value: object) -> bytes:
    if value is None:
        return b"V"
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return _tagged_uint32(b"S", len(raw)) + raw
    if isinstance(value, bool):
        return b"t\x01" if value else b"t\x00"
    if isinstance(value, int):
        if -0x80000000 <= value <= 0x7FFFFFFF:
            return _tagged_int32(b"I", value)
        # Larger than the widest field of AMQP: sent as text, as whatever else has no field of its own.
        return _tagged_int64(b"l", value) if -(2**63) <= value < 2**63 else _item(str(value))
    if isinstance(value, float):
        # A broker may close the connection over a field that is no number.
        return _tagged_double(b"d", value) if isfinite(value) else _item(str(value))
    if isinstance(value, Mapping):
        return b"F" + encode_table(value)
    if isinstance(value, list | tuple):
        items = b"".join([_item(one) for one in value])
        return b"A" + _uint32(len(items)) + items
    if isinstance(value, bytes):
        return _tagged_uint32(b"x", len(value)) + value
    if isinstance(value, datetime):
        return _tagged_uint64(b"T", int(value.timestamp()))
    if isinstance(value, Decimal):
        _, digits, exponent = value.as_tuple()
        if not isinstance(exponent, int) or exponent > 0 or len(digits) > 9:
            return _item(str(value))
        return _tagged_decimal(b"D", -exponent, int(value.scaleb(-exponent)))
    # Whatever else turns up (a lazy string, a UUID, an enum) is sent as its text, as JSON encoders of Celery do.
    return _item(str(value))


def encode_table(table: Mapping[str, object]) -> bytes:
    """Encode a field table of AMQP 0-9-1, with its length; the types are those RabbitMQ reads back unchanged."""
    parts: list[bytes] = []
    for key, value in table.items():
        parts.append(_shortstr(key))
        parts.append(_item(value))
    encoded = b"".join(parts)
    return _uint32(len(encoded)) + encoded


def _encode_properties(properties: Properties) -> tuple[int, bytes]:
    flags = 0
    parts: list[bytes] = []
    if properties.content_type is not None:
        flags |= 0x8000
        parts.append(_shortstr(properties.content_type))
    if properties.content_encoding is not None:
        flags |= 0x4000
        parts.append(_shortstr(properties.content_encoding))
    flags |= 0x2000 | 0x1000
    parts.append(encode_table(properties.headers))
    parts.append(bytes((properties.delivery_mode,)))
    if properties.priority is not None:
        flags |= 0x0800
        parts.append(bytes((min(max(properties.priority, 0), 255),)))
    for flag, text in (
        (0x0400, properties.correlation_id),
        (0x0200, properties.reply_to),
        (0x0100, properties.expiration),
        (0x0080, properties.message_id),
    ):
        if text is not None:
            flags |= flag
            raw = text.encode()
            parts.append(bytes((len(raw),)) + raw)
    return flags, b"".join(parts)


def encode(outgoing: Outgoing) -> Encoded:
    """Encode a message; may be called in any thread.

    Raises:
        ValueError: a name or a property is longer than AMQP allows.
    """
    body = outgoing.body
    body_bytes = len(body)
    flags, properties = _encode_properties(outgoing.properties)
    size_bytes = body_bytes + len(properties)
    own_id = outgoing.properties.message_id
    method = b"".join(
        (
            _method_head(60, 40, 0),
            _shortstr(outgoing.exchange),
            _shortstr(outgoing.routing_key),
            b"\x01" if outgoing.mandatory else b"\x00",
        )
    )
    header_bytes = 14 + len(properties)
    if own_id is None:
        # The message id comes last of the properties used here, so it can be added when the delivery tag is known.
        flags |= 0x0080
        header_bytes += 1 + _MESSAGE_ID_BYTES
    head = b"".join(
        (
            _frame_head(1, CHANNEL_NUMBER, len(method)),
            method,
            _FRAME_END,
            _frame_head(2, CHANNEL_NUMBER, header_bytes),
            _content_head(60, 0, body_bytes, flags),
            properties,
        )
    )
    if body_bytes <= BODY_FRAME_BYTES:
        frames = _frame_head(3, CHANNEL_NUMBER, body_bytes) + body + _FRAME_END if body_bytes else b""
    else:
        pieces: list[bytes] = []
        for start in range(0, body_bytes, BODY_FRAME_BYTES):
            piece = body[start : start + BODY_FRAME_BYTES]
            pieces += (_frame_head(3, CHANNEL_NUMBER, len(piece)), piece, _FRAME_END)
        frames = b"".join(pieces)
    return Encoded(head, _FRAME_END + frames, size_bytes, own_id)


class ConfirmChannel(Channel):
    """A channel in confirm mode that writes many messages at once and settles each by its own delivery tag.

    A late answer settles the message it belongs to and no other. Uses aiormq's ``_on_confirm_frame``,
    ``_on_return_frame``, ``_get_frame`` and ``_read_content``, the only names outside its public interface.
    """

    def __init__(self, connection: Connection, on_settled: Callable[[Flight, Verdict], None]) -> None:
        super().__init__(connection, CHANNEL_NUMBER, publisher_confirms=True)
        self.unsettled: dict[int, Flight] = {}
        self._lowest_tag = 1
        self._on_settled = on_settled
        self._own_ids: dict[str, Flight] = {}
        # Part of every message id, so that an id is never met twice and a return names its message for certain.
        self._nonce = secrets.token_hex(4)

    async def open_confirming(self, timeout_s: float) -> None:
        """Open the channel on its connection and switch confirms on."""
        self.connection.channels[self.number] = self
        await self.open(timeout=timeout_s)

    def publish(self, flights: Sequence[Flight], now_s: float) -> asyncio.Future[None] | None:
        """Write all of ``flights`` as one piece; return a future for the socket's having taken it if it is large.

        Raises:
            asyncio.QueueFull: the connection's writer is stuck; nothing was written.
        """
        parts: list[bytes] = []
        tag = self.delivery_tag
        for flight in flights:
            tag += 1
            encoded = flight.encoded
            parts.append(encoded.head)
            if encoded.message_id is None:
                parts.append(f"\x10{self._nonce}{tag & 0xFFFFFFFF:08x}".encode())
            else:
                self._own_ids[encoded.message_id] = flight
            parts.append(encoded.tail)
            flight.tag = tag
            flight.written_at_s = now_s
            self.unsettled[tag] = flight
        self.delivery_tag = tag
        payload = b"".join(parts)
        drained: asyncio.Future[None] | None = None
        if len(payload) >= DRAIN_BYTES:
            drained = self.loop.create_future()
        self.write_queue.put_nowait(ChannelFrame(payload=payload, should_close=False, drain_future=drained))
        return drained

    def oldest_written_at_s(self) -> float | None:
        """When the message that has waited longest for its answer was written, None if none waits."""
        if not self.unsettled:
            return None
        while self._lowest_tag not in self.unsettled:
            self._lowest_tag += 1
        return self.unsettled[self._lowest_tag].written_at_s

    def take_unsettled(self) -> list[Flight]:
        """Forget all messages without an answer and return them, in the order they were written."""
        lost = [self.unsettled[tag] for tag in sorted(self.unsettled)]
        self.unsettled.clear()
        self._own_ids.clear()
        return lost

    def _settle(self, tag: int, verdict: Verdict) -> None:
        flight = self.unsettled.pop(tag, None)
        if flight is None:
            return
        if flight.encoded.message_id is not None:
            self._own_ids.pop(flight.encoded.message_id, None)
        self._on_settled(flight, verdict)

    async def _on_confirm_frame(self, frame: ConfirmationFrameType) -> None:
        tag = frame.delivery_tag or 0
        verdict = Verdict.ACCEPTED if isinstance(frame, commands.Basic.Ack) else Verdict.REFUSED
        if not getattr(frame, "multiple", False):
            self._settle(tag, verdict)
            return
        if tag == 0:
            # The protocol's way to say "all so far".
            tag = self.delivery_tag
        for each in range(self._lowest_tag, tag + 1):
            self._settle(each, verdict)
        self._lowest_tag = max(self._lowest_tag, tag + 1)

    async def _on_return_frame(self, frame: commands.Basic.Return) -> None:
        header = await self._get_frame()
        if not isinstance(header, ContentHeader):
            raise TypeError(f"A content header must follow basic.return, {header!r} came.")
        message = await self._read_content(frame, header)
        message_id = message.header.properties.message_id or ""
        flight = self._own_ids.get(message_id)
        if flight is None and len(message_id) == _MESSAGE_ID_BYTES and message_id.startswith(self._nonce):
            flight = self.unsettled.get(int(message_id[8:], 16))
        if flight is not None:
            # The broker acks a returned message afterwards, which must not count as stored.
            self._settle(flight.tag, Verdict.UNROUTABLE)
