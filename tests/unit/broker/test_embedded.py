"""How the embedded broker writes messages and reads them back, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kombu.transport.native_delayed_delivery import calculate_routing_key

from inference_tasks.broker.embedded import delivery, encode_envelope, parked
from inference_tasks.broker.embedded_server import EmbeddedServer, is_embedded, socket_path
from inference_tasks.broker.messages import Outgoing, Properties

ACCEPT = {"application/json"}


class Channel:
    """What a fetched message needs of its channel."""

    no_ack_consumers = None

    def decode_body(self, body: object, encoding: object = None) -> object:
        return body


def outgoing(body: bytes, **properties: Any) -> Outgoing:
    return Outgoing(body, "inference", "inference.batch", Properties(**properties))


def read_back(message: bytes) -> Any:
    return delivery(message, "7", Channel(), ACCEPT)


def test_a_message_comes_back_as_it_was_sent() -> None:
    sent = outgoing(b'[["\xc3\xa9"], {}, {}]', headers={"id": "a", "n": [1, {}]}, correlation_id="a", reply_to="r")
    message = read_back(encode_envelope(sent).head)
    assert message.payload == [["é"], {}, {}]
    assert message.headers == {"id": "a", "n": [1, {}]}
    assert message.delivery_tag == "7"
    assert message.delivery_info == {"exchange": "inference", "routing_key": "inference.batch"}
    assert (message.properties["correlation_id"], message.properties["reply_to"]) == ("a", "r")


def test_bytes_that_are_no_text_come_back_unchanged() -> None:
    message = read_back(encode_envelope(outgoing(b"\xff\x00\xfe")).head)
    assert message.body == b"\xff\x00\xfe"


def test_headers_come_first_where_the_scripts_add_theirs() -> None:
    envelope = encode_envelope(outgoing(b"{}", headers={"id": "a"})).head
    assert envelope.startswith(b'{"headers": {"id"')
    assert json.loads(envelope)["body"] == "{}"


def test_what_is_no_envelope_is_a_message_without_headers() -> None:
    for text in (b"", b"nothing", b"[]", b"{}", b'{"properties": 1, "body": ""}', b"\xff"):
        message = read_back(text)
        assert message.headers == {}
        assert message.body == text


def test_a_delay_is_read_from_the_routing_key() -> None:
    assert parked("inference.batch") == ("inference.batch", 0)
    assert parked(calculate_routing_key(77, "inference.batch.returned")) == ("inference.batch.returned", 77)


def test_an_address_names_its_socket(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "a b" / "100%#?")
    assert is_embedded(server.url)
    assert socket_path(server.url) == server.socket
    assert not is_embedded("redis://localhost:6379/0")
    assert not is_embedded("amqp://localhost")
