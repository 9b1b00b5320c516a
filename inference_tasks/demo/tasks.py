"""The demo's app, as a user would write it: a model that is loaded once, and a task with tiers."""

from __future__ import annotations

from inference_tasks.demo import classifier
from inference_tasks.demo.recording import Slot, record
from inference_tasks.inference_app import InferenceApp
from inference_tasks.signals import slot_freed

__all__ = ["app", "classify"]

app = InferenceApp("demo", set_as_current=False)

model = app.model(name="magika")(classifier.load)
model.warmup(classifier.warm_up)


@app.inference(name="demo.classify")
def classify(path: str, tier: str, number: int) -> dict[str, object]:
    """Tell what kind of file this is."""
    return classifier.classify(model(), path, tier, number)


@slot_freed.connect(weak=False)
def _note_slot(tier: str, cost_s: float, **_: object) -> None:
    record(Slot(tier, cost_s))
