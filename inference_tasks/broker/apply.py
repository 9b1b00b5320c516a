"""Changing existing queues to what the settings ask for, without losing a message and without stopping the service.

A queue's arguments cannot be changed and it cannot be renamed, so a queue that must differ is replaced in place::

    exchange ──key──▶ queue                                      as it was
    exchange ──key──▶ switch ──▶ queue                           prepared
    exchange ──key──▶ switch ··▶ otherwise ──▶ stand-in          switched; the queue is emptied and deleted
    exchange ──key──▶ queue                                      declared anew and bound; the helpers are deleted

``switch`` is a fanout exchange whose alternate exchange is ``otherwise``: a message takes the alternate way exactly
when no queue is bound to ``switch``. So one bind or unbind turns all traffic at once: at every moment a message
reaches one queue, never none and never two. (Not: bind the new, then unbind the old. In between each message is stored
twice, and a submit that the old, full queue refuses is nevertheless stored in the new one.)

The stand-in of a tier's queue is another lane of the tier that has no bound, so workers go on serving the tier: they
know no queue of another name. What was accepted is thus never refused by a smaller bound. Only the queues without a
tier, such as the dead letters', have no such lane: their messages wait in a queue of their own and are moved back.

The old queue is deleted once it has neither ready messages nor any that a worker holds: a task that runs would be lost
with its worker. Only the management API tells how many are held, some seconds late, and quorum queues refuse "delete if
empty"; but as nothing new arrives, a queue that was empty once stays so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Literal, cast

from inference_routing.lane import AGED, FRESH, RETURNED
from inference_routing.topology import (
    DEAD,
    DROPPED,
    MAINTENANCE,
    WAITING,
    BindingSpec,
    Difference,
    ExchangeSpec,
    PolicySpec,
    QueueSpec,
    Topology,
)
from inference_tasks.broker.in_effect import Policies, by_queue, definition_needed
from inference_tasks.broker.management import Management
from inference_tasks.broker.moving import move
from inference_tasks.broker.session import Session, open_session
from inference_tasks.broker.topology import declare_missing, find_differences, management_of
from inference_tasks.errors import DeploymentError

__all__ = ["Change", "Step", "apply_topology"]

Step = Literal[
    "created", "policy", "left", "prepared", "switched", "moved", "waiting", "deleted", "declared", "bound", "done"
]

#: Longest delay after which the management API counts a message: twice the broker's interval of 5 s, and some.
UNSEEN_S = 12.0

#: How long the API may say nothing at all of a queue before that is an error.
SILENT_S = 60.0

_LOOK_S = 0.5
_TELL_S = 5.0
_HEARTBEAT_S = 30
_LOCK_S = 3.0

_STAND_IN_LANES = {FRESH: RETURNED, RETURNED: AGED, AGED: RETURNED}

# Queues of one round are replaced together, because each waits for what workers hold; no queue is in one round with its
# stand-in.
_ROUNDS = ((FRESH, DEAD, DROPPED, WAITING, MAINTENANCE), (RETURNED,), (AGED,))

_TEXTS: Mapping[Step, str] = {
    "created": "was missing and is declared",
    "policy": "policy",
    "left": "is left as it is",
    "prepared": "can be taken out of the traffic",
    "switched": "gets no more messages; they go to",
    "moved": "messages moved",
    "waiting": "messages are still held by workers",
    "deleted": "is empty and deleted",
    "declared": "is declared anew",
    "bound": "gets its messages again",
    "done": "is as wanted",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One step that is done, or under way.

    Attributes:
        messages: of ``moved``, how many so far; of ``waiting``, how many are still held.
    """

    queue: str
    step: Step
    messages: int = 0
    detail: str = ""

    def __str__(self) -> str:
        words = (str(self.messages) if self.step in {"moved", "waiting"} else "", _TEXTS[self.step], self.detail)
        return f"{self.queue}: " + " ".join(word for word in words if word)


