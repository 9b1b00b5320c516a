"""The broker, state and workers that the tests of the worker share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.history import History
from tests.support.rig import Rig


@pytest.fixture
def queue_type() -> str:
    """The type of the tier queues; a test on both parametrizes it."""
    return "quorum"


@pytest.fixture
def rig(
    amqp_url: str, redis_url: str, namespace: str, history: History, tmp_path: Path, queue_type: str
) -> Iterator[Rig]:
    """A namespace of this test's own on the shared RabbitMQ and Redis nodes."""
    made = Rig(
        {
            "broker": {"url": amqp_url, "queue_type": queue_type},
            # A prefix of its own: the accounts and the index of the dead letters belong to all work under one.
            "state": {"url": redis_url, "prefix": f"{namespace}:"},
            "namespace": namespace,
        },
        history,
        tmp_path,
        is_exact=queue_type != "quorum",
    )
    yield made
    made.close()
    for log in tmp_path.glob("*.log"):
        sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')}")
