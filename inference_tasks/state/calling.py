"""What the parts of the state store have in common: a client, where their keys lie, and how the scripts are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from inference_tasks.state import keys
from inference_tasks.state.script import Commands, load

__all__ = ["DEFAULT_NAMESPACE", "Calling"]

DEFAULT_NAMESPACE = "inference"


class Calling:
    """Calls scripts on a client."""

    def __init__(
        self, client: Commands, prefix: str, namespace: str, *, unfinished_ttl_s: float, finished_ttl_s: float
    ) -> None:
        self.prefix = prefix
        self._client = client
        self._unfinished_ttl_s = max(1, int(unfinished_ttl_s))
        self._finished_ttl_s = max(1, int(finished_ttl_s))
        self._counted_keys = (keys.accounts(prefix), keys.away(prefix))
        self._ready = keys.ready(prefix, namespace)

    def _call(self, script: str, names: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        return load(script).call(self._client, names, args)

    def _change(self, script: str, names: Iterable[str], args: Iterable[str | bytes | int] = ()) -> Any:
        """Call a script that keeps counts and indices."""
        return load(script).call(self._client, (*self._counted_keys, *names), (self._ready, *args))

    def _task_keys(self, task_ids: Iterable[str]) -> list[str]:
        return [keys.task(self.prefix, task_id) for task_id in task_ids]
