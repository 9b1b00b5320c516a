"""Every Redis key of the package. No other module spells one.

A task's keys keep its id in braces, so that they share a hash slot. ``prefix`` ends with its own separator
(default ``inference:``).
"""

from __future__ import annotations

__all__ = [
    "DEFAULT_PREFIX",
    "bell",
    "counters",
    "group",
    "held",
    "result",
    "task",
    "worker",
    "workers",
]

DEFAULT_PREFIX = "inference:"


def task(prefix: str, task_id: str) -> str:
    """Key of the task's record: a hash."""
    return f"{prefix}{{{task_id}}}:task"


def result(prefix: str, task_id: str) -> str:
    """Key of Celery's result document, and the name of the channel on which it is announced: a string."""
    return f"{prefix}{{{task_id}}}:result"


def group(prefix: str, group_id: str, part: str = "") -> str:
    """Key of a Celery group, or with ``part`` (``.j``, ``.t``, ``.s``, ``.d``, ``.c``) of its chord's bookkeeping."""
    return f"{prefix}{{{group_id}}}:group{part}"


def workers(prefix: str) -> str:
    """Key of the live workers: a sorted set, node name by the Redis time of its last heartbeat in seconds."""
    return f"{prefix}workers"


def worker(prefix: str, node: str) -> str:
    """Key of one worker's last heartbeat: a JSON string that expires when the worker falls silent."""
    return f"{prefix}worker:{node}"


def counters(prefix: str) -> str:
    """Key of counts kept by the scripts: a hash (``stale_writes``)."""
    return f"{prefix}counters"


def held(consumer: str) -> str:
    """Key of what a consumer of the embedded broker holds: a hash. That broker's other keys are its scripts' own."""
    return f"broker:held:{consumer}"


def bell(queue: str) -> str:
    """Channel of the embedded broker on which it is announced that a queue has something to fetch."""
    return f"broker:bell:{queue}"
