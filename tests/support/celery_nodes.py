"""The nodes of pytest-celery on local processes, so that no container engine is needed.

Overriding `celery_broker`, `celery_backend` and `celery_worker` is all that pytest-celery asks for; the same tests can
run on its containers by leaving this plugin out. A test chooses the worker's application by overriding
`celery_worker_module`.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from pytest_celery import (
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestContainer,
    CeleryTestWorker,
    CeleryWorkerCluster,
)

from tests.support.processes import LoggedProcess, WorkerProcess
from tests.support.servers import RabbitMQNode, RedisNode


class ProcessContainer(CeleryTestContainer):
    """What pytest-celery takes for a container: a process and the addresses by which it is reached.

    The base class asks a container engine for nearly everything; here each of those questions has a local answer, and
    the base class is never initialised.
    """

    def __init__(self, name: str, process: LoggedProcess, *, url: str | None = None, ready: str | None = None) -> None:
        self._name = name
        self._process = process
        self._url = url
        self._ready = ready

    @property
    def name(self) -> str:
        return self._name

    @property
    def id(self) -> str:
        return self._name

    @property
    def celeryconfig(self) -> dict[str, str]:
        return {} if self._url is None else {"url": self._url, "host_url": self._url}

    @property
    def ready_prompt(self) -> str | None:
        return self._ready

    @property
    def status(self) -> str:
        return "running" if self._process.is_running else "exited"

    def ready(self) -> bool:
        if self._ready is not None:
            self._process.wait_for(self._ready, timeout_s=60.0)
        return self._process.is_running

    def logs(self) -> str:
        return self._process.log

    def kill(self, signal: str | int = "SIGKILL") -> None:
        number = signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)
        self._process.send(number)
        self._process.wait()

    def restart(self, timeout: float = 30.0) -> None:
        if self._process.is_running:
            self._process.terminate(timeout)
        self._process.start()
        self.ready()

    def reload(self) -> None:
        """Nothing is cached here that could be out of date."""

    def teardown(self) -> None:
        """The fixture that started the process also ends it."""


class LocalWorker(CeleryTestWorker):
    """A worker node; its name is the one it got on the command line."""

    def hostname(self) -> str:
        return f"{self.container.name}@localhost"


@pytest.fixture
def celery_broker(rabbitmq: RabbitMQNode, amqp_url: str) -> CeleryTestBroker:
    """A fresh virtual host of the shared RabbitMQ node, as pytest-celery's broker."""
    return CeleryTestBroker(ProcessContainer("rabbitmq", rabbitmq.process, url=amqp_url))


@pytest.fixture
def celery_backend(redis_node: RedisNode, redis_url: str) -> CeleryTestBackend:
    """The shared Redis node, as pytest-celery's result backend."""
    return CeleryTestBackend(ProcessContainer("redis", redis_node.process, url=redis_url))


@pytest.fixture
def celery_worker_module() -> str:
    """The application that the worker runs: a module on the import path, or one that the test wrote into `tmp_path`."""
    return "tests.support.plain_app"


@pytest.fixture
def celery_worker_options() -> tuple[str, ...]:
    """Further options of the worker's command line."""
    return ("--concurrency", "1")


@pytest.fixture
def celery_worker_environment() -> dict[str, str]:
    """What a test adds to the worker's environment."""
    return {}


@pytest.fixture
def celery_worker(
    celery_setup_app: Celery,
    amqp_url: str,
    redis_url: str,
    tmp_path: Path,
    celery_worker_module: str,
    celery_worker_options: tuple[str, ...],
    celery_worker_environment: dict[str, str],
) -> Iterator[CeleryTestWorker]:
    """A worker process started by `celery worker`, as pytest-celery's worker."""
    addresses = {"CELERY_BROKER_URL": amqp_url, "CELERY_RESULT_BACKEND": redis_url}
    process = WorkerProcess.celery(
        celery_worker_module,
        *celery_worker_options,
        directory=tmp_path,
        env={**addresses, **celery_worker_environment},
    )
    with process:
        yield LocalWorker(ProcessContainer("worker", process, ready=WorkerProcess.READY), app=celery_setup_app)


@pytest.fixture
def celery_worker_cluster(celery_worker: CeleryTestWorker) -> CeleryWorkerCluster:
    """One worker; the plugin's own cluster adds a second one from a container image."""
    return CeleryWorkerCluster(celery_worker)
