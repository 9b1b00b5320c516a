"""What the publisher needs of whoever traces: told before messages are written and once their outcomes are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self

from inference_tasks.broker.messages import Outcome, Outgoing

__all__ = ["Sending", "Tracer"]


class Sending(Protocol):
    """One call that sends, from before its first message until its outcomes are known."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The call is over."""

    def marked(self, outgoings: Iterable[Outgoing]) -> Iterator[Outgoing]:
        """Return the messages, with the context of the trace in their headers."""

    def ended(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Note the outcomes and return them."""


#: Begins a ``Sending``; called with what OpenTelemetry calls the messaging system.
Tracer = Callable[[str], Sending]
