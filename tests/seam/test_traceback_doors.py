"""What brief tracebacks rely on inside billiard, and what is left of an error that crosses from the pool's process."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest

from inference_tasks.worker import seam
from inference_tasks.worker.tracebacks import BriefTraceback, use_brief_tracebacks


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam.einfo, "Traceback", seam.einfo.Traceback)
    use_brief_tracebacks()


def deeper(depth: int) -> float:
    return deeper(depth - 1) if depth else sum(value / 0 for value in [1, 2])


def failed(depth: int) -> tuple[Any, str]:
    """Return the error information of a failure, and what Python prints of its traceback."""
    try:
        deeper(depth)
    except ZeroDivisionError as error:
        return seam.einfo.ExceptionInfo(), "".join(traceback.format_tb(error.__traceback__))
    raise AssertionError("it did not fail")


def test_billiard_makes_the_traceback_that_it_pickles_with_ours() -> None:
    assert isinstance(vars(failed(0)[0])["tb"], BriefTraceback)


def test_what_crosses_prints_as_the_error_itself() -> None:
    info, printed = failed(2)
    crossed = pickle.loads(pickle.dumps(info))
    assert "".join(traceback.format_tb(crossed.tb)) == printed
    assert "^^^" in printed
    assert printed in crossed.traceback


def test_what_crosses_does_not_grow_with_the_functions_on_the_way() -> None:
    body = "\n".join(f"    value_{number} = {number}" for number in range(5000))
    namespace: dict[str, Any] = {}
    exec(f"def long():\n{body}\n    return 1 / 0", namespace)
    try:
        namespace["long"]()
    except ZeroDivisionError:
        assert len(pickle.dumps(seam.einfo.ExceptionInfo())) < 5000
        return
    raise AssertionError("it did not fail")


def test_a_deep_traceback_is_cut_where_billiard_cuts_it() -> None:
    try:
        deeper(20)
    except ZeroDivisionError as error:
        tb: Any = BriefTraceback(error.__traceback__, max_frames=3)  # type: ignore[arg-type]
    names = []
    while tb is not None:
        names.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    assert names[-1] == "[rest of traceback truncated]"
    assert len(names) == 6
