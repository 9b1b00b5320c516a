"""Every kind of message that can never run: to the dead letters, with its reason, and the worker goes on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from inference_tasks.app import inference_of
from inference_tasks.broker.messages import Accepted
from tests.support.brokers import dead_letters, publish_raw
from tests.support.rig import POOLS, Rig, task

GOOD_BODY = b"[[1], {}, {}]"


@dataclass(frozen=True)
class Bad:
    """One message: what is wrong with it, and the reason it gets."""

    reason: str
    headers: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = GOOD_BODY
    properties: Mapping[str, Any] = field(default_factory=dict)


BAD: Mapping[str, Bad] = {
    "no JSON": Bad("undecodable", body=b"\xff\xfe"),
    "half of JSON": Bad("undecodable", body=b"[[1], {"),
    "empty": Bad("malformed", body=b""),
    "nested too deeply": Bad("undecodable", body=b"[" * 200_000),
    "compressed badly": Bad("undecodable", {"compression": "application/x-gzip"}),
    "compressed unknown": Bad("undecodable", {"compression": "application/x-unheard-of"}),
    "pickle": Bad(
        "content type refused", body=b"cposix\n", properties={"content_type": "application/x-python-serialize"}
    ),
    "yaml": Bad("content type refused", properties={"content_type": "application/x-yaml"}),
    "unheard-of type": Bad("content type refused", properties={"content_type": "image/png"}),
    "no list": Bad("malformed", body=b'{"args": [1]}'),
    "two parts": Bad("malformed", body=b"[[1], {}]"),
    "arguments no list": Bad("malformed", body=b'["abc", {}, {}]'),
    "keywords no mapping": Bad("malformed", body=b"[[1], [2], {}]"),
    "callbacks no mapping": Bad("malformed", body=b"[[1], {}, 7]"),
    "a number": Bad("malformed", body=b"17"),
    "null": Bad("malformed", body=b"null"),
    "no task": Bad("malformed", {"task": None}),
    "task is a number": Bad("malformed", {"task": 7}),
    "id is a number": Bad("malformed", {"id": 7}),
    "id is a list": Bad("malformed", {"id": ["a"]}),
    "no id": Bad("malformed", {"id": None}),
    "empty id": Bad("malformed", {"id": ""}),
    "huge id": Bad("malformed", {"id": "x" * 5000}),
    "unknown task": Bad("unknown task", {"task": "nobody.knows"}),
    "eta is no time": Bad("malformed", {"eta": "next week"}),
    "eta is a number": Bad("malformed", {"eta": 12}),
    "eta beyond all calendars": Bad("malformed", {"eta": "0001-01-01T00:00:00+14:00"}),
    "stamps are no list": Bad("malformed", {"stamped_headers": 5, "stamps": "x"}),
    "expires is no time": Bad("malformed", {"expires": "never"}),
    "time limit is no pair": Bad("malformed", {"timelimit": 5}),
    "time limits are texts": Bad("malformed", {"timelimit": ["soon", "later"]}),
    "time limit is below zero": Bad("malformed", {"timelimit": [-5, None]}),
}

# Anyone who may publish can write these: they must change nothing.
FORGED: Mapping[str, Mapping[str, Any]] = {
    "retries": {"retries": -5},
    "retries as text": {"retries": "many"},
    "tier": {"inference": {"v": 1, "tier": "realtime", "tier_first": "realtime", "lane": "aged"}},
    "our header is a text": {"inference": "realtime"},
    "numbers without sense": {"inference": {"gen": -7, "expires_at_s": "soon", "crash_limit": "x", "tier_first": 3}},
    "huge numbers": {"inference": {"gen": 2**40, "expires_at_s": 1e300, "submitted_at_s": -1.0, "crash_limit": 2**62}},
    "deaths": {"x-death": [{"reason": "expired", "count": 10**6}], "x-delivery-count": 99},
    "token": {"inference_token": 2**62, "inference_gen": 5, "inference_attempt": 9},
    "who sent it": {"origin": 5, "root_id": 5, "parent_id": [1], "group": 7, "argsrepr": 5, "kwargsrepr": {"a": 1}},
    "no language": {"lang": None},
}


def publish(rig: Rig, app: Any, name: str, bad: Bad) -> None:
    headers = {"id": f"{rig.namespace}-{name}", "task": "step.batch", "lang": "py", "case": name, **bad.headers}
    headers = {key: value for key, value in headers.items() if value is not None}
    assert publish_raw(app, "batch", bad.body, headers, **bad.properties) == Accepted()


@pytest.mark.parametrize(
    ("pool", "queue_type"), [("prefork", "quorum"), ("prefork", "classic"), ("threads", "classic"), ("solo", "quorum")]
)
def test_each_is_a_dead_letter_with_its_reason_and_the_next_task_runs(rig: Rig, pool: str) -> None:
    app = rig.app()
    for name, bad in BAD.items():
        publish(rig, app, name, bad)
    with rig.worker(*POOLS[pool]) as worker:
        found = rig.dead(app, len(BAD))
        for number in range(3):
            assert task(app, "step.batch").submit(number).result(timeout_s=60) == number
        (beat,) = inference_of(app).store.workers()
        log = worker.log
        assert worker.terminate() == 0
    said = {message.headers["case"]: message.headers.get("inference_dead", {}).get("reason") for message in found}
    assert said == {name: bad.reason for name, bad in BAD.items()}
    for message in found:
        assert message.headers["case"] in BAD
        bad = BAD[message.headers["case"]]
        assert message.body == (bad.body if isinstance(message.body, bytes) else bad.body.decode())
        assert message.headers["inference_dead"]["tier"] == "batch"
        assert message.headers["inference_dead"]["worker"] == beat.node
    assert set(rig.starts()) == {0, 1, 2}
    assert "Unrecoverable error" not in log
    rig.wait_waiting(app, 0)
    # Who can be named is known to have failed.
    record = app.status(f"{rig.namespace}-unknown task")
    assert (record.state, record.error and record.error["type"]) == ("failed", "unknown task")


@pytest.mark.parametrize("pool", POOLS)
def test_forged_headers_change_neither_tier_nor_count_nor_claim(rig: Rig, pool: str) -> None:
    app = rig.app()
    ids = {}
    for number, (name, headers) in enumerate(FORGED.items()):
        ids[f"{rig.namespace}-{name}"] = number
        publish(rig, app, name, Bad("", headers, json.dumps([[number], {}, {}]).encode()))
    with rig.worker(*POOLS[pool]):
        rig.wait_states(app, list(ids), success=len(ids))
        assert task(app, "step.batch").submit(99).result(timeout_s=60) == 99
    assert rig.starts() == dict.fromkeys([*range(len(FORGED)), 99], 1)
    for task_id in ids:
        record = app.status(task_id)
        assert (record.tier, record.attempts, record.crashes) == ("batch", 1, 0)


def test_a_compressed_body_of_a_foreign_client_runs(rig: Rig) -> None:
    app = rig.app()
    headers = {"id": f"{rig.namespace}-1", "task": "step.batch", "lang": "py", "compression": "application/x-gzip"}
    publish_raw(app, "batch", zlib.compress(GOOD_BODY), headers)
    with rig.worker():
        rig.wait_states(app, [f"{rig.namespace}-1"], success=1)


def test_many_bad_ones_in_front_of_a_good_one_do_not_hold_it_up(rig: Rig) -> None:
    app = rig.app()
    for number in range(150):
        publish(rig, app, str(number), BAD["unknown task"])
    with rig.worker():
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
        assert len(dead_letters(app, 150)) == 150
