"""The bytes written are those AMQP asks for, and the names of aiormq that are relied on exist."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pamqp.decode
import pamqp.frame
import pytest
from aiormq.channel import Channel
from aiormq.connection import Connection
from hypothesis import given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from inference_tasks.broker.messages import Outgoing, Properties
from inference_tasks.broker.tickets import Encoded
from inference_tasks.broker.wire import BODY_FRAME_BYTES, CHANNEL_NUMBER, encode, encode_table

MESSAGE_ID = b"\x10" + b"0123456789abcdef"

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
plain = st.none() | st.booleans() | numbers | texts
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))


def frames(encoded: Encoded) -> list[Any]:
    data = encoded.head + (MESSAGE_ID if encoded.message_id is None else b"") + encoded.tail
    read = []
    while data:
        size, channel, frame = pamqp.frame.unmarshal(data)
        assert channel == CHANNEL_NUMBER
        read.append(frame)
        data = data[size:]
    return read


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, float("inf"), float("-inf"), float("nan")])
def test_a_number_that_no_field_can_hold_is_sent_as_text(value: float) -> None:
    _, read = pamqp.decode.field_table(encode_table({"n": value}))
    assert read == {"n": str(value)}


@given(st.dictionaries(texts, values, max_size=6))
def test_a_table_reads_back_as_it_was(table: dict[str, object]) -> None:
    consumed, read = pamqp.decode.field_table(encode_table(table))
    assert consumed == len(encode_table(table))
    assert read == table


def test_times_decimals_and_what_json_would_print_are_sent_too() -> None:
    moment = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    table = {"time": moment, "price": Decimal("1.25"), "path": ValueError("x"), "tuple": (1, 2)}
    _, read = pamqp.decode.field_table(encode_table(table))
    assert read == {"time": moment, "price": Decimal("1.25"), "path": "x", "tuple": [1, 2]}


@given(
    body=st.binary(max_size=40) | st.sampled_from([0, 1, 2]).map(lambda extra: b"x" * (BODY_FRAME_BYTES + extra)),
    properties=st.builds(
        Properties,
        content_type=st.none() | st.just("application/json"),
        content_encoding=st.none() | st.just("utf-8"),
        headers=st.dictionaries(texts, plain, max_size=3),
        delivery_mode=st.sampled_from([1, 2]),
        priority=st.none() | st.integers(0, 9),
        correlation_id=st.none() | texts,
        reply_to=st.none() | texts,
        expiration=st.none() | st.just("1000"),
        message_id=st.none() | texts,
    ),
    mandatory=st.booleans(),
)
def test_a_message_reads_back_as_it_was(body: bytes, properties: Properties, mandatory: bool) -> None:
    encoded = encode(Outgoing(body, "exchange", "key", properties, mandatory))
    method, header, *bodies = frames(encoded)
    assert isinstance(method, Basic.Publish)
    assert (method.exchange, method.routing_key, method.mandatory) == ("exchange", "key", mandatory)
    assert isinstance(header, ContentHeader)
    assert header.body_size == len(body)
    found = header.properties
    assert found.message_id == (properties.message_id if properties.message_id is not None else "0123456789abcdef")
    for name in ("content_type", "content_encoding", "headers", "delivery_mode", "priority"):
        assert getattr(found, name) == getattr(properties, name)
    for name in ("correlation_id", "reply_to", "expiration"):
        assert getattr(found, name) == getattr(properties, name)
    assert all(isinstance(one, ContentBody) and len(one.value) <= BODY_FRAME_BYTES for one in bodies)
    assert b"".join(one.value for one in bodies) == body


def test_a_routing_key_longer_than_amqp_allows_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="255"):
        encode(Outgoing(b"", "", "k" * 256, Properties()))


def test_the_parts_of_aiormq_that_are_relied_on_are_there() -> None:
    for name in ("_on_confirm_frame", "_on_return_frame", "_get_frame", "_read_content"):
        assert inspect.iscoroutinefunction(getattr(Channel, name))
    reader = inspect.getsource(Channel._reader)
    assert "self._on_confirm_frame(frame)" in reader
    assert "self._on_return_frame(frame)" in reader
    assert list(inspect.signature(Channel.__init__).parameters)[1:4] == ["connector", "number", "publisher_confirms"]
    opening = inspect.getsource(Connection.channel)
    assert "self.channels[channel_number] = channel" in opening
    assert "await channel.open(" in opening
    assert "write_queue" in Connection.__annotations__
