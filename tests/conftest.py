"""Fixtures for every test: markers by folder, private servers, names of one's own."""

from __future__ import annotations

import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.browser import Browser
from tests.support.history import History
from tests.support.isolation import process_as_it_was
from tests.support.proxy import FaultProxy
from tests.support.rabbitmq4 import rabbitmq4_node
from tests.support.servers import RabbitMQNode, RedisNode, installed

pytest_plugins = ["tests.support.celery_nodes", "tests.support.scheduling"]

TESTS = Path(__file__).parent
KINDS = frozenset({"unit", "properties", "contract", "seam", "integration", "acceptance", "architecture", "examples"})

# A shared machine stalls now and then: a slow example is no failure of a property.
settings.register_profile("desk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("desk"), print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests run on another version of RabbitMQ than the machine's own."""
    parser.addoption(
        "--rabbitmq",
        choices=("installed", "4"),
        default=os.environ.get("INFERENCE_TEST_RABBITMQ", "installed"),
        help="which RabbitMQ the tests start: the installed one, or version 4 (see tests/support/rabbitmq4.py)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the folder that it lies in."""
    for item in items:
        if item.path.is_relative_to(TESTS):
            kind = item.path.relative_to(TESTS).parts[0]
            if kind in KINDS:
                item.add_marker(kind)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests of each kind ran."""
    counts: Counter[str] = Counter()
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            # A test counts once: in its call, or in the error that kept it from one. A file that fails to load is none.
            if isinstance(report, pytest.TestReport) and (report.when == "call" or outcome == "error"):
                counts.update(kind for kind in KINDS if kind in report.keywords)
    shown = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    terminalreporter.write_line(f"tests by kind: {shown or 'none'}")


@pytest.fixture(scope="module", autouse=True)
def _process_after_the_module_as_before() -> Iterator[None]:
    with process_as_it_was():
        yield


@pytest.fixture(autouse=True)
def _process_after_the_test_as_before(_process_after_the_module_as_before: None) -> Iterator[None]:
    with process_as_it_was():
        yield


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses: for virtual hosts, key prefixes, queues."""
    test = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    return f"{test}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def new_rabbitmq(pytestconfig: pytest.Config) -> Callable[[], RabbitMQNode]:
    """Makes nodes of the version that `--rabbitmq` asks for."""
    return rabbitmq4_node if pytestconfig.getoption("rabbitmq") == "4" else RabbitMQNode


@pytest.fixture(scope="session")
def rabbitmq(new_rabbitmq: Callable[[], RabbitMQNode]) -> Iterator[RabbitMQNode]:
    """The RabbitMQ node that all tests share; a test that harms its broker takes `private_rabbitmq`."""
    with installed(new_rabbitmq) as node:
        yield node


@pytest.fixture
def private_rabbitmq(new_rabbitmq: Callable[[], RabbitMQNode]) -> Iterator[RabbitMQNode]:
    """A RabbitMQ node of this test alone, to be killed, frozen or reconfigured; takes some 10 s to start."""
    with installed(new_rabbitmq) as node:
        yield node


@pytest.fixture
def vhost(rabbitmq: RabbitMQNode, namespace: str) -> Iterator[str]:
    """The name of a fresh virtual host on the shared node."""
    rabbitmq.create_vhost(namespace)
    yield namespace
    rabbitmq.delete_vhost(namespace)


@pytest.fixture
def amqp_url(rabbitmq: RabbitMQNode, vhost: str) -> str:
    """The address of a fresh virtual host on the shared node."""
    return rabbitmq.url(vhost)


@pytest.fixture(scope="session")
def redis_node() -> Iterator[RedisNode]:
    """The Redis node that all tests share, each under a key prefix of its own (`namespace`); never flush it."""
    with installed(RedisNode) as node:
        yield node


@pytest.fixture
def private_redis() -> Iterator[RedisNode]:
    """A Redis node of this test alone, to be killed, frozen or flushed."""
    with installed(RedisNode) as node:
        yield node


@pytest.fixture
def redis_url(redis_node: RedisNode) -> str:
    """The address of the shared Redis node."""
    return redis_node.url()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A Chromium without a window, with one empty tab."""
    with installed(lambda: Browser(tmp_path)) as browser:
        yield browser


@pytest.fixture
def rabbitmq_proxy(rabbitmq: RabbitMQNode) -> Iterator[FaultProxy]:
    """A breakable line to the shared RabbitMQ node."""
    with FaultProxy(rabbitmq.port) as proxy:
        yield proxy


@pytest.fixture
def redis_proxy(redis_node: RedisNode) -> Iterator[FaultProxy]:
    """A breakable line to the shared Redis node."""
    with FaultProxy(redis_node.port) as proxy:
        yield proxy


@pytest.fixture
def history(tmp_path: Path) -> History:
    """The history of this test; give `history.env` to the processes that write it."""
    return History(tmp_path / "history.jsonl")
