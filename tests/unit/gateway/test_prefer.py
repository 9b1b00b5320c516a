"""The header Prefer, as RFC 7240 writes it and as clients do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_tasks.gateway.prefer import Preferences, preferences


@pytest.mark.parametrize(
    ("headers", "wait_s", "is_async"),
    [
        ([], None, False),
        (["wait=2"], 2.0, False),
        (["WAIT = 10"], 10.0, False),
        (['wait="5"'], 5.0, False),
        (["wait=5; strict"], 5.0, False),
        (["respond-async, wait=10"], 10.0, True),
        (["respond-async", "wait=3"], 3.0, True),
        (["wait=1, wait=9"], 1.0, False),
        (['foo="a, wait=9", wait=2'], 2.0, False),
        (["wait=2.5"], None, False),
        (["wait=-1"], None, False),
        (["wait=²"], None, False),
        (["wait"], None, False),
        (["wait=99999999999999999999"], None, False),
        (["return=minimal; foo=bar, wait=0"], 0.0, False),
    ],
)
def test_preferences_are_read(headers: list[str], wait_s: float | None, is_async: bool) -> None:
    assert preferences(headers) == Preferences(wait_s, is_async)


@given(st.lists(st.text(max_size=60), max_size=3))
def test_whatever_stands_there_is_no_error(headers: list[str]) -> None:
    wait_s = preferences(headers).wait_s
    assert wait_s is None or 0 <= wait_s < 1e9