def apply_topology(
    topology: Topology, url: str, *, management_url: str | None = None, connect_timeout_s: float = 3.0
) -> Iterator[Change]:
    """Make the broker as described; the work is done while the changes are read, so read them without long pauses.

    Promised: an accepted message is never lost, may be stored twice if this process is killed (claims make that
    harmless), and reaches workers all the time. After a kill at any point, running it again finishes what was begun.
    Two cannot run at once on one namespace: the second is refused while the first one's connection lives. Until a queue
    is declared anew its bound is not kept. A worker or client that starts meanwhile binds the old queue again: until
    the next look, half a second later, a message may be stored twice, or be stored although the full old queue refused
    it.

    Not done: delay queues and exchanges are left as they are, and so are bindings of others to a replaced queue.

    Raises:
        BrokerUnavailableError: the broker cannot be reached, or was lost.
        DeploymentError: another process is at it, a right or the management API is missing, or something keeps the
            broker from being as described.
    """
    with open_session(url, connect_timeout_s, heartbeat_s=_HEARTBEAT_S) as session:
        try:
            yield from _Application(session, topology, management_of(management_url, session.vhost)).run()
        except session.connection.channel_errors as exc:
            raise DeploymentError(f"The broker refused a step: {exc}. Run it again to go on.") from exc


