"""What the gateway counts, for Prometheus. Labels are bounded: routes, methods, statuses, tiers, reasons; never ids."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from inference_tasks.gateway.problems import ProblemError

__all__ = ["METRICS_TYPE", "Metrics"]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counts in a registry of their own, so that an app the gateway is mounted in keeps its own."""

    def __init__(
        self, *, waiting: Callable[[], int], is_subscribed: Callable[[], bool], gaps: Callable[[], int]
    ) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "inference_gateway_requests",
            "Requests answered.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "inference_gateway_request_seconds",
            "Seconds until the answer began, the wait for a result included.",
            ("route", "method"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._submitted = Counter("inference_gateway_submitted", "Tasks accepted.", ("tier",), registry=self._registry)
        self._refused = Counter(
            "inference_gateway_refused",
            "Tasks not accepted, by the last part of the problem's type and its reason.",
            ("tier", "problem", "reason"),
            registry=self._registry,
        )
        for name, text, value in (
            ("waiting_clients", "Clients that wait for a task, or follow its events.", waiting),
            ("subscription_up", "1 while Redis tells this process of the ends of tasks.", is_subscribed),
            ("subscription_losses", "How often the connection for that was lost.", gaps),
        ):
            gauge = Gauge(f"inference_gateway_{name}", text, registry=self._registry)
            gauge.set_function(lambda value=value: float(value()))  # type: ignore[misc]

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route, method).observe(seconds)

    def submitted(self, tier: str, count: int = 1) -> None:
        """Count accepted tasks."""
        self._submitted.labels(tier).inc(count)

    def refused(self, tier: str, problem: ProblemError) -> None:
        """Count a task that was not accepted."""
        has_reason = problem.status == 429 or problem.name == "tier-paused"
        reason = str(problem.extensions.get("reason", "")) if has_reason else ""
        self._refused.labels(tier, problem.name, reason).inc()

    def text(self) -> bytes:
        """Return all of it in the text format."""
        return bytes(generate_latest(self._registry))
