"""``inference-tasks flower``: Flower for an app, with the tiers in it and the right address of the management API."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import cast
from urllib.parse import urlsplit, urlunsplit

import click

from inference_tasks.app import Inference
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.broker.management import Management, ManagementError
from inference_tasks.cli.diagnosis.broker import vhost_of
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.errors import DeploymentError
from inference_tasks.observe.flower import CONFIG_FILE
from inference_tasks.settings import masked
from inference_tasks.worker.supervisor import die_with

__all__ = ["broker_api", "flower"]

_VARIABLE = "FLOWER_BROKER_API"


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--port", type=click.IntRange(0, 65535), default=5555, show_default=True, help="0 takes a free one.")
@click.option(
    "--address",
    default=None,
    help="Where to listen; 127.0.0.1 unless said. Others need FLOWER_BASIC_AUTH=user:password.",
)
@click.option(
    "--no-broker-tab", is_flag=True, help="Start although the management API of RabbitMQ cannot be asked for queues."
)
@click.option("--supervised-by", type=int, hidden=True)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@command_options
def flower(
    invocation: Invocation,
    *,
    port: int,
    address: str | None,
    no_broker_tab: bool,
    supervised_by: int | None,
    options: tuple[str, ...],
) -> None:
    """Start Flower for an app: tiers, waits and GPUs as columns, all queues in the Broker tab, arguments hidden.

    Flower's own options can follow, and its FLOWER_* variables hold: FLOWER_BASIC_AUTH=user:password has it ask for a
    password. Without one it changes nothing and listens on this machine only. /metrics and /healthcheck never ask.

    \b
    inference-tasks flower -A vision:app
    FLOWER_BASIC_AUTH=me:secret inference-tasks flower -A vision:app --address 0.0.0.0 --url_prefix=flower
    """
    if supervised_by is not None:
        die_with(supervised_by)
    inference = invocation.needs_app()
    if importlib.util.find_spec("flower") is None:
        raise DeploymentError('Flower is not installed; pip install "inference-tasks[flower]" adds it.')
    if not is_embedded(cast(str, inference.settings.broker.url)) and not no_broker_tab:
        _check(inference, broker_api(inference, options, os.environ))
    _start(inference, [f"--port={port}", *([f"--address={address}"] if address else []), *options])


def broker_api(inference: Inference, options: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the address of the management API that Flower will use, with the user that it will use."""
    said = [value for name, _, value in (one.partition("=") for one in options) if _is_broker_api(name)]
    url = next(reversed(said), None) or environ.get(_VARIABLE) or inference.settings.management_url
    if url is None:
        return None
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/api")
    user, at, _ = urlsplit(cast(str, inference.settings.broker.url).partition(";")[0]).netloc.rpartition("@")
    host = parts.netloc if "@" in parts.netloc or not at else f"{user}@{parts.netloc}"
    return urlunsplit((parts.scheme, host, path, "", ""))


def _is_broker_api(name: str) -> bool:
    return name.lstrip("-").replace("-", "_") == "broker_api"


def _check(inference: Inference, url: str | None) -> None:
    """Ask the management API what Flower will ask it, since Flower shows an empty tab and says no more than a log line.

    Raises:
        DeploymentError: It does not answer so that the Broker tab could show the queues.
    """
    remedy = "or say --no-broker-tab to start without the queues."
    if url is None:
        raise DeploymentError(
            f"The address of RabbitMQ's management API is unknown. Set broker.management_url, {remedy}"
        )
    vhost = vhost_of(cast(str, inference.settings.broker.url))
    try:
        Management(url, vhost).arguments_by_queue()
    except ManagementError as exc:
        raise DeploymentError(
            f"Flower's Broker tab would be empty: {exc} Now it is {masked(url)}, for the vhost {vhost!r}; correct it, "
            f"{remedy}"
        ) from exc


def _start(inference: Inference, options: Sequence[str]) -> None:
    from celery.bin.base import CLIContext
    from celery.bin.celery import celery
    from flower.command import flower as program

    app = inference.celery_app
    app.set_current()
    if not any(one.lstrip("-").startswith("conf=") for one in options):
        options = [f"--conf={CONFIG_FILE}", *options]
    # As `celery -A app flower` would: Flower reads the options of the command above it, and the app from its context.
    above = click.Context(celery, info_name="celery", obj=CLIContext(app=app, no_color=True, workdir=None))
    with above, program.make_context("flower", list(options), parent=above) as context:
        try:
            program.invoke(context)
        except OSError as exc:
            raise DeploymentError(f"Flower cannot listen there: {exc}. Choose another --port or --address.") from exc
