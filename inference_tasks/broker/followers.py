"""Messages of one process that share a task: one of them is sent, the others wait for what becomes of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING

from inference_tasks.broker.messages import Accepted, Outcome, Outgoing
from inference_tasks.broker.tickets import Stage
from inference_tasks.state.records import END_STATES, SubmitAnswer

if TYPE_CHECKING:
    from inference_tasks.broker.state_port import StatePort
    from inference_tasks.broker.tickets import Encoded, Flight

__all__ = ["Followers", "under_id"]

log = logging.getLogger(__name__)


class Followers:
    """Who waits for whose message; belongs to one loop.

    A message that is stored is noted in the task's record, so that who joins the task from elsewhere sends none.
    """

    def __init__(
        self,
        *,
        encode: Callable[[Outgoing], Encoded],
        send: Callable[[Flight], None],
        settle: Callable[[Flight, Outcome], None],
        in_background: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        self._encode = encode
        self._send = send
        self._settle = settle
        self._in_background = in_background
        self._by_leader: dict[str, list[Flight]] = {}
        self._stored: list[str] = []
        self.state: StatePort | None = None

    def joined(self, flight: Flight, answer: SubmitAnswer) -> None:
        """Make a submit's message one of the task that it has joined."""
        flight.shares, flight.lift = answer.shares, answer.lift
        flight.created = answer.state not in END_STATES
        flight.outgoing = under_id(flight.outgoing, answer.shares)

    def sent_or_waits(self, flight: Flight) -> None:
        """Send a message whose record is written, or have it wait for another of the same task."""
        task = flight.outgoing.task
        if task is None or not task.shared:
            self._send(flight)
        elif flight.shares and task.id in self._by_leader:
            self._by_leader[task.id].append(flight)
        else:
            self._lead(flight, task.id)

    def _lead(self, flight: Flight, task_id: str) -> None:
        if flight.shares:
            # Nobody knows whether the message of the task that it has joined will be stored. Two do no harm.
            flight.encoded = self._encode(flight.outgoing)
        flight.leads = task_id
        self._by_leader.setdefault(task_id, [])
        self._send(flight)

    def settled(self, flight: Flight, outcome: Outcome) -> None:
        """A message for which others may wait has come to its end."""
        is_stored = isinstance(outcome, Accepted)
        if is_stored:
            if not self._stored:
                self._in_background(self._note_stored())
            self._stored.append(flight.leads)
        waiting = [one for one in self._by_leader.pop(flight.leads, []) if one.stage is Stage.RECORDED]
        for one in waiting:
            if is_stored:
                self._settle(one, Accepted(published=False, task_id=flight.leads, lift=one.lift))
            else:
                self.sent_or_waits(one)

    async def _note_stored(self) -> None:
        await asyncio.sleep(0)
        task_ids, self._stored = self._stored, []
        try:
            if self.state is not None:
                await self.state.confirmed(task_ids)
        except Exception:
            # Who joins these sends a message of his own; that is all.
            log.debug("%d messages were not noted as stored", len(task_ids), exc_info=True)


def under_id(outgoing: Outgoing, task_id: str) -> Outgoing:
    """Return a message as one of another task: that which it has joined."""
    assert outgoing.task is not None, "only tasks are shared"
    own_id = outgoing.task.id
    headers = dict(outgoing.properties.headers)
    headers["id"] = task_id
    if headers.get("root_id") == own_id:
        headers["root_id"] = task_id
    properties = replace(outgoing.properties, headers=headers, correlation_id=task_id)
    return replace(outgoing, properties=properties, task=outgoing.task._replace(id=task_id))
