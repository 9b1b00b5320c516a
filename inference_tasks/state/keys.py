"""Every Redis key of the package. No other module spells one.

A task's keys keep its id in braces, so that they share a hash slot. ``prefix`` ends with its own separator
(default ``inference:``).
"""

from __future__ import annotations

__all__ = [
    "DEFAULT_PREFIX",
    "accounts",
    "away",
    "batch",
    "batch_lines",
    "batch_states",
    "beat",
    "beat_lock",
    "bell",
    "counters",
    "dead",
    "dead_letters",
    "dependents",
    "group",
    "held",
    "holder",
    "lease",
    "lifted",
    "message",
    "needs",
    "operator_log",
    "ready",
    "result",
    "shared",
    "switches",
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


def needs(prefix: str, task_id: str) -> str:
    """Key of the ids of the tasks that a waiting task still needs: a set. The scripts make this name too."""
    return f"{prefix}{{{task_id}}}:needs"


def dependents(prefix: str, task_id: str) -> str:
    """Key of the ids of the tasks that wait for a task: a set. The scripts make this name too."""
    return f"{prefix}{{{task_id}}}:dependents"


def message(prefix: str, task_id: str) -> str:
    """Key of the message of a task that has not started: a string. The scripts make this name too."""
    return f"{prefix}{{{task_id}}}:message"


def batch(prefix: str, batch_id: str) -> str:
    """Key of what is known of a batch, and its counts: a hash. The scripts make this name too."""
    return f"{prefix}{{{batch_id}}}:batch"


def batch_lines(prefix: str, batch_id: str) -> str:
    """Key of the lines of a batch that were accepted, in that order: a list."""
    return f"{prefix}{{{batch_id}}}:lines"


def batch_states(prefix: str, batch_id: str) -> str:
    """Key of how those lines have ended: a string, a letter at the place of each. The scripts make this name too.

    The places of a task are beside its record, in a set that only the scripts name: ``…:batches``, ``batch id|place``.
    """
    return f"{prefix}{{{batch_id}}}:states"


def lifted(prefix: str) -> str:
    """Key of the tasks that are lifted: a sorted set, id by the time of that. The scripts make this name too."""
    return f"{prefix}lifted"


def workers(prefix: str) -> str:
    """Key of the live workers: a sorted set, node name by the Redis time of its last heartbeat in seconds."""
    return f"{prefix}workers"


def worker(prefix: str, node: str) -> str:
    """Key of one worker's last heartbeat: a JSON string that expires when the worker falls silent."""
    return f"{prefix}worker:{node}"


def counters(prefix: str) -> str:
    """Key of counts kept by the scripts: a hash (``stale_writes``)."""
    return f"{prefix}counters"


def accounts(prefix: str) -> str:
    """Key of the counts of all work: a hash, ``<first tier>:<name>`` by count, and ``since_s``. See ``Accounts``."""
    return f"{prefix}accounts"


def away(prefix: str) -> str:
    """Key of the tasks of each tier that are parked or lie in ``returned``: a hash, tier by count."""
    return f"{prefix}away"


def ready(prefix: str, queue: str) -> str:
    """Key of the tasks that wait in a queue: a sorted set, id by the time since when (a parked one: from when on)."""
    return f"{prefix}ready:{queue}"


def dead(prefix: str) -> str:
    """Key of the dead letters in their order: a sorted set, id by the time of death."""
    return f"{prefix}dead"


def dead_letters(prefix: str) -> str:
    """Key of what is known of the dead letters: a hash, id by the first tier and kind it counts under, and JSON."""
    return f"{prefix}dead:letters"


def beat(prefix: str) -> str:
    """First part of the keys of the beat schedule, which celery-redbeat names: its entries, its lock."""
    return f"{prefix}beat"


def beat_lock(prefix: str) -> str:
    """Key of the lock of the beat that sends the schedule: a string that expires soon after that beat has ended."""
    return f"{beat(prefix)}:lock"


def lease(prefix: str, name: str) -> str:
    """Key of the lease of some work that one process at a time may do: a string, its holder."""
    return f"{prefix}lease:{name}"


def holder(prefix: str, key_id: str) -> str:
    """Key of the tasks that the holder of an API key has under way: a sorted set, id by the time of its entry."""
    return f"{prefix}holder:{key_id}"


def switches(prefix: str) -> str:
    """Key of what operators have switched off: a hash, target by JSON. The scripts make this name too."""
    return f"{prefix}switches"


def operator_log(prefix: str) -> str:
    """Key of what operators did: a list of JSON lines, the newest first."""
    return f"{prefix}operator:log"


def shared(prefix: str, digest: str) -> str:
    """Key under which equal submits find each other: a string, the id of the task that they share."""
    return f"{prefix}shared:{digest}"


def held(consumer: str) -> str:
    """Key of what a consumer of the embedded broker holds: a hash. That broker's other keys are its scripts' own."""
    return f"broker:held:{consumer}"


def bell(queue: str) -> str:
    """Channel of the embedded broker on which it is announced that a queue has something to fetch."""
    return f"broker:bell:{queue}"
