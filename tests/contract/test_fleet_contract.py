"""What is seen of the whole deployment, alike on RabbitMQ and on the embedded broker."""

from __future__ import annotations

import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.observe import fleet
from inference_tasks.observe.fleet import Fleet, TierView
from inference_tasks.observe.switching import pause, resume
from tests.contract.test_broker_contract import broker, embedded_server
from tests.support.brokers import Broker, step, until

__all__ = ["broker", "embedded_server"]


def look(app: InferenceApp) -> Fleet:
    depths = inference_of(app).depths()
    try:
        return fleet.read(inference_of(app), depths)
    finally:
        depths.close()


def view(app: InferenceApp, tier: str) -> TierView:
    return next(one for one in look(app).tiers if one.tier == tier)


def test_what_waits_and_since_when_is_seen_without_a_worker(broker: Broker) -> None:
    app = broker.app()
    for number in range(3):
        step(app, "batch").submit(number)
    step(app, "batch").apply_async((9,), countdown=600)
    seen = view(app, "batch")
    assert (seen.ready, seen.parked, seen.running, seen.workers) == (3, 1, 0, 0)
    assert seen.oldest_s is not None
    assert seen.oldest_s > 0
    assert seen.starved_s == pytest.approx(seen.oldest_s)
    assert seen.expected_wait_s is None, "nobody works on it"
    assert seen.wait_p99_s is None
    idle = view(app, "offline")
    assert (idle.ready, idle.oldest_s, idle.starved_s, idle.expected_wait_s) == (0, None, 0.0, 0.0)


def test_waits_shares_and_ends_of_the_last_minute_are_seen(broker: Broker) -> None:
    app = broker.app()
    for number in range(12):
        step(app, ("realtime", "batch", "offline")[number % 3]).submit(number)
    with broker.worker():
        until(lambda: sum(sum(beat.ended_60s.values()) for beat in look(app).workers) == 12, "all ends are told")
        seen = look(app)
    assert sum(tier.share or 0.0 for tier in seen.tiers) == pytest.approx(1.0)
    for tier in seen.tiers:
        assert tier.wait_p50_s is not None
        assert tier.wait_p99_s is not None
        assert tier.longest_wait_s is not None
        assert 0 < tier.wait_p50_s <= tier.wait_p99_s <= tier.longest_wait_s
        assert (tier.failed_ratio, tier.starved_s, tier.floor_violations, tier.ready) == (0.0, 0.0, 0, 0)
    (beat,) = seen.workers
    assert (beat.running, beat.state) == ((), "running")
    assert set(beat.last_start_at_s) == {"realtime", "batch", "offline"}


def test_what_operators_have_paused_is_seen(broker: Broker) -> None:
    app = broker.app()
    pause(inference_of(app), "offline", by="me", because="a new model", refuse=True)
    seen = view(app, "offline")
    assert (seen.paused, seen.refusing) == (True, True)
    assert (view(app, "batch").paused, view(app, "batch").refusing) == (False, False)
    assert [switch.because for switch in look(app).switches] == ["a new model"]
    resume(inference_of(app), "offline", by="me")
    seen = view(app, "offline")
    assert (seen.paused, seen.refusing) == (False, False)
