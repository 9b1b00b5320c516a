"""The app of the benchmarks, and the log of every start and end that its workers write."""

from __future__ import annotations

import os
import time
from pathlib import Path

from inference_tasks.inference_app import InferenceApp
from inference_tasks.signals import slot_freed, slot_taken

__all__ = ["app", "make_app"]


def make_app() -> InferenceApp:
    """Return an app that reads its settings from the environment as it is now."""
    app = InferenceApp("bench")
    app.inference(tier="batch", name="noop")(noop)
    app.inference(tier="batch", name="sleep")(sleep)
    app.inference(tier="batch", name="strange")(sleep_strange)
    app.inference(tier="batch", name="equal", dedup="window", reuse_result_s=60.0)(sleep)
    return app


def noop() -> None:
    """Do nothing."""


def sleep(seconds: float, submitted_at_s: float = 0.0) -> float:
    """Hold the slot like a kernel of this length; return the wait since the submit, in seconds."""
    wait_s = time.time() - submitted_at_s
    time.sleep(seconds)
    return wait_s


def sleep_strange(seconds: float) -> None:
    """Hold the slot like ``sleep``, under a name that the worker has not seen before."""
    time.sleep(seconds)


app = make_app()

if "BENCH_STARTS" in os.environ:
    _log = (Path(os.environ["BENCH_STARTS"]) / str(os.getpid())).open("a", buffering=1 << 16)

    # Rows end with a tab, so that one cut off by a kill is told from a whole one.
    @slot_taken.connect(weak=False)
    def _taken(task_id: str, tier: str, at_s: float, held_s: float, **_: object) -> None:
        _log.write(f"taken {at_s} {task_id} {tier} {held_s}\t\n")

    @slot_freed.connect(weak=False)
    def _freed(task_id: str, at_s: float, cost_s: float, **_: object) -> None:
        _log.write(f"freed {at_s} {task_id} {cost_s}\t\n")
