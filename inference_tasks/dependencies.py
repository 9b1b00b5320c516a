"""Tasks that wait for other tasks: how they are submitted, and how they are let go.

Life of a waiting message: confirmed into the delay queues before the submit returns → round and round, each time seen
by the maintenance worker → superseded by a copy in ``returned`` as soon as all that its task needs has succeeded. The
copy is published by whoever writes the last of those successes, from what Redis keeps of the message; if that comes to
nothing, by the maintenance worker when the message comes round.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from inference_routing.lane import RETURNED
from inference_routing.topology import WAITING
from inference_tasks.broker.addressing import delay_address
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.broker.kept import as_kept, copy_of_kept
from inference_tasks.broker.messages import Accepted, Outgoing
from inference_tasks.errors import CallerError
from inference_tasks.routes import HEADER
from inference_tasks.state.records import Freed, Lift, Move

if TYPE_CHECKING:
    from inference_tasks.app import Inference
    from inference_tasks.settings import Settings

__all__ = [
    "KEPT_CHARS",
    "MISSING_SINCE",
    "NEEDS",
    "WAITED",
    "Dependency",
    "Releases",
    "Waits",
    "ids_of",
    "is_id",
    "published",
]

log = logging.getLogger(__name__)

#: In our header: what the task needs, after how many seconds the message came round last, and since when something
#: that the task needs has been missing.
NEEDS, WAITED, MISSING_SINCE = "depends_on", "waited_s", "missing_since_s"

#: Messages up to this size are kept beside the record of a task that waits. Others start it when they come round.
KEPT_CHARS = 65536

#: The longest that a release holds up the run whose end has freed the task.
RELEASE_S = 2.0

MOST_NEEDS = 1000
_ID = re.compile(r"[^\x00-\x1f]{1,255}")


class Dependency(Protocol):
    """Whatever has the id of a task: a handle, or Celery's ``AsyncResult``."""

    @property
    def id(self) -> str: ...


def ids_of(depends_on: Iterable[Dependency | str]) -> tuple[str, ...]:
    """Return the ids of the tasks that a submit depends on, each once.

    Raises:
        CallerError: something that is no task, or too many.
    """
    if isinstance(depends_on, str) or not isinstance(depends_on, Iterable):
        raise CallerError(f"depends_on: expected handles or ids of tasks in a list, found {depends_on!r:.80}.")
    found = dict.fromkeys(one if isinstance(one, str) else getattr(one, "id", None) for one in depends_on)
    for task_id in found:
        if not is_id(task_id):
            raise CallerError(
                f"depends_on: expected handles or ids of tasks, of 1 to 255 characters, found {task_id!r:.80}."
            )
    if len(found) > MOST_NEEDS:
        raise CallerError(f"depends_on: expected at most {MOST_NEEDS} tasks, found {len(found)}.")
    return tuple(str(task_id) for task_id in found)


def is_id(value: object) -> bool:
    """Whether it can be the id of a task that others wait for."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


class Waits:
    """Where messages of waiting tasks go, and where they come round."""

    def __init__(self, settings: Settings, queue_by_lane: Mapping[tuple[str, str], str]) -> None:
        self._exchange = settings.namespace
        self._queue_by_lane = queue_by_lane
        # The embedded broker has no maintenance worker: there a worker of the tier looks at what comes round.
        self._has_maintenance = not is_embedded(settings.broker.url)
        self._first_s = settings.maintenance.waiting_first_s
        self._longest_s = settings.maintenance.waiting_longest_s

    def outgoing(self, outgoing: Outgoing, needs: tuple[str, ...]) -> Outgoing:
        """Return the message of a task that is to wait, out of that of one that is not."""
        task = outgoing.task
        assert task is not None, "only tasks wait"
        tier, returned = task.tier, self._queue_by_lane[task.tier, RETURNED]
        free = _with_header(outgoing, {"lane": RETURNED})
        free = replace(free, exchange=self._exchange, routing_key=returned)
        kept = as_kept(free)
        task = task._replace(lane=RETURNED, depends_on=needs, message=kept if len(kept) <= KEPT_CHARS else "")
        free = replace(free, task=task)
        exchange, routing_key = self.address(tier, self._first_s)
        header = {NEEDS: list(needs), WAITED: self._first_s}
        return replace(_with_header(free, header), exchange=exchange, routing_key=routing_key, once_free=free)

    def address(self, tier: str, delay_s: int) -> tuple[str, str]:
        """Return exchange and routing key under which a message comes round after so many seconds."""
        queue = f"{self._exchange}.{WAITING}" if self._has_maintenance else self._queue_by_lane[tier, RETURNED]
        return delay_address(self._exchange, queue, delay_s)

    def next_s(self, waited_s: object, *, is_kept: bool) -> int:
        """Return after how many seconds a message comes round next.

        Twice as many as last time, up to the longest; always the first where only that can start its task.
        """
        if not is_kept or not isinstance(waited_s, int) or isinstance(waited_s, bool) or waited_s < 1:
            return self._first_s
        return min(2 * waited_s, max(self._first_s, self._longest_s))


class Releases:
    """Lets go what a success has freed; may be used in any thread but the publisher's."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    def freed(self, freed: Sequence[Freed]) -> None:
        """Publish copies into ``returned`` of their tiers, and mark those that the broker has confirmed.

        What it does not confirm in time comes round by itself.

        Raises:
            StateUnavailableError: they are published and not marked; their claims will do that.
        """
        published(self._inference, [(one, "") for one in freed], RELEASE_S)


def published(inference: Inference, found: Sequence[tuple[Freed | Lift, str]], timeout_s: float) -> list[bool]:
    """Publish copies of kept messages into ``returned`` of their tiers, and mark those that the broker has confirmed.

    Args:
        found: each with the reason of the mark, see ``Move``.

    Returns:
        Of each that was confirmed whether it is marked.
    """
    copies = []
    now_s = time.time()
    for one, _ in found:
        changes = {"hop": one.hop + 1, "lane": RETURNED, "tier": one.tier, "ready_at_s": now_s}
        queue = inference.queue_by_lane[one.tier, RETURNED]
        copies.append(copy_of_kept(one.message, changes, exchange=inference.settings.namespace, routing_key=queue))
    outcomes = inference.publisher.send_many(copies, timeout_s)
    moves = [
        Move(one.id, one.generation, one.hop + 1, one.tier, RETURNED, because)
        for (one, because), outcome in zip(found, outcomes, strict=False)
        if isinstance(outcome, Accepted)
    ]
    if len(moves) < len(found):
        log.warning("%d of %d copies are not stored: %s", len(found) - len(moves), len(found), outcomes[0])
    return inference.store.promoted(moves)


def _with_header(outgoing: Outgoing, changes: Mapping[str, object]) -> Outgoing:
    headers = dict(outgoing.properties.headers)
    ours = headers[HEADER]
    assert isinstance(ours, Mapping), "every task message of ours has it"
    headers[HEADER] = {**ours, **changes}
    return replace(outgoing, properties=replace(outgoing.properties, headers=headers))
