"""The index of the dead letters in Redis, made anew from the queue where the two differ."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from time import monotonic, time
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from inference_routing.lane import QueueKey
from inference_tasks.app import Inference
from inference_tasks.dead_letters.letter import Letter, letter_of
from inference_tasks.dead_letters.reading import LOCK_S, Reading, open_reading
from inference_tasks.state.records import DeadLetter, State, TaskRecord

if TYPE_CHECKING:
    from inference_tasks.worker.intake import Delivery

__all__ = ["batches", "depth", "keys_by_queue", "listed", "refresh"]

log = logging.getLogger(__name__)

BATCH = 500
PAGE = 1000
#: How long a difference that a reading did not remove is left alone.
SETTLED_S = 600.0

T = TypeVar("T")

#: {whose: depth and count after the last reading, and when that was}
_settled: WeakKeyDictionary[Inference, tuple[tuple[int, int], float]] = WeakKeyDictionary()


def keys_by_queue(inference: Inference) -> dict[str, QueueKey]:
    """Return {queue: tier and lane} of the tiers' queues."""
    return {queue: QueueKey(tier, lane, queue) for (tier, lane), queue in inference.queue_by_lane.items()}


def depth(inference: Inference) -> int:
    """Return how many dead letters lie in the queue, those that somebody holds left out.

    Raises:
        BrokerUnavailableError: the broker does not answer.
    """
    queue = inference.topology.dead.name
    depths = inference.depths()
    try:
        return depths.of_queues((queue,)).get(queue, 0)
    finally:
        depths.close()


def listed(inference: Inference, *, newest_first: bool = True) -> Iterator[DeadLetter]:
    """Yield what the index holds, page by page."""
    offset = 0
    while page := inference.store.dead_letters(newest_first=newest_first, offset=offset, limit=PAGE):
        yield from page
        offset += len(page)


def refresh(inference: Inference, *, wait_s: float = LOCK_S, is_forced: bool = False) -> int:
    """Bring the index in line with the queue if their counts differ; return how many entries and letters changed.

    Missing entries are added: what the broker or a foreign program put there, and everything after a loss of Redis. A
    task among them that has not ended fails with the reason. Entries without a letter are removed. A letter that can
    be of no use any more is taken out of the queue: a second copy, or one whose task has been replayed already or has
    ended in another way than by failing. Each is told in the log.

    Args:
        inference: whose dead letters.
        wait_s: how long another reading of them is waited for.
        is_forced: whether the queue is read even if the counts agree, as they do if one is missing and one too many.

    Raises:
        DeadLettersBusyError: another process reads them.
        BrokerUnavailableError, StateUnavailableError: one of the two does not answer; nothing is half done.
    """
    counts = (depth(inference), inference.store.dead_count())
    if not is_forced and (counts[0] == counts[1] or _is_settled(inference, counts)):
        return 0
    changed = _Refresh(inference).run(wait_s)
    counts = (depth(inference), inference.store.dead_count())
    _settled[inference] = (counts, monotonic())
    return changed


def _is_settled(inference: Inference, counts: tuple[int, int]) -> bool:
    """Whether a reading has left the two as different as they are, not long ago.

    Two letters of one id have one entry. To read them every few seconds for ever would change nothing, and spend the
    million deliveries after which the broker gives a message up.
    """
    known, at = _settled.get(inference, ((0, 0), 0.0))
    return known == counts and monotonic() - at < SETTLED_S


class _Refresh:
    def __init__(self, inference: Inference) -> None:
        self._store = inference.store
        self._inference = inference
        self._keys = keys_by_queue(inference)
        self._generations: dict[str, int] = {}
        self._seen: dict[str, tuple[int, bytes]] = {}
        self._taken: Counter[str] = Counter()
        self._reading: Reading | None = None

    def run(self, wait_s: float) -> int:
        added = 0
        with open_reading(self._inference, wait_s=wait_s) as reading:
            # Before the first letter is read: what is listed by now lies in the queue by now.
            self._generations = {letter.id: letter.generation for letter in listed(self._inference)}
            self._reading = reading
            for batch in batches(reading, BATCH):
                added += self._add([(message, letter_of(message, self._keys)) for message in batch])
            gone = [task_id for task_id in self._generations if task_id not in self._seen]
            if not reading.is_complete:
                gone = []
        for part in batches(gone, BATCH):
            self._store.dead_dropped(part)
        if gone:
            log.warning("%d entries of the index had no dead letter any more: %s", len(gone), ", ".join(gone[:10]))
        for why, count in self._taken.items():
            log.warning("%d messages were taken out of the dead letters: %s", count, why)
        if added:
            log.info("%d dead letters were added to the index", added)
        return added + len(gone) + self._taken.total()

    def _add(self, letters: Sequence[tuple[Delivery, Letter]]) -> int:
        unlisted = [(message, letter) for message, letter in letters if self._is_unlisted(message, letter)]
        records = self._store.get_many([letter.dead.id for _, letter in unlisted])
        found = [
            entry
            for (message, letter), record in zip(unlisted, records, strict=True)
            if (entry := self._entry(message, letter, record)) is not None
        ]
        if found:
            self._store.bury(found)
        return len(found)

    def _is_unlisted(self, message: Delivery, letter: Letter) -> bool:
        dead, mark = letter.dead, (letter.dead.generation, letter.digest)
        if self._seen.get(dead.id) == mark:
            # The connection was lost before its confirm came, so the worker buried it once more.
            self._useless(message, "second copies of one letter")
            return False
        before = self._seen.setdefault(dead.id, mark)
        # Of two letters with one id and generation the first is listed; of two generations the later one.
        return (before == mark or before[0] != dead.generation) and self._generations.get(dead.id) != dead.generation

    def _entry(self, message: Delivery, letter: Letter, record: TaskRecord | None) -> DeadLetter | None:
        """Return what the index is to say of a letter; None if nothing, now or for ever."""
        dead = letter.dead
        known = max(self._generations.get(dead.id, 0), record.generation if record else 0)
        if known > dead.generation:
            self._useless(message, "their tasks have been replayed")
            return None
        if record is not None and record.generation == dead.generation:
            # A task may fail between the copying of its message and the mark of it: then this letter is the one.
            if record.hop > letter.hop and not (letter.is_ours and record.state == State.FAILED):
                self._useless(message, "newer messages have taken their place")
                return None
            if record.is_finished and record.state != State.FAILED:
                self._useless(message, "their tasks have ended in another way than by failing")
                return None
        if letter.is_named and (record is None or not record.is_finished):
            error = dead.error or {"type": dead.reason, "message": dead.detail or dead.reason}
            if not self._store.fail_unclaimed(
                dead.id, name=dead.task, tier=dead.tier, error_type=error["type"], error=error["message"]
            ):
                # It runs at this moment, by another message; what comes of it is seen the next time.
                return None
        if record is None:
            return replace(dead, dead_at_s=dead.dead_at_s or time())
        return replace(
            dead,
            dead_at_s=dead.dead_at_s or record.finished_at_s or time(),
            submitted_at_s=dead.submitted_at_s or record.submitted_at_s,
            error=dead.error or record.error,
            attempts=dead.attempts or record.attempts,
            failures=dead.failures or record.failures,
            crashes=dead.crashes or record.crashes,
        )

    def _useless(self, message: Delivery, why: str) -> None:
        assert self._reading is not None  # run() goes first
        self._reading.take(message)
        self._taken[why] += 1


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of ``size``; the last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
