"""The model: tells what is in a file by its bytes. Ships inside the package ``magika``, runs on the CPU."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING

from inference_tasks.demo.recording import Run, record
from inference_tasks.errors import DeploymentError

if TYPE_CHECKING:
    from magika import Magika

__all__ = ["check_installed", "classify", "load", "warm_up"]


def check_installed() -> None:
    """Make sure that the model is here; nothing is loaded.

    Raises:
        DeploymentError: it is not.
    """
    if importlib.util.find_spec("magika") is None:
        raise DeploymentError(
            "The demo classifies files with the model of the package magika, which is not installed: "
            'pip install "inference-tasks[demo]".'
        )


def load() -> Magika:
    """Load the model; it is in the package, nothing is downloaded."""
    import onnxruntime
    from magika import Magika

    class OneThread(Magika):
        # By itself it runs on every core, and spins there: twice the work for each file, at the expense of the broker
        # and of other slots. Should a later release not call this, that is what happens.
        def _init_onnx_session(self) -> onnxruntime.InferenceSession:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            onnxruntime.disable_telemetry_events()
            return onnxruntime.InferenceSession(
                self._model_path, sess_options=options, providers=["CPUExecutionProvider"]
            )

    return OneThread()


def warm_up(model: Magika) -> None:
    """Run it once: the first run is the slow one."""
    model.identify_path(Path(__file__))


def classify(model: Magika, path: str, tier: str, number: int) -> dict[str, object]:
    """Classify one file and note the run.

    Args:
        path: the file.
        tier: what the call was submitted to.
        number: which of the demo's calls this is.
    """
    started_at_s = time.time()
    found = model.identify_path(Path(path))
    label = str(found.output.label) if found.ok else f"({found.status})"
    record(Run(number, tier, started_at_s, time.time(), label))
    return {"path": path, "label": label, "score": round(float(found.score), 3) if found.ok else 0.0}
