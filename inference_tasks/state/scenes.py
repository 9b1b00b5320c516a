"""The part of the state store that tells all that is known around one task, in one look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_tasks.state import keys, packing
from inference_tasks.state.calling import Calling
from inference_tasks.state.dead_letters import read_letter
from inference_tasks.state.records import DeadLetter, TaskRecord, WorkerBeat
from inference_tasks.state.script import as_text
from inference_tasks.state.switches import ALL_ON, Switches, read_switches

__all__ = ["NEEDS_SHOWN", "Place", "Scene", "Scenes", "scene_call", "unpack_scene"]

NEEDS_SHOWN = 20
"""Of so many of the tasks that a task waits for the state is told."""


@dataclass(frozen=True, slots=True)
class Place:
    """One queue, as a task in it or elsewhere sees it.

    Attributes:
        waiting: tasks that wait in it by now; what is parked is not counted.
        ahead: how many of its tasks come before this one; None if this one is not listed there.
    """

    waiting: int
    ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """A task and what is around it, at one moment.

    Attributes:
        at_s: that moment, unix seconds by the Redis server's clock.
        workers: all live ones.
        letter: its dead letter.
        places: {queue: its place}.
        needs: {id of a task that it waits for: the state of that, empty if it is not known}; ``NEEDS_SHOWN`` at most.
    """

    at_s: float
    record: TaskRecord
    switches: Switches = ALL_ON
    workers: tuple[WorkerBeat, ...] = ()
    letter: DeadLetter | None = None
    places: Mapping[str, Place] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)


class Scenes(Calling):
    """Looks at one task."""

    def scene(self, task_id: str, queues: Sequence[str]) -> Scene | None:
        """Return a task and what is around it, in these queues; None if it has no record."""
        names, args = scene_call(self.prefix, task_id, queues)
        return unpack_scene(self._call("scene", names, args), task_id, queues)


def scene_call(prefix: str, task_id: str, queues: Sequence[str]) -> tuple[list[str], list[str | bytes | int]]:
    """Return keys and arguments for ``scene.lua``."""
    names = [
        keys.task(prefix, task_id),
        keys.switches(prefix),
        keys.workers(prefix),
        keys.dead_letters(prefix),
        *(keys.ready(prefix, queue) for queue in queues),
    ]
    return names, [task_id, keys.worker(prefix, ""), NEEDS_SHOWN, *packing.RECORD_FIELDS]


def unpack_scene(reply: Sequence[Any], task_id: str, queues: Sequence[str]) -> Scene | None:
    """Read the answer of ``scene.lua``."""
    if not reply:
        return None
    line, at_s, switched, beats, letter, counts, needs = reply
    record = packing.unpack_record(task_id, as_text(line))
    assert record is not None  # the script has found it
    return Scene(
        at_s=float(as_text(at_s)),
        record=record,
        switches=read_switches(dict(_pairs(switched))),
        workers=tuple(packing.unpack_beat(seen, beat) for seen, beat in zip(beats[1::3], beats[2::3], strict=True)),
        letter=read_letter(letter) if letter else None,
        places={
            queue: Place(int(waiting), int(ahead) if int(ahead) >= 0 else None)
            for queue, waiting, ahead in zip(queues, counts[::2], counts[1::2], strict=True)
        },
        needs=dict(sorted(_pairs(needs))),
    )


def _pairs(flat: Sequence[object]) -> list[tuple[str, str]]:
    return [(as_text(name), as_text(value)) for name, value in zip(flat[::2], flat[1::2], strict=True)]
