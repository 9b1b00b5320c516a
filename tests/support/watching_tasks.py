"""Tasks that watch their own run: they stop when they are asked to, and say how much time they have left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from inference_tasks import InferenceApp, TaskCancelledError
from tests.support import history

_LONGEST_S = 120.0


def add_to(app: InferenceApp) -> None:
    """Register the tasks."""
    app.inference(tier="batch", name="watching", bind=True, backoff_s=1, jitter=False)(_watching)
    app.inference(tier="batch", name="left", bind=True)(_left)
    app.inference(tier="batch", name="reused", dedup="window", reuse_result_s=60)(_reused)


def _watching(self: Any, number: int, then: str = "cancelled") -> int:
    """Run until it is asked to stop; then end as cancelled, fail, go to a retry, or end as if nothing were."""
    history.log("start", tier="batch", number=number)
    end_s = time.monotonic() + _LONGEST_S
    while not self.is_cancelled():
        if time.monotonic() > end_s:
            raise TimeoutError("nobody cancelled it")
        time.sleep(0.01)
    history.log("end", tier="batch", number=number)
    if then == "cancelled":
        raise TaskCancelledError("seen")
    if then == "retry":
        self.retry(exc=ConnectionError("again"), countdown=1)
    return number


def _left(self: Any, number: int, gate: str = "", timeout_s: float = 0.0) -> float | None:
    """Wait for the gate, or until it sees more time than that; return the seconds it has left."""
    history.log("start", tier="batch", number=number)
    end_s = time.monotonic() + _LONGEST_S
    while (gate and not Path(gate).exists()) or (timeout_s and (self.remaining_s() or timeout_s + 1) < timeout_s):
        if time.monotonic() > end_s:
            raise TimeoutError("it waited in vain")
        time.sleep(0.01)
    left_s: float | None = self.remaining_s()
    return left_s


def _reused(number: int) -> int:
    history.log("start", tier="batch", number=number)
    return number
