"""A task store that holds every change of a record's state against the table of those that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_tasks.state.machine import TRANSITIONS
from inference_tasks.state.records import State
from inference_tasks.state.store import TaskStore

READS = frozenset({"get", "get_many", "accounts", "waiting", "oldest", "dead_letters", "dead_letter", "dead_count"})


class WatchedStore:
    """A task store; after each call that may change one, the records of these tasks are looked at."""

    def __init__(self, store: TaskStore, ids: Sequence[str]) -> None:
        self._store = store
        self._ids = ids
        self.seen: set[tuple[State | None, State | None]] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name in READS or not callable(found):
            return found

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = self._states()
            answer = found(*args, **kwargs)
            for task_id, old, new in zip(self._ids, before, self._states(), strict=True):
                if old != new:
                    assert new in TRANSITIONS[old], f"{name} changed {task_id} from {old} to {new}"
                    self.seen.add((old, new))
            return answer

        return watched

    def _states(self) -> list[State | None]:
        records = self._store.get_many(self._ids)
        return [None if record is None else State(record.state) for record in records]
