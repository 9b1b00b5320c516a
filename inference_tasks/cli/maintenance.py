"""``inference-tasks maintenance``: the worker for aging and accounting, and its beat."""

from __future__ import annotations

import os
from typing import cast

import click

from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.metrics_port import metrics_port_option
from inference_tasks.cli.worker import node_name
from inference_tasks.errors import DeploymentError
from inference_tasks.maintenance.program import run
from inference_tasks.observe.exporter import FleetExporter
from inference_tasks.observe.exposition import Address
from inference_tasks.worker.gpu import environment_for
from inference_tasks.worker.supervisor import die_with

__all__ = ["maintenance"]


@click.command()
@click.option("--no-beat", is_flag=True, help="Do not send the schedule: another process, such as celery beat, does.")
@metrics_port_option("Serve the metrics of the whole deployment for Prometheus there, and /healthz.")
@click.option(
    "-l",
    "--loglevel",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], case_sensitive=False),
    help="How much to log.",
)
@click.option("--supervised-by", type=int, hidden=True)
@command_options
def maintenance(
    invocation: Invocation, *, no_beat: bool, metrics_port: Address | None, loglevel: str, supervised_by: int | None
) -> None:
    """Move aged tasks up, record dropped ones, list dead letters, find lost messages.

    One for a deployment; a second one, on another machine, takes over if the first is gone and does no harm meanwhile.
    It needs no GPU and runs no task of a tier. SIGTERM or Ctrl-C ends it in order, exit code 0.

    \b
    inference-tasks maintenance -A vision:app
    inference-tasks maintenance -A vision:app --metrics-port 9107
    inference-tasks maintenance -A vision:app --no-beat     with celery -A vision beat beside it
    """
    if supervised_by is not None:
        die_with(supervised_by)
    # Before the app is imported: its module may look for a GPU, which belongs to the workers.
    os.environ.update(environment_for(None))
    inference = invocation.needs_app()
    if is_embedded(cast(str, inference.settings.broker.url)):
        raise DeploymentError(
            "Aging, and accounting for dropped tasks, need RabbitMQ; with the embedded broker, which this app uses, "
            "tasks wait in their tier. Set broker.url."
        )
    app = inference.celery_app
    app.loader.import_default_modules()
    app.finalize()
    exporter = None if metrics_port is None else FleetExporter(inference, metrics_port)
    if exporter is not None:
        exporter.start()
        invocation.screen.tell(f"Metrics on http://{exporter.server.address}/metrics")
    try:
        exit_code = run(inference, node_name("maintenance"), loglevel=loglevel, has_beat=not no_beat)
    finally:
        if exporter is not None:
            exporter.stop()
    click.get_current_context().exit(exit_code)
