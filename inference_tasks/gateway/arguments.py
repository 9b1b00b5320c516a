"""Checking a call against a task's signature and type hints, before anything is sent."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from inference_tasks.errors import InvalidArgumentsError
from inference_tasks.task import InferenceTask

__all__ = ["ArgumentsError", "Signature"]

log = logging.getLogger(__name__)

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SHOWN_ERRORS = 20


class ArgumentsError(InvalidArgumentsError):
    """The arguments do not fit; ``errors`` lists where and why: ``[{"where": "size", "message": …}]``."""

    def __init__(self, task: str, errors: Sequence[Mapping[str, str]]) -> None:
        said = "; ".join(f"{one['where']}: {one['message']}" if one["where"] else one["message"] for one in errors)
        super().__init__(f"The arguments do not fit {task}: {said}.", task=task)
        self.errors = [dict(one) for one in errors]


class Signature:
    """What a task takes. Made once for each task: reading the hints costs milliseconds, a check microseconds.

    Values are checked as JSON and never converted: the task gets what the client sent, as with any other submit. So
    ``"3"`` is no ``int``, and a date is text that reads as one. A hint that pydantic cannot read is not checked.
    """

    def __init__(self, task: InferenceTask[..., Any]) -> None:
        self._task = task.name
        self._signature = inspect.signature(task.run) if task.typing else None
        self._adapter_by_name: dict[str, TypeAdapter[Any]] = {}
        if self._signature is None:
            return
        hints = _hints(task)
        for name, parameter in self._signature.parameters.items():
            hint = hints.get(name, parameter.annotation)
            if hint is inspect.Parameter.empty or isinstance(hint, str):
                continue
            try:
                self._adapter_by_name[name] = TypeAdapter(hint)
            except Exception as error:  # whatever pydantic, or a library that it asks, raises at a type it cannot read
                log.info("Task %s: %s is not checked, its hint %r cannot be read: %s", task.name, name, hint, error)

    def check(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Check one call.

        Raises:
            ArgumentsError: it does not fit; names every argument that does not.
        """
        if self._signature is None:
            return
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentsError(self._task, [{"where": "", "message": str(error)}]) from error
        errors: list[dict[str, str]] = []
        for name, value in bound.arguments.items():
            adapter = self._adapter_by_name.get(name)
            if adapter is None:
                continue
            parameter = self._signature.parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                for position, one in enumerate(value):
                    errors += _errors(adapter, one, f"{name}.{position}")
            elif parameter.kind is parameter.VAR_KEYWORD:
                for key, one in value.items():
                    errors += _errors(adapter, one, key)
            elif value is not None or parameter.default is not None:
                errors += _errors(adapter, value, name)
        if errors:
            raise ArgumentsError(self._task, errors[:_SHOWN_ERRORS])


def _hints(task: InferenceTask[..., Any]) -> Mapping[str, Any]:
    function = inspect.unwrap(getattr(task.run, "__func__", task.run))
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:  # a name that exists for type checkers only, an expression that cannot be evaluated
        log.info("Task %s: its hints cannot be read, those that are text are not checked: %s", task.name, error)
        return {}


def _errors(adapter: TypeAdapter[Any], value: object, name: str) -> list[dict[str, str]]:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        pass
    except Exception:  # a validator of the user's own that only knows what is below
        pass
    else:
        return []
    # What JSON has no form for comes as text, and a tuple as a list: those pass as JSON only.
    try:
        adapter.validate_json(to_json(value), strict=True)
    except ValidationError as error:
        return [
            {"where": ".".join((name, *map(str, one["loc"]))), "message": one["msg"]}
            for one in error.errors(include_url=False, include_context=False, include_input=False)
        ]
    except Exception as error:
        return [{"where": name, "message": f"{type(error).__name__}: {error}"}]
    return []
