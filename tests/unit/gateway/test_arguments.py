"""Calls are checked against signature and hints as JSON, and never changed."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import pytest

from inference_tasks import InferenceApp
from inference_tasks.gateway.arguments import ArgumentsError, Signature

if TYPE_CHECKING:
    from somewhere_else import Image  # type: ignore[import-not-found]


class Unreadable:
    """A class that pydantic knows nothing of, like an array."""


class Size(enum.StrEnum):
    SMALL = "small"


@dataclass
class Box:
    left: int
    right: int


def plain(path: str, size: int = 1, scale: float = 1.0) -> None: ...
def rich(when: datetime, box: Box, size: Size, pair: tuple[int, int]) -> None: ...
def loose(image: Unreadable, anything, *more: int, fit: bool = False, **rest: str) -> None: ...  # type: ignore[no-untyped-def]
def nullable(name: str = None, mode: Literal["a", "b"] = "a") -> None: ...  # type: ignore[assignment]  # noqa: RUF013
def checked_elsewhere(image: Image, size: int) -> None: ...


@pytest.fixture
def signature() -> Callable[..., Signature]:
    app = InferenceApp("arguments", set_as_current=False, broker="memory://", state="redis://127.0.0.1:1/0")

    def make(function: Callable[..., Any], **options: Any) -> Signature:
        return Signature(app.inference(**options)(function))

    return make


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (plain, ["cat.png"], {}),
        (plain, ["cat.png", 3], {"scale": 2}),
        (rich, ["2026-01-02T03:04:05Z", {"left": 1, "right": 2}, "small", [1, 2]], {}),
        (loose, [{"any": "thing"}, None, 1, 2], {"fit": True, "other": "x"}),
        (nullable, [None], {"mode": "b"}),
        (checked_elsewhere, [{}, "not checked"], {}),
    ],
)
def test_what_fits_is_taken(
    signature: Callable[..., Signature], function: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
) -> None:
    signature(function).check(args, kwargs)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "where"),
    [
        (plain, [], {}, [""]),
        (plain, ["cat.png", 1, 1.0, 1], {}, [""]),
        (plain, ["cat.png"], {"path": "again"}, [""]),
        (plain, [3, "3"], {"scale": "1"}, ["path", "size", "scale"]),
        (plain, ["cat.png", True], {}, ["size"]),
        (plain, ["cat.png", None], {}, ["size"]),
        (rich, ["yesterday", {"left": 1}, "large", [1]], {}, ["when", "box.right", "size", "pair.1"]),
        (loose, [0, 0, 1, "2"], {"other": 3}, ["more.1", "other"]),
        (nullable, [3], {"mode": "c"}, ["name", "mode"]),
    ],
)
def test_what_does_not_fit_is_named(
    signature: Callable[..., Signature],
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: dict[str, object],
    where: list[str],
) -> None:
    with pytest.raises(ArgumentsError) as caught:
        signature(function).check(args, kwargs)
    assert [one["where"] for one in caught.value.errors] == where


def test_a_bound_task_is_no_argument_of_itself(signature: Callable[..., Signature]) -> None:
    def bound(self: object, size: int) -> None: ...

    made = signature(bound, bind=True)
    made.check([3], {})
    with pytest.raises(ArgumentsError):
        made.check([3, 4], {})


def test_a_task_that_is_not_to_be_checked_is_not(signature: Callable[..., Signature]) -> None:
    signature(plain, check_arguments=False).check([1, 2, 3, 4], {})
