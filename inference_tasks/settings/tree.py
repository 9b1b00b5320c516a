"""The settings: one frozen tree of sections, and what the parts of the package make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from inference_routing.backoff import Backoff
from inference_routing.policy import Policy
from inference_routing.tier import Tier
from inference_routing.topology import Topology, build_topology
from inference_tasks.settings.sections import (
    AgingSettings,
    BrokerSettings,
    FlowerSettings,
    GatewaySettings,
    MaintenanceSettings,
    RetrySettings,
    StateSettings,
    TiersSettings,
    WorkerSettings,
    masked,
    setting,
)

__all__ = ["SettingRow", "Settings"]

CONSUMER_TIMEOUT_MARGIN_S = 300.0
CONSUMER_TIMEOUT_SINCE = (3, 12)


@dataclass(frozen=True)
class Settings:
    """All settings. Built by ``load_settings``; every value knows where it came from."""

    namespace: str = setting(
        "inference",
        "First part of the names of exchange and queues. Two deployments on one vhost need two namespaces.",
    )
    default_tier: str = setting(
        "batch", "Tier of tasks that name none. batch, because work that nobody thought about should not outrank users."
    )
    broker: BrokerSettings = field(default=BrokerSettings())
    state: StateSettings = field(default=StateSettings())
    worker: WorkerSettings = field(default=WorkerSettings())
    retry: RetrySettings = field(default=RetrySettings())
    tiers: TiersSettings = field(default=TiersSettings())
    aging: AgingSettings = field(default=AgingSettings())
    maintenance: MaintenanceSettings = field(default=MaintenanceSettings())
    gateway: GatewaySettings = field(default=GatewaySettings())
    flower: FlowerSettings = field(default=FlowerSettings())
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.state.prefix:
            object.__setattr__(self, "state", replace(self.state, prefix=f"{self.namespace}:"))

    def origin(self, path: str) -> str:
        """Tell where the value of a setting came from: ``default``, a file, a variable or ``argument``."""
        return self.origins.get(path, "default")

    def as_rows(self) -> list[SettingRow]:
        """Return every setting with its value and origin, secrets masked, in the order of the declarations."""
        return list(_rows(self, "", self.origins))

    @property
    def management_url(self) -> str | None:
        """The address of the management API: as set, else the broker's host and user on port 15672."""
        if self.broker.management_url or not self.broker.url or not self.broker.url.startswith(("amqp", "pyamqp")):
            return self.broker.management_url
        parts = urlsplit(self.broker.url.partition(";")[0])
        user = parts.netloc.rpartition("@")[0] or "guest:guest"
        host = parts.hostname or "localhost"
        host = f"[{host}]" if ":" in host else host
        # The TLS port of the management plugin is 15671 by convention.
        scheme, port = ("https", 15671) if parts.scheme == "amqps" else ("http", 15672)
        return f"{scheme}://{user}@{host}:{port}"

    def bounds(self) -> dict[str, int]:
        """Return {tier: how many fresh tasks may wait}."""
        return {name: one.bound for name, one in self.tiers.items()}

    def backoff(self) -> Backoff:
        """Return the delays between the tries of a task that names none of its own."""
        return Backoff(base_s=self.retry.base_s, factor=self.retry.factor, cap_s=self.retry.cap_s)

    def policy(self) -> Policy:
        """Return what the worker's picker needs to know of the tiers."""
        return Policy(
            tiers=tuple(
                Tier(
                    name=name,
                    weight=one.weight,
                    floor=one.floor,
                    bound=one.bound,
                    overflow=one.overflow,
                    ages_after_s=one.ages_after_s,
                )
                for name, one in self.tiers.items()
            ),
            share=self.worker.share,
        )

    def topology(self, rabbitmq_version: tuple[int, ...] | None = None) -> Topology:
        """Return the exchange, queues and bindings as data.

        Args:
            rabbitmq_version: of the broker, for example ``(3, 13, 7)``. From 3.12 queues carry their consumer timeout;
                unknown (None) or older, they do not, because an argument the broker does not know makes them differ.
        """
        timeout_ms = None
        if rabbitmq_version is not None and rabbitmq_version >= CONSUMER_TIMEOUT_SINCE:
            timeout_ms = int((self.worker.longest_run_s + CONSUMER_TIMEOUT_MARGIN_S) * 1000)
        return build_topology(
            self.policy(),
            self.namespace,
            queue_type={name: one.queue_type or self.broker.queue_type for name, one in self.tiers.items()},
            bounds=self.broker.bounds,
            consumer_timeout_ms=timeout_ms,
        )


class SettingRow(NamedTuple):
    """One line of ``inference-tasks settings show``: dotted path, value (secrets masked), where it came from."""

    path: str
    value: object
    origin: str


def _rows(node: Any, prefix: str, origins: Mapping[str, str]) -> Iterator[SettingRow]:
    for one in fields(node):
        path, value = f"{prefix}{one.name}", getattr(node, one.name)
        if path == "origins":
            continue
        if is_dataclass(value):
            yield from _rows(value, f"{path}.", origins)
        else:
            shown = masked(value) if one.metadata["secret"] else value
            yield SettingRow(path, shown, origins.get(path, "default"))
