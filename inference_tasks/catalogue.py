"""The tasks of an app that can be submitted by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from inference_tasks.errors import UnknownTaskError
from inference_tasks.task import InferenceTask

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["find_task", "own_tasks"]

_NOT_OF_USERS = ("celery.", "inference_tasks.")


def own_tasks(celery_app: Celery) -> dict[str, InferenceTask[..., Any]]:
    """Return the app's own tasks by name; those of Celery and of this package are no business of clients."""
    return {
        name: cast("InferenceTask[..., Any]", task)
        for name, task in celery_app.tasks.items()
        if isinstance(task, InferenceTask) and not name.startswith(_NOT_OF_USERS)
    }


def find_task(celery_app: Celery, name: str) -> InferenceTask[..., Any]:
    """Return the task of this name, or the only one whose name ends with it (``classify`` for ``vision.classify``).

    Raises:
        UnknownTaskError: there is none, or there are several.
    """
    own = own_tasks(celery_app)
    matching = [name] if name in own else [known for known in own if known.endswith(f".{name}")]
    if len(matching) == 1:
        return own[matching[0]]
    raise UnknownTaskError(name, own, matching)
