"""The part of the state store that maintenance uses: which tasks wait where, and what has become of their messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference_tasks.state import keys, packing
from inference_tasks.state.calling import Calling
from inference_tasks.state.records import Backlog, Move, Waiting
from inference_tasks.state.script import as_text

__all__ = ["Sweeps"]


class Sweeps(Calling):
    """Queues are named as the broker knows them. A task is known in the queue of its record's tier and lane."""

    def oldest(self, queue: str, ready_before_s: float | None = None, limit: int = 100) -> list[Waiting]:
        """Return the tasks that have waited longest in a queue, the oldest first.

        Args:
            queue: its name.
            ready_before_s: only those that wait since then or longer; None leaves out just those still parked.
            limit: how many at most.
        """
        before = "" if ready_before_s is None else repr(ready_before_s)
        reply = self._call("oldest", (keys.ready(self.prefix, queue),), (before, limit))
        return [Waiting(as_text(i), float(as_text(at))) for i, at in zip(reply[::2], reply[1::2], strict=True)]

    def waiting(self, queues: Sequence[str]) -> dict[str, Backlog]:
        """Return for each queue how many tasks wait in it, those still parked left out, and since when the oldest."""
        if not queues:
            return {}
        reply = self._call("waiting", [keys.ready(self.prefix, queue) for queue in queues])
        return {
            queue: Backlog(int(number), float(as_text(at)) if at else None)
            for queue, number, at in zip(queues, reply[::2], reply[1::2], strict=True)
        }

    def promoted(self, moves: Sequence[Move]) -> list[bool]:
        """Mark confirmed copies of waiting tasks: tier, lane and hop of the copy, waiting since now.

        False where the mark does not fit, because the task does not wait (a parked one: is not due), the record is
        missing, or it is not exactly one hop behind in the same generation: then the claim of the copy decides, and the
        index keeps what it has; see ``forget_ready``.
        """
        if not moves:
            return []
        args = [packing.joined(move.generation, move.hop, move.tier, move.lane, move.because) for move in moves]
        reply = self._change("promoted", self._task_keys(move.id for move in moves), args)
        return [bool(marked) for marked in reply]

    def note_ready(self, queue: str, tasks: Sequence[tuple[str, float]]) -> int:
        """Put tasks, as (id, since when), back into a queue's index, where Redis forgot them.

        Returns how many were put. Left out are tasks whose record says that they do not wait in this queue. The
        record's own time goes first.
        """
        if not tasks:
            return 0
        names = (keys.ready(self.prefix, queue), *self._task_keys(task_id for task_id, _ in tasks))
        return int(self._change("note_ready", names, [repr(since_s) for _, since_s in tasks]))

    def forget_ready(self, queue: str, task_ids: Iterable[str]) -> int:
        """Take tasks out of a queue's index that do not belong there; return how many.

        Out go those without a record, and those whose record says that they do not wait in this queue. A task that does
        wait there stays: if its message is gone, it ends by ``dropped``.
        """
        names = self._task_keys(task_ids)
        return int(self._change("forget_ready", (keys.ready(self.prefix, queue), *names))) if names else 0

    def dropped(self, gone: Sequence[tuple[str, int, int]], reason: str) -> int:
        """End waiting tasks whose message is gone, given as (id, generation, hop) of it; return how many ended.

        They become ``dropped``, with the error type ``dropped`` and the reason as its message, and whoever waits for
        their results learns it. Untouched stay tasks that do not wait (parked ones: that are not due), and those whose
        present message is another one, of a later generation or hop.
        """
        if not gone:
            return 0
        args: list[str | int] = [self._finished_ttl_s, packing.clean(reason)]
        args += (packing.joined(generation, hop) for _, generation, hop in gone)
        return int(self._change("dropped", self._task_keys(task_id for task_id, _, _ in gone), args))

    def server_time_s(self) -> float:
        """Return the time by the clock of the records, unix seconds."""
        return float(as_text(self._call("time", ())))

    def lease(self, name: str, holder: str, ttl_s: float) -> bool:
        """Take, or prolong, the lease of a piece of work for ``ttl_s`` seconds; False if another has it."""
        args = (holder, max(1, round(ttl_s * 1000)))
        return bool(self._call("lease", (keys.lease(self.prefix, name),), args))

    def unlease(self, name: str, holder: str) -> None:
        """Give a lease back; that of another stays."""
        self._call("unlease", (keys.lease(self.prefix, name),), (holder,))
