"""The no-op task that every app has: a probe goes the whole road through it. See ``inference_tasks.observe.probe``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference_tasks.task import InferenceDecorator

__all__ = ["PROBE", "register_probe"]

PROBE = "inference_tasks.probe"


def register_probe(decorator: InferenceDecorator) -> None:
    """Make the task known to an app, as its own tasks are: each worker of the app can run it.

    It has no limits of its own, which some pools cannot keep, and one attempt.
    """
    decorator(name=PROBE, max_attempts=1)(_probe)


def _probe() -> None:
    """Do nothing."""
