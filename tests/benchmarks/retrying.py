"""The tasks of the benchmarks that park and fail, for our side and for stock Celery's; set up by the environment."""

from __future__ import annotations

import os
import time

from inference_tasks import TemporaryError
from tests.benchmarks.stock import make_stock
from tests.benchmarks.tasks import make_app

__all__ = ["ATTEMPTS", "app", "stock"]

ATTEMPTS = 4


def late(due_at_s: float) -> float:
    """Return by how much this start is later than it was to be, in seconds."""
    return time.time() - due_at_s


def storm() -> None:
    """Fail each time."""
    raise TemporaryError("what it needs is away")


app = make_app()
app.inference(tier="batch", name="late")(late)
app.inference(tier="batch", name="storm", max_attempts=ATTEMPTS, backoff_s=1)(storm)

if "STOCK_BROKER" in os.environ:
    stock = make_stock()
    stock.task(name="late", shared=False)(late)
