"""A publisher that was told that its queues exist declares them only if it finds that they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kombu import Connection, Exchange, Queue

from inference_tasks.broker.messages import Accepted, Outgoing, Properties
from inference_tasks.broker.publisher import Publisher

EXCHANGE, QUEUE = "told", "told.queue"


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def declare(amqp_url: str, calls: list[str]) -> Callable[[], None]:
    def declare() -> None:
        calls.append("declared")
        with Connection(amqp_url) as connection:
            Queue(QUEUE, Exchange(EXCHANGE, type="topic"), routing_key=QUEUE)(connection.default_channel).declare()

    return declare


@pytest.fixture
def publisher(amqp_url: str, declare: Callable[[], None]) -> Iterator[Publisher]:
    publisher = Publisher(amqp_url, declare=declare)
    publisher.topology_exists()
    yield publisher
    publisher.close()


def message() -> Outgoing:
    return Outgoing(b"[]", EXCHANGE, QUEUE, Properties(headers={"id": "1", "task": "t"}))


def test_what_exists_is_not_declared_again(publisher: Publisher, declare: Callable[[], None], calls: list[str]) -> None:
    declare()
    calls.clear()
    assert publisher.send(message()) == Accepted()
    assert calls == []


def test_an_exchange_that_is_missing_is_declared_after_all(publisher: Publisher, calls: list[str]) -> None:
    assert publisher.send(message()) == Accepted()
    assert calls == ["declared"]


def test_a_queue_that_is_missing_is_declared_after_all(
    publisher: Publisher, declare: Callable[[], None], amqp_url: str, calls: list[str]
) -> None:
    declare()
    calls.clear()
    with Connection(amqp_url) as connection:
        Queue(QUEUE)(connection.default_channel).delete()
    assert publisher.send(message()) == Accepted()
    assert calls == ["declared"]
