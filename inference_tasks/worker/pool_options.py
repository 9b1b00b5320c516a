"""Options that a worker pool would ignore in silence, refused before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_tasks.errors import PoolOptionError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["PoolRequest", "check_pool", "pool_kind", "refuse_pool"]

_SOCKETS = "it replaces the sockets by which messages are taken. Use threads"
_NOT_SERVED: Mapping[str, str] = {"gevent": _SOCKETS, "eventlet": _SOCKETS}

# What only a process of its own can keep, and why.
_NEEDS_PROCESSES: Mapping[str, str] = {
    "worker_max_tasks_per_child": "there are no processes to replace",
    "worker_max_memory_per_child": "there are no processes to replace",
    "task_time_limit": "a running thread cannot be ended from outside",
    "task_soft_time_limit": "a running thread cannot be interrupted from outside",
}


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """A pool as it was asked for.

    Attributes:
        pool: ``prefork``, ``threads`` or ``solo``.
        slots: tasks at a time.
        uses_gpu: whether its tasks use a GPU.
        autoscale: what was said for ``--autoscale``.
        has_cuda: whether this process has initialised CUDA already.
    """

    pool: str
    slots: int
    uses_gpu: bool = False
    autoscale: str | None = None
    has_cuda: bool = False


def refuse_pool(name: str) -> None:
    """Refuse the pools of Celery that cannot serve tiers.

    Raises:
        PoolOptionError: it is one of them.
    """
    if name in _NOT_SERVED:
        raise PoolOptionError(name, "the shares of the tiers", f"{_NOT_SERVED[name]}, prefork or solo.")


def check_pool(request: PoolRequest, app: Celery) -> None:
    """Refuse what the pool would not keep.

    Raises:
        PoolOptionError: the first such option, why, and what to do.
    """
    refuse_pool(request.pool)
    for option, why in _problems(request, app):
        raise PoolOptionError(request.pool, option, why)


def _problems(request: PoolRequest, app: Celery) -> Iterator[tuple[str, str]]:
    if request.autoscale is not None:
        yield "--autoscale", "each slot holds its models in memory, so their number is fixed. Use --slots."
    if request.pool == "solo" and request.slots != 1:
        yield f"--slots {request.slots}", "it runs one task at a time. Use --slots 1, or --pool threads or prefork."
    if request.pool != "prefork":
        yield from _without_processes(request.pool, app)
    elif request.uses_gpu:
        yield from _with_cuda(request, app)


def _without_processes(pool: str, app: Celery) -> Iterator[tuple[str, str]]:
    for key, why in _NEEDS_PROCESSES.items():
        value = app.conf.get(key)
        if value is not None:
            yield f"{key} = {value!r}", f"{why}. Remove it from the Celery configuration, or use --pool prefork."
    for name, task in sorted(app.tasks.items()):
        # Celery's own tasks have no limits of theirs.
        for option in ("time_limit", "soft_time_limit"):
            value = vars(type(task)).get(option)
            if value is not None:
                why = f"a run in the {pool} pool cannot be ended from outside"
                yield f"{option}_s = {value:g} of task {name}", f"{why}. Remove it, or use --pool prefork."


def _with_cuda(request: PoolRequest, app: Celery) -> Iterator[tuple[str, str]]:
    if request.has_cuda:
        yield (
            "a GPU",
            "the app's module has initialised CUDA while it was imported, in the process that only hands out tasks. "
            "Move that into a model (`@app.model`), which each slot loads in its own process.",
        )
    if app.conf.value_set_for("worker_pool_start_method") and app.conf.worker_pool_start_method != "spawn":
        found = app.conf.worker_pool_start_method
        yield (
            f"worker_pool_start_method = {found!r} with a GPU",
            "CUDA does not survive a fork. Remove it from the Celery configuration, or use --gpu none.",
        )


def pool_kind(pool: object) -> str:
    """Return what a pool is called: ``prefork``, ``threads``, ``solo``, or the name of its module."""
    module = type(pool).__module__.rpartition(".")[2]
    return {"prefork": "prefork", "thread": "threads", "solo": "solo"}.get(module, module)
