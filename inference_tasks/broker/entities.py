"""Exchanges and queues as kombu describes them, in the publisher's own words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kombu import Exchange

from inference_tasks.broker.messages import Declaration, ExchangeDeclaration, QueueDeclaration

__all__ = ["declarations"]


def declarations(entities: Sequence[Any]) -> Iterator[Declaration]:
    """Say what must be declared for these exchanges and queues, in an order in which it can be."""
    for entity in entities:
        if entity.no_declare:
            continue
        if isinstance(entity, Exchange):
            if entity.name:
                yield _exchange(entity)
        else:
            bindings = []
            if entity.exchange is not None and entity.exchange.name:
                yield _exchange(entity.exchange)
                bindings.append((entity.exchange.name, entity.routing_key or ""))
            for one in entity.bindings or ():
                yield _exchange(one.exchange)
                bindings.append((one.exchange.name, one.routing_key or ""))
            yield QueueDeclaration(
                entity.name,
                durable=bool(entity.durable),
                exclusive=bool(entity.exclusive),
                auto_delete=bool(entity.auto_delete),
                arguments=tuple(_queue_arguments(entity).items()),
                bindings=tuple(bindings),
            )


def _exchange(exchange: Exchange) -> ExchangeDeclaration:
    return ExchangeDeclaration(
        exchange.name,
        exchange.type,
        durable=bool(exchange.durable),
        auto_delete=bool(exchange.auto_delete),
        arguments=tuple((exchange.arguments or {}).items()),
    )


def _queue_arguments(queue: Any) -> dict[str, object]:
    arguments = dict(queue.queue_arguments or {})
    for name, value, factor in (
        ("x-expires", queue.expires, 1000),
        ("x-message-ttl", queue.message_ttl, 1000),
        ("x-max-length", queue.max_length, 1),
        ("x-max-length-bytes", queue.max_length_bytes, 1),
        ("x-max-priority", queue.max_priority, 1),
    ):
        if value is not None:
            arguments[name] = int(value * factor)
    return arguments
