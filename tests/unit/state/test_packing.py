"""What travels to the scripts and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_tasks.state import keys
from inference_tasks.state.packing import pack_claimant, summed_rates, unpack_beat, unpack_claims, unpack_record
from inference_tasks.state.records import Claimant, NewTask, RunningTask, Verdict, WorkerBeat
from inference_tasks.state.submits import pack_submit

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_the_keys_of_a_task_share_a_hash_slot() -> None:
    task, result = keys.task("p:", "id"), keys.result("p:", "id")
    assert (task, result) == ("p:{id}:task", "p:{id}:result")
    # The scripts make the second from the first.
    assert task.removesuffix("task") + "result" == result


@given(task_id=texts, name=texts, tier=texts, limit=st.none() | st.integers(0, 99), at_s=st.none() | st.floats(0, 4e9))
def test_a_message_always_travels_as_eleven_fields(
    task_id: str, name: str, tier: str, limit: int | None, at_s: float | None
) -> None:
    packed = pack_claimant(Claimant(task_id, name, tier, "fresh", 0, at_s, at_s, limit))
    assert packed.count("\x1f") == 10
    assert "\x1e" not in packed or "\x1e" in task_id + name + tier


@given(name=texts, nonce=texts)
def test_a_submission_always_travels_as_thirteen_fields(name: str, nonce: str) -> None:
    task = NewTask("id", name, "batch", "batch", "fresh", 0, nonce, 1.0, 3.5, due_at_s=10.0)
    names, args = pack_submit("p:", [task])
    assert names == ["p:{id}:task"]
    assert args[0].count("\x1f") == 12
    assert args[0].endswith("\x1f+2.500000\x1f+9.000000\x1f0\x1f1\x1f\x1f\x1f")


def test_answers_to_claims_are_read_whether_or_not_the_client_decodes() -> None:
    lines = (
        "100.5 130.5 7",  # now, end of the new leases, their token
        "run 1 batch 90.0 ",
        "run 2 batch  9",
        "held 1 batch 7 120 w1",
    )
    reply = "\x1e".join(lines).replace(" ", "\x1f")
    for form in (reply, reply.encode()):
        first, later, held = unpack_claims(form)
        assert first == (Verdict.RUN, 7, 1, 130.5, "batch", 10.5, None)
        assert later == (Verdict.RUN, 9, 2, 130.5, "batch", None, None)
        assert held == (Verdict.HELD, 7, 1, 120.0, "batch", None, "w1")


EARLIER = ("node", "pid", "gpu", "pool", "slots", "reserve", "tiers", "busy")


def test_an_empty_line_is_no_record() -> None:
    assert unpack_record("id", "") is None


def test_a_heartbeat_comes_back_as_it_was_also_with_what_a_later_version_tells() -> None:
    running = RunningTask("id", "classify", "realtime", "batch", "aged", 12.5)
    beat = WorkerBeat(
        *("gpu0@host", 1, "0", "prefork", 2, 1, ("realtime", "batch"), 1),
        seen_at_s=20.0,
        starts_60s={"realtime": {"batch": 3}},
        version="1.0",
        started_at_s=10.0,
        running=(running,),
        busy_by_tier={"realtime": 1},
        last_start_at_s={"realtime": 12.5},
        waits_60s={"batch": {3: 2, 19: 1}},
        longest_wait_60s={"batch": 20_000.0},
        ended_60s={"batch": 3},
        failed_60s={"batch": 1},
        floor_violations_60s={"offline": 1},
        state="paused",
        gpu_memory_used_bytes=5,
        gpu_memory_total_bytes=8,
        gpu_utilization=0.5,
    )
    text = json.dumps({**beat.as_dict(), "told_later": 1})
    assert unpack_beat("20.0", text) == beat
    # And of an earlier version, what it told.
    earlier = {name: value for name, value in beat.as_dict().items() if name in EARLIER}
    assert unpack_beat("20.0", json.dumps(earlier)).running == ()


def test_rates_are_summed_over_workers() -> None:
    beats = [
        WorkerBeat("a", 1, None, "solo", 1, 0, ("batch",), 0, started_per_s={"batch": 1.5}),
        WorkerBeat("b", 2, None, "solo", 1, 0, ("batch",), 0, started_per_s={"batch": 0.5, "offline": 2.0}),
    ]
    assert summed_rates(beats) == pytest.approx({"batch": 2.0, "offline": 2.0})
