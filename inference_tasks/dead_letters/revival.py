"""Replaying dead letters, and dropping them: what an operator decides about many at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, time
from typing import TYPE_CHECKING

from inference_routing.lane import RETURNED
from inference_tasks.app import Inference
from inference_tasks.broker.messages import Accepted, TooLarge, error_for
from inference_tasks.dead_letters.filter import Filter
from inference_tasks.dead_letters.index import batches, keys_by_queue, refresh
from inference_tasks.dead_letters.letter import Letter, letter_of, revived
from inference_tasks.dead_letters.reading import Reading, open_reading
from inference_tasks.errors import InferenceError
from inference_tasks.state.records import State, TaskRecord

if TYPE_CHECKING:
    from inference_tasks.broker.messages import Outgoing
    from inference_tasks.worker.intake import Delivery

__all__ = ["RATE_PER_S", "Tally", "drop", "find", "replay"]

RATE_PER_S = 50.0
BATCH = 50
#: No message is held for longer: a broker takes back, with all the others, what a consumer has held for half an hour.
ROUND_S = 300.0
#: A rate is kept in steps of this length.
STEP_S = 0.25


@dataclass(slots=True)
class Tally:
    """What became of the letters so far.

    Attributes:
        done: replayed, or dropped.
        already: had been replayed before, by a run that ended before it could say so; now they are out of the queue.
        refused: {why: how many} that matched and stay where they are.
        is_complete: whether every letter has been looked at; a reading holds no more than 65,535 others at a time.
    """

    done: int = 0
    already: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    is_complete: bool = False

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return {
            "done": self.done,
            "already": self.already,
            "refused": dict(self.refused),
            "is_complete": self.is_complete,
        }


def replay(
    inference: Inference,
    wanted: Filter,
    *,
    rate_per_s: float = RATE_PER_S,
    limit: int | None = None,
    is_dry: bool = False,
) -> Generator[Tally, None, None]:
    """Let the tasks of dead letters run again, oldest letter first; yield the tally after every few.

    Id, first tier and the tier in which the task was last stay as they are; it goes into ``returned`` of that tier,
    which is never full. Its generation is one more than the letter's, so both limits count anew, and its deadline is
    gone: it had passed for most.

    Each copy is confirmed before its letter leaves the queue. After a kill the letters that were not finished are where
    they were; running it again repeats at most a few copies, of which the claim lets one run. A letter that comes back
    during the run is not replayed by it a second time. The work is done while the tallies are read.

    Args:
        inference: whose dead letters.
        wanted: which of them.
        rate_per_s: at most so many; above 0.
        limit: at most so many in all.
        is_dry: only count; nothing is changed anywhere.

    Raises:
        DeadLettersBusyError: another process reads them.
        BrokerUnavailableError, StateUnavailableError, OutcomeUnknownError: a server is away; it can be run again.
    """
    if not is_dry:
        refresh(inference)
    yield from _Replay(inference, wanted, limit, is_dry, rate_per_s).run()


def drop(
    inference: Inference, wanted: Filter, *, limit: int | None = None, is_dry: bool = False
) -> Generator[Tally, None, None]:
    """Take dead letters out of the queue for good, oldest first; their tasks stay failed. See ``replay``."""
    if not is_dry:
        refresh(inference)
    yield from _Drop(inference, wanted, limit, is_dry).run()


def find(inference: Inference, task_id: str) -> tuple[Delivery, Letter] | None:
    """Return the message of a dead letter, without taking it out of the queue; None if it is not there."""
    keys = keys_by_queue(inference)
    with open_reading(inference) as reading:
        for message in reading:
            letter = letter_of(message, keys)
            if letter.dead.id == task_id:
                return message, letter
    return None


class _Decision(ABC):
    """Reads the letters in rounds and deals with those that are meant, a batch at a time."""

    def __init__(self, inference: Inference, wanted: Filter, limit: int | None, is_dry: bool) -> None:
        self._inference = inference
        self._store = inference.store
        self._wanted = wanted
        self._left = limit
        self._is_dry = is_dry
        self._keys = keys_by_queue(inference)
        self._met: set[str] = set()
        self._is_cut = False
        self.tally = Tally()

    batch_size = BATCH

    def run(self) -> Iterator[Tally]:
        self._is_cut = True
        while self._is_cut:
            self._is_cut = False
            with open_reading(self._inference) as reading:
                for batch in batches(self._meant(reading), self.batch_size):
                    self._settle(batch, reading)
                    yield self.tally
        yield self.tally

    def _meant(self, reading: Reading) -> Iterator[tuple[Delivery, Letter]]:
        end = monotonic() + ROUND_S
        for message in reading:
            letter = letter_of(message, self._keys)
            if letter.dead.id in self._met or not self._wanted.matches(letter.dead, time()):
                continue
            self._met.add(letter.dead.id)
            if why := self._refusal(letter):
                self.tally.refused[why] += 1
                continue
            yield message, letter
            if self._left is not None:
                self._left -= 1
            if self._left == 0 or self._met == self._wanted.ids:
                self.tally.is_complete = True
                return
            if monotonic() > end:
                self._is_cut = True
                return
        self.tally.is_complete = reading.is_complete

    @abstractmethod
    def _refusal(self, letter: Letter) -> str:
        """Say why a letter that is meant stays; empty if it does not."""

    @abstractmethod
    def _settle(self, batch: Sequence[tuple[Delivery, Letter]], reading: Reading) -> None: ...


class _Drop(_Decision):
    def _refusal(self, letter: Letter) -> str:
        return ""

    def _settle(self, batch: Sequence[tuple[Delivery, Letter]], reading: Reading) -> None:
        if not self._is_dry:
            for message, _ in batch:
                reading.take(message)
            # Afterwards: what is killed in between is found missing by the next refresh, and counted as dropped too.
            self._store.dead_dropped([letter.dead.id for _, letter in batch])
        self.tally.done += len(batch)


class _Replay(_Decision):
    def __init__(
        self, inference: Inference, wanted: Filter, limit: int | None, is_dry: bool, rate_per_s: float
    ) -> None:
        super().__init__(inference, wanted, limit, is_dry)
        self._rate_per_s = rate_per_s
        self.batch_size = max(1, min(BATCH, int(rate_per_s * STEP_S)))
        self._next_at = monotonic()

    def _refusal(self, letter: Letter) -> str:
        return "" if letter.dead.is_replayable else "it can never run (`dead show` says why)"

    def _settle(self, batch: Sequence[tuple[Delivery, Letter]], reading: Reading) -> None:
        records = self._store.get_many([letter.dead.id for _, letter in batch])
        due = [
            (message, letter)
            for (message, letter), record in zip(batch, records, strict=True)
            if self._is_due(message, letter, record, reading)
        ]
        if self._is_dry:
            self.tally.done += len(due)
        elif due:
            self._pace(len(due), reading)
            self._send(due, reading)

    def _is_due(self, message: Delivery, letter: Letter, record: TaskRecord | None, reading: Reading) -> bool:
        if record is None or record.generation < letter.dead.generation:
            return True
        if record.generation > letter.dead.generation:
            # A run before this one was ended after its copy had been marked.
            if not self._is_dry:
                reading.take(message)
            self.tally.already += 1
            return False
        if record.state != State.FAILED:
            self.tally.refused[f"its task is {record.state}, not failed"] += 1
            return False
        return True

    def _pace(self, count: int, reading: Reading) -> None:
        while (wait_s := self._next_at - monotonic()) > 0:
            reading.pause(min(wait_s, 1.0))
        self._next_at = max(monotonic(), self._next_at) + count / self._rate_per_s

    def _send(self, due: Sequence[tuple[Delivery, Letter]], reading: Reading) -> None:
        outgoings = [self._copy(message, letter) for message, letter in due]
        failed: InferenceError | None = None
        for (message, letter), outgoing, outcome in zip(
            due, outgoings, self._inference.publisher.send_many(outgoings), strict=True
        ):
            if isinstance(outcome, TooLarge):
                self.tally.refused["it is larger than broker.max_body_bytes allows"] += 1
            elif isinstance(outcome, Accepted):
                self._store.replayed(letter.dead.id, letter.dead.generation + 1)
                reading.take(message)
                self.tally.done += 1
            else:
                failed = failed or error_for(outcome, outgoing, tier=letter.dead.tier)
        if failed is not None:
            raise failed

    def _copy(self, message: Delivery, letter: Letter) -> Outgoing:
        queue = self._inference.queue_by_lane[letter.dead.tier, RETURNED]
        return revived(message, letter, exchange=self._inference.settings.namespace, queue=queue, now_s=time())
