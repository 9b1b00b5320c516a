"""The stores that the contract is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from inference_tasks.state.store import TaskStore
from inference_tasks.testing.store import FakeTaskStore
from tests.support.state_changes import WatchedStore
from tests.support.task_stores import BOUNDS, FakeHarness, RedisHarness, StoreHarness


@pytest.fixture(params=["fake", "redis"])
def harness(request: pytest.FixtureRequest) -> Iterator[StoreHarness]:
    if request.param == "fake":
        yield FakeHarness(FakeTaskStore(bounds=BOUNDS))
        return
    real = _watched(request.getfixturevalue("redis_url"))
    yield real
    real.close()


@pytest.fixture
def real(redis_url: str) -> Iterator[RedisHarness]:
    """Only a real Redis."""
    harness = _watched(redis_url)
    yield harness
    harness.close()


def _watched(redis_url: str) -> RedisHarness:
    """Every change of a state is one that there is."""
    harness = RedisHarness(redis_url, bounds=BOUNDS)
    harness.store = cast(TaskStore, WatchedStore(harness))
    return harness
