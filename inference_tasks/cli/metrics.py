"""``inference-tasks metrics``: what Prometheus and Grafana are given, where there is no checkout."""

from __future__ import annotations

import click

from inference_tasks.observe.dashboard import dashboard_document
from inference_tasks.observe.reference import reference_document
from inference_tasks.observe.rules import rules_document

__all__ = ["metrics"]


@click.group()
def metrics() -> None:
    """Print rules, dashboard and reference of the metrics.

    \b
    inference-tasks metrics rules > rules.yml              rule_files of Prometheus
    inference-tasks metrics dashboard > inference.json     to import into Grafana
    inference-tasks metrics reference                      every metric, alert and event
    """


@metrics.command()
def rules() -> None:
    """Print recording and alert rules for Prometheus."""
    click.echo(rules_document(), nl=False)


@metrics.command()
def dashboard() -> None:
    """Print a dashboard for Grafana."""
    click.echo(dashboard_document(), nl=False)


@metrics.command()
def reference() -> None:
    """Print the page of all metrics, alerts and events."""
    click.echo(reference_document(), nl=False)
