"""The stores that the contract is tested on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference_tasks.testing.store import FakeTaskStore
from tests.support.task_stores import BOUNDS, FakeHarness, RedisHarness, StoreHarness


@pytest.fixture(params=["fake", "redis"])
def harness(request: pytest.FixtureRequest) -> Iterator[StoreHarness]:
    if request.param == "fake":
        yield FakeHarness(FakeTaskStore(bounds=BOUNDS))
        return
    real = RedisHarness(request.getfixturevalue("redis_url"), bounds=BOUNDS)
    yield real
    real.close()


@pytest.fixture
def real(redis_url: str) -> Iterator[RedisHarness]:
    """Only a real Redis."""
    harness = RedisHarness(redis_url, bounds=BOUNDS)
    yield harness
    harness.close()
