"""A gateway as users start it, beside the worker and the servers that it needs."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.history import History
from tests.support.processes import LoggedProcess, environment
from tests.support.rig import Rig
from tests.support.servers import RabbitMQNode, RedisNode

APP = "tests.support.faulty_app:app"


class GatewayProcess(LoggedProcess):
    """`inference-tasks gateway` on a free port of this machine."""

    @classmethod
    def of(cls, rig: Rig, *arguments: str, name: str = "gateway", **options: Any) -> Self:
        """A gateway for the tasks of `faulty_app`; further options go to its app alone."""
        argv = (sys.executable, "-m", "inference_tasks.cli", "gateway", "-A", APP, "--port", "0", *arguments)
        env = environment(rig.directory, rig.env(**options))
        return cls(argv, log=rig.directory / f"{name}.log", env=env, directory=rig.directory)

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""
        log = self.wait_for("Listening on ")
        found = re.search(r"Listening on (\S+)", log)
        assert found is not None
        return found[1]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30.0, trust_env=False, **options)

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.url, timeout=60.0, trust_env=False, limits=limits, **options)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            assert self.url
        except BaseException:
            self.close()
            raise
        return self


@contextmanager
def rig_of(rabbitmq: RabbitMQNode, redis: RedisNode, directory: Path, options: Mapping[str, Any]) -> Iterator[Rig]:
    """A namespace of a module's own on the shared nodes."""
    name = f"gateway-{uuid.uuid4().hex[:8]}"
    rabbitmq.create_vhost(name)
    urls = {"broker": rabbitmq.url(name), "state": redis.url()}
    servers = {section: {**options.get(section, {}), "url": url} for section, url in urls.items()}
    rig = Rig({**options, **servers, "namespace": name}, History(directory / "history"), directory, is_exact=False)
    try:
        yield rig
    finally:
        rig.close()
        rabbitmq.delete_vhost(name)
        for log in directory.glob("*.log"):
            sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-20000:]}")


def submit(
    client: httpx.Client, task: str, *args: object, headers: Mapping[str, str] | None = None, **body: object
) -> httpx.Response:
    """Submit a call over HTTP."""
    return client.post(f"/v1/tasks/{task}", json={"args": list(args), **body}, headers=dict(headers or {}))


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """The body of an answer that is a problem with this status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["type"].startswith("urn:inference-tasks:problem:")
    assert body["title"]
    assert body["detail"]
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= body["retry_after_s"] > 0
    return body
