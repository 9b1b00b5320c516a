"""Reading the dead letters takes nothing, changes no order and holds nothing for longer than it lasts."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any, cast

import pytest

from inference_tasks.app import Inference, inference_of
from inference_tasks.broker.messages import Accepted, Outgoing, Properties
from inference_tasks.dead_letters.reading import open_reading
from inference_tasks.errors import BrokerUnavailableError, DeadLettersBusyError
from tests.support.brokers import depths, until
from tests.support.processes import LoggedProcess
from tests.support.proxy import FaultProxy
from tests.support.rig import Rig

both = pytest.mark.parametrize("queue_type", ["quorum", "classic"])


def bury(inference: Inference, count: int, first: int = 0) -> None:
    """Publish straight into the dead-letter queue, numbered."""
    queue = inference.topology.dead.name
    outgoings = (
        Outgoing(str(number).encode(), inference.settings.namespace, queue, Properties(headers={}))
        for number in range(first, first + count)
    )
    assert set(inference.publisher.send_many(outgoings)) == {Accepted()}


def numbers(inference: Inference) -> list[int]:
    """All that lies in the queue, in its order."""
    with open_reading(inference) as reading:
        found = [int(message.body) for message in reading]
        assert reading.is_complete
    return found


def dead_depth(app: Any) -> int:
    return depths(app)[inference_of(app).topology.dead.name]


@both
def test_what_is_read_stays_in_its_order(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    bury(inference, 1500)
    # A queue without a limit of its own gives a message up at its 20th return, from RabbitMQ 4.0 on.
    for _ in range(22):
        assert numbers(inference) == list(range(1500))
    assert dead_depth(app) == 1500


@both
def test_what_is_taken_is_gone_and_the_rest_keeps_its_order(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    bury(inference, 1000)
    with open_reading(inference) as reading:
        for message in reading:
            if int(message.body) % 7 == 0:
                reading.take(message)
    left = [number for number in range(1000) if number % 7]
    assert numbers(inference) == left
    assert dead_depth(app) == len(left)


@both
def test_a_reading_that_ends_early_or_by_an_error_returns_everything(rig: Rig) -> None:
    inference = inference_of(rig.app())
    bury(inference, 600)
    with open_reading(inference) as reading:
        assert [int(message.body) for message, _ in zip(reading, range(100), strict=False)][:100] == list(range(100))
        assert not reading.is_complete
    with suppress(ZeroDivisionError), open_reading(inference) as reading:
        for message in reading:
            1 // (int(message.body) - 50)
    assert numbers(inference) == list(range(600))


def test_what_arrives_meanwhile_is_not_read_and_comes_after_the_rest(rig: Rig) -> None:
    inference = inference_of(rig.app())
    bury(inference, 50)
    with open_reading(inference) as reading:
        found: list[int] = []
        for message in reading:
            if not found:
                bury(inference, 50, first=50)
            found.append(int(message.body))
    assert found == list(range(50))
    assert numbers(inference) == list(range(100))


def test_one_reading_at_a_time(rig: Rig) -> None:
    inference = inference_of(rig.app())
    bury(inference, 10)
    with open_reading(inference) as reading:
        next(iter(reading))
        started = time.monotonic()
        with pytest.raises(DeadLettersBusyError, match="try again"), open_reading(inference, wait_s=0.5):
            pass
        assert 0.4 < time.monotonic() - started < 3
    assert numbers(inference) == list(range(10))


HOLDER = """
import json, os, time
from tests.support.faulty_app import make_app
from inference_tasks.app import inference_of
from inference_tasks.dead_letters.reading import open_reading
inference = inference_of(make_app(json.loads(os.environ["INFERENCE_TEST_OPTIONS"])))
with open_reading(inference) as reading:
    for message in reading:
        pass
    print("holds them all", flush=True)
    time.sleep(60)
"""


def test_a_killed_reading_returns_everything_at_once(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    bury(inference, 300)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {**os.environ, "PYTHONPATH": path, "INFERENCE_TEST_OPTIONS": json.dumps(rig.options)}
    holder = LoggedProcess((sys.executable, "-c", HOLDER), log=rig.directory / "holder.log", env=env)
    with holder:
        holder.wait_for("holds them all")
        assert dead_depth(app) == 0
        holder.send(signal.SIGKILL)
        holder.wait()
        until(lambda: dead_depth(app) == 300, "the broker has taken them back")
    assert numbers(inference) == list(range(300))


@pytest.mark.parametrize("when", ["before the first letter", "while the letters come"])
def test_a_broker_that_falls_silent_is_an_error_not_a_hang(rig: Rig, rabbitmq_proxy: FaultProxy, when: str) -> None:
    direct = rig.app()
    bury(inference_of(direct), 200)
    url = rabbitmq_proxy.url(cast(str, inference_of(direct).settings.broker.url))
    inference = inference_of(rig.app(broker={"url": url}))
    started = 0.0

    def read() -> None:
        nonlocal started
        with open_reading(inference) as reading:
            letters = iter(reading)
            if when == "while the letters come":
                next(letters)
            rabbitmq_proxy.black_hole()
            started = time.monotonic()
            list(letters)

    with pytest.raises(BrokerUnavailableError):
        read()
    assert time.monotonic() - started < 15
    rabbitmq_proxy.down()
    until(lambda: dead_depth(direct) == 200, "the broker has taken them back")
    assert numbers(inference_of(direct)) == list(range(200))
