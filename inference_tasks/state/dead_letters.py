"""The part of the state store that knows the dead letters: an index of what lies in the dead-letter queue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields

from inference_tasks.state import keys, packing
from inference_tasks.state.calling import Calling
from inference_tasks.state.records import DeadKind, DeadLetter
from inference_tasks.state.script import as_text

__all__ = ["DeadLetters", "read_letter"]

_FIELDS = frozenset(field.name for field in fields(DeadLetter))


class DeadLetters(Calling):
    """The broker's queue is the truth; this index is what can be listed, and rebuilt from the queue by ``bury``."""

    def bury(self, letters: Sequence[DeadLetter]) -> None:
        """Note messages that the dead-letter queue holds; call it once the broker has confirmed them.

        The failed task of a letter, if it is of the same generation, is buried by it: it counts as replayable or unfit,
        and later messages of it are ``finished``, not ``unburied``. A task that has not failed is not changed: to
        end it, use ``fail_unclaimed`` first. A letter without such a task is only listed, and counts nowhere.
        Burying again is harmless; a letter takes the place of an earlier one of its task, unless that is of a later
        generation.
        """
        if not letters:
            return
        args: list[str] = []
        for letter in letters:
            kind = DeadKind.REPLAYABLE if letter.is_replayable else DeadKind.UNFIT
            args += (packing.joined(letter.generation, kind, repr(letter.dead_at_s)), json.dumps(letter.as_dict()))
        self._change("bury", (*self._dead_keys(), *self._task_keys(letter.id for letter in letters)), args)

    def dead_letters(self, *, newest_first: bool = True, offset: int = 0, limit: int = 100) -> list[DeadLetter]:
        """Return dead letters by their time of death."""
        if limit < 1:
            return []
        reply = self._call("dead_letters", self._dead_keys(), (1 if newest_first else 0, offset, limit))
        return [read_letter(stored) for stored in reply]

    def dead_letter(self, task_id: str) -> DeadLetter | None:
        """Return the letter of a task, None if there is none."""
        stored = self._call("dead_letter", self._dead_keys(), (task_id,))[1]
        return read_letter(stored) if stored else None

    def dead_count(self) -> int:
        """Return how many letters the index has."""
        return int(self._call("dead_letter", self._dead_keys(), ("",))[0])

    def replayed(self, task_id: str, generation: int) -> bool:
        """Mark that a copy of a dead letter with this generation has been published into ``returned``.

        The failed task is pending again, its limits start anew, and the letter leaves the index; a record that is
        missing is made from the letter. True also where the copy's claim came first, and where nothing is known of the
        task: then its claim decides. False if the task has not failed, or is in a later generation: the copy will not
        run.
        """
        names = (*self._dead_keys(), keys.task(self.prefix, task_id))
        return bool(self._change("replayed", names, (self._unfinished_ttl_s, generation)))

    def dead_dropped(self, task_ids: Iterable[str]) -> None:
        """Note that an operator has taken these letters out of the queue for good; their tasks stay failed."""
        names = self._task_keys(task_ids)
        if names:
            self._change("dead_dropped", (*self._dead_keys(), *names))

    def _dead_keys(self) -> tuple[str, str]:
        return keys.dead(self.prefix), keys.dead_letters(self.prefix)


def read_letter(stored: object) -> DeadLetter:
    """Read a letter as the index keeps it."""
    found = json.loads(as_text(stored).split(packing.FIELD, 2)[2])
    # A newer release may have added fields.
    return DeadLetter(**{name: value for name, value in found.items() if name in _FIELDS})
