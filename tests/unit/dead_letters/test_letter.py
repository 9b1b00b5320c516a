"""What dead letters of every origin say of themselves, and their copies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from kombu.message import Message

from inference_routing.lane import QueueKey
from inference_tasks.dead_letters.letter import FOREIGN, letter_of, revived

QUEUES = {"inference.batch": QueueKey("batch", "fresh", "inference.batch")}
BODY = b"[[1], {}, {}]"

HEADERS: Mapping[str, Any] = {
    "id": "a-1",
    "task": "vision.classify",
    "lang": "py",
    "retries": 4,
    "eta": "2026-01-01T00:00:00+00:00",
    "expires": "2026-01-01T00:01:00+00:00",
    "root_id": "r",
    "group": "g",
    "stamps": {"customer": "x"},
    "inference": {
        "v": 1,
        "tier": "batch",
        "tier_first": "offline",
        "asked": True,
        "lane": "aged",
        "gen": 2,
        "hop": 7,
        "submitted_at_s": 1_000.0,
        "expires_at_s": 1_060.0,
        "crash_limit": 2,
    },
}
OURS: Mapping[str, Any] = {
    "reason": "attempts exhausted",
    "detail": "after 5 attempts",
    "queue": "inference.batch.aged",
    "tier": "batch",
    "lane": "aged",
    "worker": "gpu0@host",
    "at_s": 2_000.0,
    "attempts": 5,
    "error": {"type": "ValueError", "message": "no such picture"},
}


def message(headers: Any, body: bytes = BODY, **properties: Any) -> Any:
    made = Message(
        body=body,  # type: ignore[arg-type]  # its stub knows text only
        headers=headers,
        properties=properties,
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={},
    )
    made.accept = {"application/json"}
    return made


def death(reason: str, queue: str = "inference.batch") -> dict[str, Any]:
    at = datetime.fromtimestamp(3_000, UTC).replace(tzinfo=None)
    return {"x-death": [{"reason": reason, "queue": queue, "count": 1, "time": at}], "x-first-death-reason": reason}


def test_a_letter_of_a_worker_says_what_the_worker_wrote() -> None:
    letter = letter_of(message({**HEADERS, "inference_dead": OURS}, message_id="m"), QUEUES)
    dead = letter.dead
    assert (dead.id, dead.task, dead.tier, dead.tier_first, dead.lane) == (
        "a-1",
        "vision.classify",
        "batch",
        "offline",
        "aged",
    )
    assert (dead.reason, dead.detail, dead.attempts, dead.generation) == ("attempts exhausted", OURS["detail"], 5, 2)
    assert dead.error == {"type": "ValueError", "message": "no such picture"}
    assert (dead.submitted_at_s, dead.dead_at_s, dead.message_id) == (1_000.0, 2_000.0, "m")
    assert (letter.is_ours, letter.is_named, letter.hop, dead.is_replayable) == (True, True, 7, True)


@pytest.mark.parametrize("reason", ["rejected", "expired", "delivery_limit", "maxlen"])
def test_a_letter_of_the_broker_has_its_reason_time_and_queue(reason: str) -> None:
    headers = {name: value for name, value in HEADERS.items() if name != "inference"}
    letter = letter_of(message({**headers, **death(reason)}), QUEUES)
    assert (letter.dead.reason, letter.dead.tier, letter.dead.lane) == (reason, "batch", "fresh")
    assert (letter.dead.dead_at_s, letter.dead.is_replayable, letter.is_ours) == (3_000.0, True, False)
    assert letter.dead.detail


def test_a_letter_of_a_stranger_gets_an_id_of_its_own_and_cannot_be_replayed() -> None:
    first, again, other = (letter_of(message({}, body), QUEUES).dead for body in (b"hello", b"hello", b"bye"))
    assert first.id == again.id != other.id
    assert first.id.startswith("message:")
    assert (first.reason, first.is_replayable, first.dead_at_s) == (FOREIGN, False, 0.0)
    assert letter_of(message({}, message_id="77"), QUEUES).dead.id == "message:77"


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {"id": 7, "task": ["x"]},
        {"inference": "batch", "inference_dead": 3, "x-death": {"reason": 4}},
        {"x-death": [7]},
        {"x-death": [{"reason": 1, "queue": [], "time": "yesterday"}]},
        {**HEADERS, "inference": {"gen": -1, "hop": "many", "tier": 5, "submitted_at_s": float("nan")}},
        {**HEADERS, "inference_dead": {"reason": 5, "at_s": 1e300, "attempts": True, "error": 7, "tier": "P9"}},
    ],
)
def test_headers_of_any_kind_are_survived(headers: Any) -> None:
    dead = letter_of(message(headers), QUEUES).dead
    assert json.loads(json.dumps(dead.as_dict())) == dead.as_dict()


@pytest.mark.parametrize(
    "bad",
    [
        message({**HEADERS, **death("rejected")}, b"\xff"),
        message({**HEADERS, **death("rejected")}, b"17"),
        message({**HEADERS, **death("rejected"), "timelimit": 5}),
    ],
)
def test_what_no_worker_could_read_cannot_be_replayed(bad: Any) -> None:
    assert not letter_of(bad, QUEUES).dead.is_replayable


def test_a_letter_without_any_tier_cannot_be_replayed() -> None:
    headers = {name: value for name, value in HEADERS.items() if name != "inference"}
    assert not letter_of(message({**headers, **death("rejected", "elsewhere")}), QUEUES).dead.is_replayable


def test_two_copies_of_one_letter_have_one_digest() -> None:
    one, two, other = (
        letter_of(message({**HEADERS, "inference_dead": {**OURS, "at_s": at_s}}, body, message_id=str(at_s)), QUEUES)
        for at_s, body in ((1.0, BODY), (2.0, BODY), (1.0, b"[[2], {}, {}]"))
    )
    assert one.digest == two.digest != other.digest


def test_the_copy_is_a_new_life_in_the_same_tier_without_deadline() -> None:
    found = message(
        {**HEADERS, "inference_dead": OURS, **death("rejected"), "x-delivery-count": 3},
        correlation_id="a-1",
        reply_to="back",
        message_id="m",
    )
    copy = revived(found, letter_of(found, QUEUES), exchange="inference", queue="inference.batch.returned", now_s=9.0)
    headers = dict(copy.properties.headers)
    ours = headers.pop("inference")
    assert ours == {
        **HEADERS["inference"],
        "lane": "returned",
        "gen": 3,
        "hop": 0,
        "expires_at_s": None,
        "ready_at_s": 9.0,
    }
    assert headers == {
        **{name: value for name, value in HEADERS.items() if name != "inference"},
        "retries": 0,
        "eta": None,
        "expires": None,
    }
    assert (copy.body, copy.exchange, copy.routing_key) == (BODY, "inference", "inference.batch.returned")
    assert (copy.properties.correlation_id, copy.properties.reply_to) == ("a-1", "back")
    assert copy.properties.message_id is None
    assert copy.mandatory
