"""A task store that holds every change of a record's state against the table of those that there are."""

from __future__ import annotations

from typing import Any

from inference_tasks.state.machine import TRANSITIONS
from inference_tasks.state.records import State
from tests.support.task_stores import RedisHarness

READS = frozenset(
    {"get", "get_many", "accounts", "waiting", "oldest", "dead_letters", "dead_letter", "dead_count", "close"}
)


class WatchedStore:
    """The task store of a harness; the records are looked at before and after each call that may change one."""

    def __init__(self, harness: RedisHarness) -> None:
        object.__setattr__(self, "_store", harness.store)
        object.__setattr__(self, "_harness", harness)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._store, name, value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name in READS or not callable(found):
            return found

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = self._states()
            answer = found(*args, **kwargs)
            after = self._states()
            for key in {*before, *after}:
                old, new = before.get(key), after.get(key)
                assert old == new or new in TRANSITIONS[old], f"{name} changed {key} from {old} to {new}"
            return answer

        return watched

    def _states(self) -> dict[str, State]:
        keys = [key for key in self._harness.stored_keys() if key.endswith(":task")]
        with self._harness.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.hget(key, "state")
            return {key: State(state) for key, state in zip(keys, pipeline.execute(), strict=True) if state}
