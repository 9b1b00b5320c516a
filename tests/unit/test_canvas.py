"""Which later steps of a canvas lift an earlier one."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain, chord, group

from inference_tasks.canvas import inherited_tier

APP = Celery("canvas", set_as_current=False)


def _nothing() -> None:
    pass


def _task(name: str, tier: str | None, *, lifts: bool) -> Any:
    made: Any = APP.task(name=name, shared=False)(_nothing)
    made.tier, made.lifts_canvas = tier, lifts
    return made


SLOW = _task("slow", "offline", lifts=False)
FAST = _task("fast", "realtime", lifts=True)
FAST_ALONE = _task("fast-alone", "realtime", lifts=False)
USUAL = _task("usual", None, lifts=True)


@pytest.mark.parametrize(
    ("later", "tier"),
    [
        ([FAST.s()], "realtime"),
        ([FAST_ALONE.s()], "offline"),
        ([USUAL.s()], "batch"),
        ([USUAL.s(), FAST.s()], "realtime"),
        ([FAST.s().set(tier="P1")], "batch"),
        ([FAST.s().set(tier="nowhere")], "offline"),
        ([group(SLOW.s(), FAST.s())], "realtime"),
        ([chord([SLOW.s()], FAST.s())], "realtime"),
        ([chain(SLOW.s(), group(SLOW.s(), chain(SLOW.s(), FAST.s())))], "realtime"),
        ([APP.signature("nobody-knows")], "offline"),
        ([], "offline"),
    ],
)
def test_a_step_inherits_the_highest_tier_of_the_later_ones_that_lift(later: list[Any], tier: str) -> None:
    assert inherited_tier(APP, {"chain": later, "chord": None}, "offline", "batch") == tier


def test_a_member_of_a_chord_inherits_from_its_body() -> None:
    assert inherited_tier(APP, {"chain": None, "chord": FAST.s()}, "offline", "batch") == "realtime"


@pytest.mark.parametrize("embed", [None, {}, [], {"chain": 3, "chord": "x"}, {"chain": [None, {"task": None}]}])
def test_what_is_no_canvas_lifts_nothing(embed: object) -> None:
    assert inherited_tier(APP, embed, "offline", "batch") == "offline"


def test_a_later_step_of_a_lower_tier_changes_nothing() -> None:
    assert inherited_tier(APP, {"chain": [USUAL.s()]}, "realtime", "batch") == "realtime"
