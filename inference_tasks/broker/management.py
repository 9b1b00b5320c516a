"""A small client of RabbitMQ's management API: versions, queues with their arguments, policies."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import cast
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from inference_routing.topology import PolicySpec
from inference_tasks.errors import DeploymentError

__all__ = ["Management", "ManagementError"]


class ManagementError(DeploymentError):
    """The management API could not be reached, or refused.

    Attributes:
        status: the HTTP status, None if there was no answer.
    """

    def __init__(self, address: str, reason: str, *, status: int | None = None) -> None:
        super().__init__(
            f"RabbitMQ's management API at {address} {reason}. Check broker.management_url, that the plugin "
            "rabbitmq_management is enabled, and the rights of the user."
        )
        self.address = address
        self.status = status


class Management:
    """Asks one virtual host's questions; every call is one HTTP request with a time-out, nothing is kept open."""

    def __init__(self, url: str, vhost: str = "/", *, timeout_s: float = 3.0) -> None:
        """Prepare a client; nothing is connected yet.

        Args:
            url: with user and password, for example ``http://guest:guest@localhost:15672``.
        """
        parts = urlsplit(url)
        user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        self.address = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
        self._authorization = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        self._vhost = quote(vhost, safe="")
        self._timeout_s = timeout_s

    def versions(self) -> dict[str, str]:
        """Return the versions of ``rabbitmq`` and ``erlang``."""
        overview = cast("dict[str, object]", self._call("GET", "overview"))
        return {
            "rabbitmq": str(overview.get("rabbitmq_version", "")),
            "erlang": str(overview.get("erlang_version", "")),
        }

    def nodes(self) -> list[dict[str, object]]:
        """Return what the API says of each node of the cluster: alarms, limits, files of configuration."""
        return cast("list[dict[str, object]]", self._call("GET", "nodes"))

    def queue(self, name: str) -> dict[str, object] | None:
        """Return what the API says of a queue, None if there is no such queue."""
        try:
            return cast("dict[str, object]", self._call("GET", f"queues/{self._vhost}/{quote(name, safe='')}"))
        except ManagementError as exc:
            if exc.status == 404:
                return None
            raise

    def arguments_by_queue(self) -> dict[str, dict[str, object]]:
        """Return {queue: the arguments it was declared with} of all queues of the virtual host, in one request."""
        path = f"queues/{self._vhost}?columns=name,arguments,type"
        queues = cast("list[dict[str, object]]", self._call("GET", path))
        found: dict[str, dict[str, object]] = {}
        for queue in queues:
            arguments = dict(cast("Mapping[str, object]", queue.get("arguments") or {}))
            if "type" in queue:
                # Where the virtual host's default made a queue quorum, the argument is missing.
                arguments.setdefault("x-queue-type", queue["type"])
            found[str(queue["name"])] = arguments
        return found

    def policies(self) -> dict[str, dict[str, object]]:
        """Return {name: policy} of the virtual host."""
        policies = cast("list[dict[str, object]]", self._call("GET", f"policies/{self._vhost}"))
        return {str(policy["name"]): policy for policy in policies}

    def put_policy(self, policy: PolicySpec) -> None:
        """Create or change a policy."""
        self._call(
            "PUT",
            f"policies/{self._vhost}/{quote(policy.name, safe='')}",
            {
                "pattern": policy.pattern,
                "definition": dict(policy.definition),
                "priority": policy.priority,
                "apply-to": policy.apply_to,
            },
        )

    def delete_policy(self, name: str) -> None:
        """Delete a policy; one that does not exist is fine."""
        try:
            self._call("DELETE", f"policies/{self._vhost}/{quote(name, safe='')}")
        except ManagementError as exc:
            if exc.status != 404:
                raise

    def _call(self, method: str, path: str, body: object = None) -> object:
        request = urllib.request.Request(
            f"{self.address}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": self._authorization, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as exc:
            with exc:
                detail = exc.read(500).decode(errors="replace")
            raise ManagementError(self.address, f"answered {exc.code} ({detail})", status=exc.code) from exc
        except (OSError, ValueError) as exc:
            raise ManagementError(self.address, f"did not answer ({exc})") from exc
        return json.loads(content) if content else None