class _Application:
    """One run over one connection, which holds the lock and does all the work: losing one is losing the other."""

    def __init__(self, session: Session, topology: Topology, management: Management | None) -> None:
        self._session = session
        self._topology = topology
        self._known_management = management
        self._policies = by_queue(topology.policies)

    @property
    def _management(self) -> Management:
        if self._known_management is None:
            raise DeploymentError(
                "Changing a queue takes the management API: for policies, and to see what workers still hold. Set "
                "broker.management_url."
            )
        return self._known_management

    def run(self) -> Iterator[Change]:
        self._lock()
        begun = [queue for queue in self._topology.queues if self._is_begun(queue)]
        yield from self._create_missing({queue.name for queue in begun})
        existing = [queue for queue in self._topology.queues if self._session.exists_queue(queue.name)]
        arguments = self._arguments(existing)
        unlike = {queue.name for queue in begun} - arguments.keys()
        for one in self._differences(arguments):
            if one.by == "new queue":
                unlike.add(one.queue)
        for queue in self._topology.delay.queues:
            if self._session.exists_queue(queue.name) and self._session.queue(queue) is not None:
                yield Change(queue.name, "left", detail="(delays are not changed: delete it once it is empty)")
        if begun or unlike:
            self._management.versions()
        yield from self._set_policies(arguments, unlike)
        yield from self._replace(begun, unlike)
        begun_names = {queue.name for queue in begun}
        for lanes in _ROUNDS:
            together = [queue for queue in self._topology.queues if queue.lane in lanes]
            yield from self._replace(
                [queue for queue in together if queue.name in unlike and queue.name not in begun_names], unlike
            )
        self._confirm_all_is_as_wanted()

    def _lock(self) -> None:
        name = f"{self._topology.exchange.name}.applying"
        end = monotonic() + _LOCK_S
        while not self._session.lock(name):
            # That of a killed process goes with its connection, a moment later.
            if monotonic() > end:
                raise DeploymentError(
                    "Another `topology apply` is at work on this namespace. If its machine is gone, the broker notices "
                    f"within {2 * _HEARTBEAT_S} s."
                )
            self._session.pause(0.2)

    def _create_missing(self, begun: set[str]) -> Iterator[Change]:
        queues = [queue for queue in self._topology.queues if queue.name not in begun]
        missing = [queue.name for queue in queues if not self._session.exists_queue(queue.name)]
        without_begun = replace(
            self._topology,
            queues=tuple(queues),
            bindings=tuple(one for one in self._topology.bindings if one.destination not in begun),
            delay=replace(
                self._topology.delay,
                bindings=tuple(one for one in self._topology.delay.bindings if one.destination not in begun),
            ),
        )
        declare_missing(self._session, without_begun)
        yield from (Change(name, "created") for name in missing)

    def _arguments(self, existing: Sequence[QueueSpec]) -> dict[str, Mapping[str, object]]:
        """Return {queue: its arguments}; they exist, so declaring them only asks."""
        told = {queue.name: self._session.queue(queue) for queue in existing}
        exact: Mapping[str, Mapping[str, object]] = {}
        if any(arguments is not None for arguments in told.values()) and self._known_management is not None:
            exact = self._known_management.arguments_by_queue()
        return {
            queue.name: queue.arguments if told[queue.name] is None else exact.get(queue.name, told[queue.name] or {})
            for queue in existing
        }

    def _differences(self, arguments: Mapping[str, Mapping[str, object]]) -> list[Difference]:
        queues = [queue for queue in self._topology.queues if queue.name in arguments]
        other = {queue.name: arguments[queue.name] for queue in queues if arguments[queue.name] != queue.arguments}
        return find_differences(self._topology, queues, other, self._known_management)

    def _set_policies(self, arguments: Mapping[str, Mapping[str, object]], unlike: set[str]) -> Iterator[Change]:
        needed: dict[str, PolicySpec] = {}
        for queue in self._topology.queues:
            wanted = self._policies.get(queue.name)
            if queue.name not in unlike:
                definition = definition_needed(queue, arguments[queue.name], wanted)
                if definition:
                    wanted = PolicySpec(queue.name, f"^{re.escape(queue.name)}$", definition)
            if wanted is not None:
                needed[queue.name] = wanted
        if not needed and self._known_management is None:
            return
        existing = Policies(self._management.policies())
        for queue in self._topology.queues:
            wanted = needed.get(queue.name)
            if wanted is not None and not existing.is_as_wanted(wanted):
                self._management.put_policy(wanted)
                told = ", ".join(f"{key}={value}" for key, value in wanted.definition.items())
                yield Change(queue.name, "policy", detail=told)
            elif wanted is None and existing.named(queue.name) is not None:
                self._management.delete_policy(queue.name)
                yield Change(queue.name, "policy", detail="removed")

    # Replacing. Every step may be done twice, so that a run after a kill need not know how far the killed one came.

    def _is_begun(self, queue: QueueSpec) -> bool:
        # The first thing that is made and the last that is deleted.
        return self._session.exists_exchange(_otherwise(queue)) or (
            queue.tier is None and self._session.exists_queue(self._stand_in(queue))
        )

    def _stand_in(self, queue: QueueSpec) -> str:
        if queue.tier is None:
            return f"{queue.name}.moving"
        return self._topology.queue(queue.tier, _STAND_IN_LANES[queue.lane]).name

    def _sources(self, queue: QueueSpec) -> list[BindingSpec]:
        every = (*self._topology.bindings, *self._topology.delay.bindings)
        return [one for one in every if one.destination_type == "queue" and one.destination == queue.name]

    def _replace(self, queues: Sequence[QueueSpec], unlike: set[str]) -> Iterator[Change]:
        going = [queue for queue in queues if queue.name in unlike]
        for queue in going:
            yield from self._take_out(queue)
        yield from self._empty(going)
        for queue in queues:
            yield from self._put_back(queue)

    def _take_out(self, queue: QueueSpec) -> Iterator[Change]:
        session, stand_in = self._session, self._stand_in(queue)
        if queue.tier is None:
            session.queue(replace(queue, name=stand_in))
        self._make_switch(queue)
        session.bind(BindingSpec(_otherwise(queue), stand_in, ""), is_needed=True)
        to_queue = BindingSpec(_switch(queue), queue.name, "")
        exists = session.exists_queue(queue.name)
        if exists:
            session.bind(to_queue, is_needed=True)
        for source in self._sources(queue):
            session.bind(_to_switch(source, queue), is_needed=True)
        yield Change(queue.name, "prepared")
        self._unbind(queue)
        if exists:
            session.unbind(to_queue)
        yield Change(queue.name, "switched", detail=stand_in)

    def _make_switch(self, queue: QueueSpec) -> None:
        self._session.exchange(ExchangeSpec(_otherwise(queue), "fanout"))
        self._session.exchange(ExchangeSpec(_switch(queue), "fanout"), {"alternate-exchange": _otherwise(queue)})

    def _unbind(self, queue: QueueSpec) -> None:
        for source in self._sources(queue):
            self._session.unbind(source)

    def _empty(self, queues: Sequence[QueueSpec]) -> Iterator[Change]:
        """Move what is ready, wait until nothing is held, and delete."""
        since_s = monotonic()
        moved = dict.fromkeys((queue.name for queue in queues), 0)
        told_at_s: dict[str, float] = {}
        left = list(queues)
        while left:
            for queue in list(left):
                if self._session.ready(queue.name):
                    before = moved[queue.name]
                    for count in move(self._session, queue.name, _otherwise(queue)):
                        moved[queue.name] = before + count
                        yield Change(queue.name, "moved", moved[queue.name], f"to {self._stand_in(queue)}")
                    # Somebody who started meanwhile may have bound it again.
                    self._unbind(queue)
                elif (held := self._held(queue.name, monotonic() - since_s)) == 0:
                    self._session.delete_queue(queue.name)
                    left.remove(queue)
                    yield Change(queue.name, "deleted")
                elif held and monotonic() - told_at_s.get(queue.name, 0.0) >= _TELL_S:
                    told_at_s[queue.name] = monotonic()
                    yield Change(queue.name, "waiting", held)
            if left:
                self._session.pause(_LOOK_S)

    def _held(self, name: str, for_s: float) -> int | None:
        """Return how many messages are in a queue that nothing has reached for so long; None if that is not known."""
        found = self._management.queue(name)
        if found is None:
            return 0
        count = cast("int | None", found.get("messages"))
        if count is None and for_s > SILENT_S:
            raise DeploymentError(
                f"The management API does not count the messages of {name!r}, so nobody knows whether workers hold "
                "some. Switch on the statistics of the management plugin and run `inference-tasks topology apply` "
                "again."
            )
        return count if count or for_s > UNSEEN_S else None

    def _put_back(self, queue: QueueSpec) -> Iterator[Change]:
        session, stand_in = self._session, self._stand_in(queue)
        self._make_switch(queue)
        # Another process may have declared it a moment ago, with settings of its own: the last look tells.
        session.queue(queue)
        yield Change(queue.name, "declared")
        session.bind(BindingSpec(_switch(queue), queue.name, ""), is_needed=True)
        for source in self._sources(queue):
            session.bind(source, is_needed=True)
        for source in self._sources(queue):
            session.unbind(_to_switch(source, queue))
        yield Change(queue.name, "bound")
        if queue.tier is None and session.exists_queue(stand_in):
            # Messages that were on their way when the switch turned arrive within this time.
            session.pause(1.0)
            for count in move(session, stand_in, _switch(queue)):
                yield Change(queue.name, "moved", count, f"back from {stand_in}")
            session.delete_queue(stand_in)
        session.delete_exchange(_switch(queue))
        session.delete_exchange(_otherwise(queue))
        yield Change(queue.name, "done")

    def _confirm_all_is_as_wanted(self) -> None:
        left = self._differences(self._arguments(self._topology.queues))
        if not left:
            return
        told = "; ".join(f"{one.queue}: {one.argument} is {one.found!r}, not {one.wanted!r}" for one in left)
        raise DeploymentError(
            f"Some queues are still not as wanted: {told}. Either a policy of a higher priority applies to them, or a "
            "process with other settings declared them meanwhile: give all the same settings and run it again."
        )


def _switch(queue: QueueSpec) -> str:
    return f"{queue.name}.switch"


def _otherwise(queue: QueueSpec) -> str:
    return f"{queue.name}.otherwise"


def _to_switch(source: BindingSpec, queue: QueueSpec) -> BindingSpec:
    return BindingSpec(source.source, _switch(queue), source.routing_key, "exchange")
