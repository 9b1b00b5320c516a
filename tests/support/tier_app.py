"""An application with the three tiers, for worker processes and for the test that submits to them.

A worker reads its options from the environment, a test passes them to `make_app`; both must say the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference_tasks import InferenceApp
from tests.support import history

OPTIONS_VARIABLE = "INFERENCE_TEST_OPTIONS"
TIERS = ("realtime", "batch", "offline")
_GATE_S = 240.0


def make_app(options: Mapping[str, Any]) -> InferenceApp:
    """The application, with two tasks for each tier that log their start and end.

    `step.<tier>` naps in between; `gated.<tier>` ends when the test opens its gate, so that what a test does to a
    running task never comes too late, however slow the machine is.
    """
    app = InferenceApp("contract", set_as_current=False, **options)
    for tier in TIERS:
        app.inference(tier=tier, name=f"step.{tier}")(_step(tier))
        app.inference(tier=tier, name=f"gated.{tier}")(_gated(tier))
    return app


def _step(tier: str) -> Any:
    def step(number: int = 0, nap_s: float = 0.0) -> int:
        if history.PATH_VARIABLE in os.environ:
            history.log("start", tier=tier, number=number)
        time.sleep(nap_s)
        if history.PATH_VARIABLE in os.environ:
            history.log("end", tier=tier, number=number)
        return number

    return step


def _gated(tier: str) -> Any:
    def gated(number: int, gate: str) -> int:
        history.log("start", tier=tier, number=number)
        deadline = time.monotonic() + _GATE_S
        while not Path(gate).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody opened {gate}")
            time.sleep(0.01)
        history.log("end", tier=tier, number=number)
        return number

    return gated


if OPTIONS_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[OPTIONS_VARIABLE]))
