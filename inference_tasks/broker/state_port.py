"""What the publisher needs of the state store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inference_tasks.state.records import NewTask, SubmitAnswer

__all__ = ["StatePort"]


class StatePort(Protocol):
    """What the publisher needs of the state store; used in its loop only."""

    async def submit(self, tasks: Sequence[NewTask], /) -> Sequence[SubmitAnswer]:
        """Write the records that do not exist yet, in one round trip."""

    async def retract(self, task_ids: Sequence[str], nonce: str, refused: str = "", /) -> int:
        """Delete those records that this nonce created, or was the last to hold, and that nobody has started.

        With a reason in ``refused`` they are counted as refused for it.
        """

    async def confirmed(self, task_ids: Sequence[str], /) -> None:
        """Note that the messages of these shared tasks are stored."""

    async def aclose(self) -> None:
        """Close the connections."""
