"""``inference-tasks topology``: the exchange and queues as they should be, and as they are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import cast

import click
from rich.table import Table

from inference_routing.topology import Topology
from inference_tasks.app import Inference
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.broker.topology import TopologyReport, broker_version
from inference_tasks.broker.topology import check as compare
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.errors import DeploymentError, TopologyMismatchError

__all__ = ["topology"]


@click.group()
def topology() -> None:
    """Show, check and change the exchange and queues."""


@topology.command()
@command_options
def show(invocation: Invocation) -> None:
    """Show the exchange and queues that the settings ask for; no broker is asked."""
    wanted = invocation.inference.topology

    def table() -> Table:
        view = Table(title=f"exchange {wanted.exchange.name} ({wanted.exchange.type})", box=None, title_justify="left")
        for heading in ("queue", "tier", "lane", "arguments"):
            view.add_column(heading, overflow="fold")
        for queue in wanted.queues:
            arguments = ", ".join(f"{name}={value}" for name, value in queue.arguments.items())
            view.add_row(queue.name, queue.tier or "-", queue.lane, arguments)
        view.caption = f"and {len(wanted.delay.queues)} delay queues {wanted.delay_prefix}…"
        view.caption_justify = "left"
        return view

    invocation.screen.show(_as_data(wanted), table)


@topology.command()
@command_options
def check(invocation: Invocation) -> None:
    """Compare the broker with the settings; exit code 7 if they differ."""
    inference = invocation.inference
    broker = inference.settings.broker
    url = cast(str, broker.url)
    _refuse_embedded(url)
    wanted = wanted_topology(inference)
    report = compare(
        wanted,
        url,
        management_url=inference.settings.management_url,
        connect_timeout_s=broker.connect_timeout_s,
    )
    lines = list(_missing(report, wanted))
    lines += [
        f"queue {one.queue}: {one.argument} is {one.found!r}, not {one.wanted!r} (changed by a {one.by})"
        for one in report.differences
    ]
    answer = {
        "is_as_wanted": report.is_as_wanted,
        "missing": list(report.missing),
        "differences": [
            {"queue": one.queue, "argument": one.argument, "wanted": one.wanted, "found": one.found, "by": one.by}
            for one in report.differences
        ],
    }
    if report.is_as_wanted or invocation.screen.as_json:
        invocation.screen.show(answer, lambda: "The broker is as the settings ask for.")
    if not report.is_as_wanted:
        raise TopologyMismatchError(lines)


@topology.command()
@command_options
def apply(invocation: Invocation) -> None:
    """Change the broker to what the settings ask for, without losing a message. It can be stopped and run again."""
    try:
        module = importlib.import_module("inference_tasks.broker.apply")
    except ModuleNotFoundError as error:
        raise DeploymentError(
            "This version cannot change existing queues yet. `inference-tasks topology check` says what differs; "
            "workers and clients use the queues as they are."
        ) from error
    inference = invocation.inference
    _refuse_embedded(cast(str, inference.settings.broker.url))
    changes: list[str] = []
    for change in module.apply_topology(
        wanted_topology(inference),
        cast(str, inference.settings.broker.url),
        management_url=inference.settings.management_url,
        connect_timeout_s=inference.settings.broker.connect_timeout_s,
    ):
        changes.append(str(change))
        if not invocation.screen.as_json:
            click.echo(change)
    if invocation.screen.as_json or not changes:
        invocation.screen.show(changes, lambda: "Nothing to change.")


def _missing(report: TopologyReport, wanted: Topology) -> Iterator[str]:
    of_delays = {one.name for one in wanted.delay.exchanges} | {one.name for one in wanted.delay.queues}
    delays = [name for name in report.missing if name.partition(" ")[2] in of_delays]
    yield from (f"{name} is missing" for name in report.missing if name not in delays)
    if delays:
        yield f"{len(delays)} exchanges and queues for delays are missing"
    if report.missing:
        yield "what is missing is declared by the first worker or submit"


def _refuse_embedded(url: str) -> None:
    if is_embedded(url):
        raise DeploymentError(
            "The embedded broker has no queues with arguments to check or change; its bounds are those of the "
            "settings. To look at RabbitMQ, set broker.url."
        )


def wanted_topology(inference: Inference) -> Topology:
    """Return the topology for the version of the broker that is there."""
    broker = inference.settings.broker
    version = broker_version(cast(str, broker.url), connect_timeout_s=broker.connect_timeout_s)
    return inference.settings.topology(version)


def _as_data(wanted: Topology) -> dict[str, object]:
    return {
        "exchange": {"name": wanted.exchange.name, "type": wanted.exchange.type},
        "queues": [
            {"name": queue.name, "tier": queue.tier, "lane": queue.lane, "arguments": dict(queue.arguments)}
            for queue in (*wanted.queues, *wanted.delay.queues)
        ],
        "bindings": [
            {"source": one.source, "destination": one.destination, "routing_key": one.routing_key}
            for one in (*wanted.bindings, *wanted.delay.bindings)
        ],
        "policies": [
            {"name": one.name, "pattern": one.pattern, "definition": dict(one.definition)} for one in wanted.policies
        ],
    }
