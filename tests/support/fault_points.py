"""Points at which a worker, or the process that runs a task, kills itself: once, as its environment says.

`worker before claim`, `worker after claim`, `worker before ack`, `child before result`, `child after result`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from inference_tasks.state.store import TaskStore

POINT_VARIABLE = "INFERENCE_TEST_DIE_AT"
MARK_VARIABLE = "INFERENCE_TEST_DIED"


def die_at(point: str, directory: Path) -> Mapping[str, str]:
    """The environment of a worker that is to die at this point; whoever comes there again lives."""
    return {POINT_VARIABLE: point, MARK_VARIABLE: str(directory / f"died {point}")}


def install() -> None:
    """Set the point that the environment names, if it names one; in the worker's main process, before it forks."""
    point = os.environ.get(POINT_VARIABLE)
    if point is None:
        return
    from inference_tasks.worker.consumer import InferenceConsumer

    who, when, what = point.split()
    place: tuple[Any, str] = {
        "claim": (TaskStore, "claim"),
        "ack": (InferenceConsumer, "call_soon_ack"),
        "result": (TaskStore, "write"),
    }[what]
    main = os.getpid()

    def die() -> None:
        if (os.getpid() == main) != (who == "worker"):
            return
        try:
            os.close(os.open(os.environ[MARK_VARIABLE], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(*place, _dying(getattr(*place), when, die))


def _dying(call: Callable[..., Any], when: str, die: Callable[[], None]) -> Callable[..., Any]:
    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            die()
        answer = call(*args, **kwargs)
        if when == "after":
            die()
        return answer

    return called
