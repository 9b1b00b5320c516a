"""What is read from a message before it may run, and what is refused."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.exceptions import ContentDisallowed, DecodeError

from inference_routing.lane import QueueKey
from inference_tasks.worker.intake import MAX_ID_LENGTH, Intake, Unfit, read

KEY = QueueKey("batch", "returned", "n.batch.returned")
TASKS = {"classify"}


@dataclass
class Message:
    headers: Any = field(default_factory=lambda: {"id": "a", "task": "classify"})
    payload_or_error: Any = ((), {}, {})
    errors: list[object] = field(default_factory=list)
    content_type: str | None = "application/json"
    body: bytes | str = b""
    content_encoding: str | None = "utf-8"
    acknowledged: bool = False
    properties: dict[str, object] = field(default_factory=dict)
    delivery_info: dict[str, object] = field(default_factory=dict)

    def reject(self) -> None: ...

    def ack(self) -> None: ...

    @property
    def payload(self) -> object:
        if isinstance(self.payload_or_error, Exception):
            raise self.payload_or_error
        return self.payload_or_error


def with_headers(**headers: object) -> Message:
    return Message({"id": "a", "task": "classify", **headers})


def reason(message: Message) -> str | None:
    found = read(message, KEY, TASKS)
    return found.reason if isinstance(found, Unfit) else None


def intake(message: Message) -> Intake:
    found = read(message, KEY, TASKS)
    assert isinstance(found, Intake), found
    return found


def test_a_message_of_a_plain_client_takes_tier_and_lane_from_its_queue() -> None:
    assert intake(Message()) == Intake("a", "classify", "batch", "batch", "returned", 0, None, None, None)


def test_our_header_tells_the_first_tier_and_the_moments() -> None:
    now = time.time()
    header = {"tier_first": "offline", "gen": 3, "submitted_at_s": now, "expires_at_s": now + 60, "crash_limit": 5}
    found = intake(with_headers(inference=header))
    assert found == Intake("a", "classify", "batch", "offline", "returned", 3, now, now + 60, 5)
    claimant = found.claimant()
    assert (claimant.id, claimant.tier, claimant.tier_first, claimant.generation) == ("a", "batch", "offline", 3)


def test_the_tier_in_the_header_moves_no_message() -> None:
    assert intake(with_headers(inference={"tier": "realtime", "lane": "aged"})).tier == "batch"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gen", -1),
        ("gen", 2**31),
        ("gen", True),
        ("gen", "1"),
        ("submitted_at_s", -1.0),
        ("submitted_at_s", 1e300),
        ("submitted_at_s", float("nan")),
        ("expires_at_s", "soon"),
        ("expires_at_s", True),
        ("expires_at_s", 0),
        ("crash_limit", 0),
        ("crash_limit", -3),
        ("crash_limit", 1.5),
        ("tier_first", 7),
        ("tier_first", ""),
        ("tier_first", "none of the tiers"),
    ],
)
def test_values_without_sense_are_ignored(name: str, value: object) -> None:
    assert intake(with_headers(inference={name: value})) == intake(Message())


@pytest.mark.parametrize("header", [None, "realtime", 5, [], ["gen", 1]])
def test_a_header_that_is_no_table_is_ignored(header: object) -> None:
    assert intake(with_headers(inference=header)) == intake(Message())


@pytest.mark.parametrize("task_id", [None, "", 7, ["a"], "x" * (MAX_ID_LENGTH + 1), b"a"])
def test_an_id_that_is_no_short_text_is_malformed_and_names_no_record(task_id: object) -> None:
    found = read(with_headers(id=task_id), KEY, TASKS)
    assert isinstance(found, Unfit)
    assert (found.reason, found.id) == ("malformed", None)


@pytest.mark.parametrize("name", [None, "", 7, ["classify"]])
def test_a_task_that_is_no_text_is_malformed(name: object) -> None:
    found = read(with_headers(task=name), KEY, TASKS)
    assert isinstance(found, Unfit)
    assert (found.reason, found.id) == ("malformed", "a")


def test_an_unknown_task_is_named_so_before_its_body_is_looked_at() -> None:
    message = Message({"id": "a", "task": "nobody"}, DecodeError("never read"))
    assert reason(message) == "unknown task"


@pytest.mark.parametrize("headers", [None, [], "x"])
def test_headers_that_are_no_table_are_malformed(headers: object) -> None:
    assert reason(Message(headers)) == "malformed"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ContentDisallowed("pickle"), "content type refused"),
        (DecodeError("no"), "undecodable"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), "undecodable"),
        (json.JSONDecodeError("no", "", 0), "undecodable"),
        (LookupError("unknown encoding"), "undecodable"),
        (RecursionError(), "undecodable"),
    ],
)
def test_a_body_that_cannot_be_read_says_why(error: Exception, expected: str) -> None:
    assert reason(Message(payload_or_error=error)) == expected


def test_a_body_that_could_not_be_decompressed_is_undecodable() -> None:
    assert reason(Message(errors=[ValueError("no gzip")])) == "undecodable"


@pytest.mark.parametrize(
    "payload",
    [None, 7, "abc", {}, [], [[], {}], [[], {}, {}, {}], ["abc", {}, {}], [[], [], {}], [[], {}, 7], [None, {}, {}]],
)
def test_a_body_of_another_shape_is_malformed(payload: object) -> None:
    assert reason(Message(payload_or_error=payload)) == "malformed"


def test_callbacks_may_be_missing() -> None:
    assert reason(Message(payload_or_error=[[], {}, None])) is None


@pytest.mark.parametrize(
    "limits",
    [
        5,
        "ab",
        [1],
        [1, 2, 3],
        ["1", None],
        [-1, None],
        [None, 0],
        [True, None],
        [float("inf"), None],
        [float("nan"), 1],
    ],
)
def test_time_limits_that_the_pool_would_choke_on_are_malformed(limits: object) -> None:
    assert reason(with_headers(timelimit=limits)) == "malformed"


@pytest.mark.parametrize("limits", [None, [None, None], [5, 1.5], (None, 3)])
def test_time_limits_of_celery_are_right(limits: object) -> None:
    assert reason(with_headers(timelimit=limits)) is None


@pytest.mark.parametrize("eta", [5, "next week", "0001-01-01T00:00:00+14:00", [], {}])
def test_an_eta_that_is_no_moment_is_malformed(eta: object) -> None:
    expected = None if eta in ([], {}) else "malformed"
    assert reason(with_headers(eta=eta)) == expected


@pytest.mark.parametrize("eta", [None, "2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00.5", "2026-01-01T00:00:00Z"])
def test_an_eta_of_celery_is_right(eta: object) -> None:
    assert reason(with_headers(eta=eta)) is None


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    headers=st.dictionaries(
        st.sampled_from(["id", "task", "inference", "timelimit", "eta", "retries"]), _json | st.just("classify")
    ),
    payload=_json,
)
def test_nothing_that_a_message_can_hold_raises(headers: dict[str, object], payload: object) -> None:
    assert isinstance(read(Message(headers, payload), KEY, TASKS), Intake | Unfit)
