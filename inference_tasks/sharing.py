"""When two submits ask for the same: the keys under which they share one task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from kombu.utils.json import dumps

from inference_tasks.errors import CallerError, InvalidArgumentsError, UnknownOptionError
from inference_tasks.state.records import ShareKey

if TYPE_CHECKING:
    from inference_tasks.task import InferenceTask, SubmitOptions

__all__ = ["WINDOW", "DedupKey", "dedup_key_of", "share_keys"]

#: Names of the arguments that count, or a function of the arguments that says what counts; None for all arguments.
DedupKey = Sequence[str] | Callable[..., str] | None

WINDOW = "window"


def share_keys(
    task: InferenceTask[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    options: SubmitOptions,
    *,
    tenant: str | None,
    idempotency_ttl_s: float,
) -> tuple[ShareKey, ...]:
    """Return the keys under which a call shares its task with equal ones, none if it is for itself.

    Raises:
        InvalidArgumentsError: the arguments do not have one written form, so nobody could tell which are equal.
    """
    has_window = task.dedup == WINDOW if options.dedup is None else options.dedup
    if not has_window and options.idempotency_key is None:
        return ()
    found: list[ShareKey] = []
    if options.idempotency_key is not None:
        asked = _digest(task, [task.name, _by_name(task, args, kwargs)])
        digest = _digest(task, ["idempotency", tenant, options.idempotency_key])
        found.append(ShareKey(digest, idempotency_ttl_s, idempotency_ttl_s, asked))
    if has_window:
        digest = _digest(task, ["dedup", task.name, tenant, _what_counts(task, args, kwargs)])
        found.append(ShareKey(digest, task.dedup_window_s, task.reuse_result_s))
    return tuple(found)


def _what_counts(task: InferenceTask[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    if callable(task.dedup_key):
        said = task.dedup_key(*args, **kwargs)
        if not isinstance(said, str):
            raise InvalidArgumentsError(
                f"{task.name}: dedup_key: expected a text, found {type(said).__name__}.", task=task.name
            )
        return said
    named = _by_name(task, args, kwargs)
    return named if task.dedup_key is None else {name: named.get(name) for name in task.dedup_key}


def _by_name(
    task: InferenceTask[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """The arguments as the function gets them: by position, by name and by default are the same."""
    try:
        bound = inspect.signature(task.run).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {"args": args, "kwargs": dict(kwargs)}
    bound.apply_defaults()
    return dict(bound.arguments)


def _digest(task: InferenceTask[..., object], value: object) -> str:
    try:
        text = dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentsError(
            f"The arguments of {task.name} cannot be compared with those of other submits: {error}. Duplicates are "
            "told by the arguments as JSON with sorted keys, which holds no NaN or infinity; name the arguments that "
            "count in dedup_key, or submit with dedup=False.",
            task=task.name,
        ) from error
    return sha256(text.encode()).hexdigest()


def dedup_key_of(option: object, function: Callable[..., object] | None = None) -> DedupKey:
    """Return the option ``dedup_key``: a function, or names of arguments; of this function's, if it is given.

    Raises:
        CallerError: it is neither.
        UnknownOptionError: the function has no argument of this name.
    """
    if callable(option):
        return option
    if isinstance(option, str) or not isinstance(option, Sequence) or not option:
        raise CallerError(
            '@app.inference: dedup_key: expected names of arguments such as ("path",), or a function of the arguments, '
            f"found {option!r:.80}."
        )
    names = tuple(str(name) for name in option)
    if function is not None:
        known = inspect.signature(function).parameters
        for name in names:
            if name not in known:
                raise UnknownOptionError(name, known, where="dedup_key: the function")
    return names
