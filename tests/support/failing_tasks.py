"""Tasks that fail as they are told: what each run does is one word of `steps`, the last of which repeats."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from celery.exceptions import Ignore, Reject

from inference_tasks import InferenceApp, PermanentError, RetryAfter, TemporaryError
from tests.support import history

MAX_ATTEMPTS = 3
_GATE_S = 90.0


def add_to(app: InferenceApp) -> None:
    """Register the tasks."""
    options: dict[str, Any] = {"retry_on": (ConnectionError,), "backoff_s": 1, "jitter": False}
    for tier in ("realtime", "batch", "offline"):
        app.inference(tier=tier, name=f"tried.{tier}", bind=True, max_attempts=MAX_ATTEMPTS, **options)(_tried)
    app.inference(tier="batch", name="tried.late", bind=True, timeout_s=50, backoff_s=60, jitter=False)(_tried)
    app.inference(tier="batch", name="tried.by_hand", bind=True, max_attempts=4)(_tried)
    app.inference(tier="batch", name="tried.auto", bind=True, autoretry_for=(ValueError,), retry_backoff=1)(_tried)
    app.task(name="tried.plain", bind=True, shared=False, max_retries=2)(_tried)
    app.inference(tier="batch", name="told")(_told)


def _tried(self: Any, number: int, steps: Sequence[str], gate: str = "") -> int:
    request = self.request
    key = str((request.delivery_info or {}).get("routing_key"))
    history.log("start", tier="", number=number, retries=request.retries, lane=_lane(request), key=key)
    while gate and not Path(gate).exists():
        time.sleep(0.01)
    _STEPS[steps[min(request.retries, len(steps) - 1)].partition(" ")[0]](self, steps, request.retries)
    return number


def _told(*args: Any) -> None:
    """An error callback."""
    history.log("told", first=str(args[0])[:200] if args else "")


def _lane(request: Any) -> str:
    return str((request.headers or {}).get("inference", {}).get("lane"))


def _raise(error: Exception) -> Any:
    def step(*_: object) -> None:
        raise error

    return step


def _seconds(steps: Sequence[str], retries: int) -> float:
    return float(steps[min(retries, len(steps) - 1)].partition(" ")[2])


def _after(task: Any, steps: Sequence[str], retries: int) -> None:
    raise RetryAfter(_seconds(steps, retries))


def _countdown(task: Any, steps: Sequence[str], retries: int) -> None:
    raise task.retry(countdown=_seconds(steps, retries), exc=ValueError("by hand"))


def _eta(task: Any, steps: Sequence[str], retries: int) -> None:
    raise task.retry(eta=datetime.now(UTC) + timedelta(seconds=_seconds(steps, retries)))


def _replace(task: Any, steps: Sequence[str], retries: int) -> None:
    task.replace(task.app.tasks["add"].s(1, 2))


def _own_state(task: Any, steps: Sequence[str], retries: int) -> None:
    task.update_state(state="FAILURE", meta={"exc_type": "OwnError", "exc_message": "mine", "exc_module": "x"})
    raise Ignore


_STEPS: dict[str, Any] = {
    "done": lambda *_: None,
    "temporary": _raise(TemporaryError("it may pass")),
    "listed": _raise(ConnectionError("refused")),
    "permanent": _raise(PermanentError("it never will")),
    "value": _raise(ValueError("a mistake")),
    "after": _after,
    "countdown": _countdown,
    "eta": _eta,
    "crash": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "reject": _raise(Reject("not mine", requeue=False)),
    "requeue": _raise(Reject("not now", requeue=True)),
    "ignore": _raise(Ignore()),
    "own": _own_state,
    "replace": _replace,
}
