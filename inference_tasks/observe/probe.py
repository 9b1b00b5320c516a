"""A probe: a task that does nothing, sent through each tier. If it comes back, the whole road is open.

From the submit to the broker's confirm, the queue, a worker's claim, its pool, the result in Redis. A probe waits its
turn as any other task of its tier does, so its wait is that of the tier's own work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from inference_routing.tier import TIER_NAMES
from inference_tasks.errors import InferenceError, ResultTimeoutError, TaskFailedError
from inference_tasks.handles import TaskHandle
from inference_tasks.observe.why import why
from inference_tasks.probing import PROBE

if TYPE_CHECKING:
    from inference_tasks.app import Inference
    from inference_tasks.task import InferenceTask

__all__ = ["TIMEOUT_S", "Passage", "probe"]

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Passage:
    """How a probe fared in one tier.

    Attributes:
        outcome: ``ok``, ``refused`` (not accepted), ``timeout`` (not back in time), ``failed``.
        wait_s: from the submit to its start, by Redis' clock.
        total_s: from the submit until its end was seen here.
        worker: that ran it.
        reason: why it did not come back, for people.
        error: what was raised; None if it came back.
    """

    tier: str
    outcome: str
    id: str = ""
    wait_s: float | None = None
    total_s: float | None = None
    worker: str | None = None
    reason: str = ""
    error: InferenceError | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it came back."""
        return self.outcome == "ok"

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        said = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**said, "error": type(self.error).__name__ if self.error else None}


def probe(inference: Inference, tiers: Sequence[str] = TIER_NAMES, *, timeout_s: float = TIMEOUT_S) -> list[Passage]:
    """Send a probe through each tier at once, and wait for them; answers in the order of ``tiers``.

    One that does not come back in time is cancelled, so it takes no slot later.
    """
    task = cast("InferenceTask[[], None]", cast(Any, inference.celery_app.tasks)[PROBE])
    sent: list[Passage | tuple[str, TaskHandle[None], float]] = []
    for tier in tiers:
        began_s = time.monotonic()
        try:
            sent.append((tier, task.options(tier=tier, timeout_s=timeout_s).submit(), began_s))
        except InferenceError as error:
            sent.append(Passage(tier, "refused", reason=str(error), error=error))
    end_s = time.monotonic() + timeout_s
    return [one if isinstance(one, Passage) else _awaited(inference, *one, end_s) for one in sent]


def _awaited(inference: Inference, tier: str, handle: TaskHandle[None], began_s: float, end_s: float) -> Passage:
    try:
        handle.result(timeout_s=max(0.0, end_s - time.monotonic()))
        total_s = time.monotonic() - began_s
        record = handle.status()
    except ResultTimeoutError as error:
        return Passage(tier, "timeout", handle.id, reason=_given_up(inference, handle), error=error)
    except TaskFailedError as error:
        # Its deadline was that of the wait: a worker may have found it over, a moment before this process did.
        outcome = "timeout" if error.state == "expired" else "failed"
        return Passage(tier, outcome, handle.id, reason=str(error), error=error)
    except InferenceError as error:
        return Passage(tier, "failed", handle.id, reason=str(error), error=error)
    wait_s = None
    if record.started_at_s is not None and record.submitted_at_s is not None:
        wait_s = round(max(0.0, record.started_at_s - record.submitted_at_s), 4)
    return Passage(tier, "ok", handle.id, wait_s, round(total_s, 4), record.worker)


def _given_up(inference: Inference, handle: TaskHandle[None]) -> str:
    reason = "It did not come back in time."
    with suppress(InferenceError):
        reason = why(inference, handle.id).sentence
        handle.cancel()
    return reason
