"""The application of `tier_app` with tasks that hog, crash, raise, and use a model.

Every hand-over to the pool is logged too (`taken`, in order, by the worker's main process), and each loading of the
model (`loading`, `loaded`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.signals import slot_freed, slot_taken
from tests.support import failing_tasks, fault_points, history, tier_app, watching_tasks
from tests.support.tier_app import OPTIONS_VARIABLE

LOAD_VARIABLE = "INFERENCE_TEST_LOAD_S"
DEATH_VARIABLE = "INFERENCE_TEST_DIES_BEFORE_RELEASE"


def make_app(options: Mapping[str, Any]) -> InferenceApp:
    """The application; `options` as in `tier_app`, plus anything of Celery's configuration."""
    app = tier_app.make_app(options)
    app.inference(tier="batch", name="silent", ignore_result=True)(_silent)
    app.inference(tier="batch", name="crash")(_crash)
    app.inference(tier="batch", name="raises")(_raises)
    app.inference(tier="batch", name="deaf")(_deaf)
    app.inference(tier="batch", name="limited", rate_limit="5/s")(_limited)
    app.inference(tier="batch", name="add")(_add)
    app.inference(tier="realtime", name="add.realtime")(_add)
    app.inference(tier="offline", name="add.offline")(_add)
    app.inference(tier="realtime", name="add.urgent", lifts_canvas=True)(_add)
    app.inference(tier="realtime", name="total.urgent", lifts_canvas=True)(_total)
    app.inference(tier="batch", name="total")(_total)
    failing_tasks.add_to(app)
    watching_tasks.add_to(app)

    @app.model
    def weights() -> int:
        if history.PATH_VARIABLE in os.environ:
            history.log("loading")
        time.sleep(float(os.environ.get(LOAD_VARIABLE, "0")))
        if history.PATH_VARIABLE in os.environ:
            history.log("loaded")
        return os.getpid()

    @app.inference(tier="batch", name="predict")
    def predict(number: int = 0) -> bool:
        history.log("start", tier="batch", number=number)
        return weights.is_loaded and weights() == os.getpid()

    return app


def _silent(number: int) -> int:
    history.log("start", tier="batch", number=number)
    return number


def _crash(number: int = 0) -> None:
    history.log("start", tier="batch", number=number)
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(number: int = 0) -> None:
    history.log("start", tier="batch", number=number)
    raise ValueError("no such picture")


def _deaf(number: int = 0, soft: str = "raise") -> None:
    history.log("start", tier="batch", number=number)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            time.sleep(1)
        except SoftTimeLimitExceeded:
            history.log("soft", number=number)
            if soft == "raise":
                raise


def _limited(number: int = 0) -> int:
    history.log("start", tier="batch", number=number)
    return number


def _add(x: int, y: int) -> int:
    history.log("start", tier="", number=x)
    return x + y


def _total(numbers: Sequence[int], plus: int = 0) -> int:
    history.log("start", tier="", number=-1)
    return sum(numbers) + plus


if OPTIONS_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[OPTIONS_VARIABLE]))
    fault_points.install()
    if DEATH_VARIABLE in os.environ:
        # The end of the run is written, and what it has freed is not published.
        inference_of(app).releases.freed = lambda freed: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]

    @slot_taken.connect(weak=False)
    def _taken(task_id: str, tier: str, lane: str, **_: object) -> None:
        history.log("taken", id=task_id, tier=tier, lane=lane)

    @slot_freed.connect(weak=False)
    def _freed(task_id: str, tier: str, cost_s: float, **_: object) -> None:
        history.log("freed", id=task_id, tier=tier, cost_s=cost_s)
