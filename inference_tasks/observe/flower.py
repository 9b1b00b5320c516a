"""Flower, ready for the tiers: options that are safe without being told so, the tier as a column, no arguments.

Used by a configuration file of two lines (``config/flowerconfig.py``, ``CONFIG_FILE``); Flower runs it as Python.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

import click
from celery import Celery, current_app

from inference_tasks.app import inference_of
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.observe.flower_pages import HidingFailedError, hide_arguments, show_columns, show_queues

__all__ = ["CONFIG_FILE", "flower_options"]

# For Flower's option --conf.
CONFIG_FILE = Path(__file__).with_name("flowerconfig.py")

LOOPBACK = "127.0.0.1"
# Some 2 KB each.
MAX_TASKS = 10_000
# Each start of a worker has a name of its own, so those of the past would pile up.
PURGE_OFFLINE_WORKERS_S = 3600
ORDER = "name,uuid,state,tier,lane,wait,gpu,received,runtime,worker"
ORDER_WITHOUT_TIER = "name,uuid,state,received,runtime,worker"

_PREFIX = "FLOWER_"


def flower_options(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Return the options of Flower for the app that it was started with.

    An option that has a variable ``FLOWER_<OPTION>`` is left to it, and what the command line says wins over both.
    Flower listens on the loopback address; it changes nothing (``read_only``) unless it asks for a password. The queues
    in its Broker tab come from the management API of the settings, so that no password stands on a command line.
    Arguments and results of tasks are hidden, unless ``flower.show_arguments`` says otherwise.

    Raises:
        click.UsageError: it would be reachable from other machines without a password, or what it should hide cannot be
            hidden in this version of Flower.
    """
    inference = inference_of(_app())
    if not inference.settings.flower.show_arguments:
        try:
            hide_arguments()
        except HidingFailedError as exc:
            raise click.UsageError(str(exc)) from exc
    has_columns = show_columns(inference.door().lane_of)
    if not is_embedded(inference.settings.broker.url):
        show_queues(queue.name for queue in inference.topology.queues)
    options: dict[str, object] = {
        "address": LOOPBACK,
        "max_tasks": MAX_TASKS,
        "purge_offline_workers": PURGE_OFFLINE_WORKERS_S,
        "tasks_columns": ORDER if has_columns else ORDER_WITHOUT_TIER,
    }
    if not _asks_for_password():
        _check_address(_said("address") or LOOPBACK)
        options["read_only"] = True
    if api := inference.settings.management_url:
        options["broker_api"] = f"{api.rstrip('/')}/api/"
    given = {name.removeprefix(_PREFIX).lower() for name in environ if name.startswith(_PREFIX)}
    return {name: value for name, value in options.items() if name not in given}


def _app() -> Celery:
    """The app that ``celery -A`` named; it need not be the current one."""
    context = click.get_current_context(silent=True)
    app = getattr(getattr(context, "obj", None), "app", None)
    return app if isinstance(app, Celery) else current_app._get_current_object()  # type: ignore[attr-defined]


def _said(option: str) -> object:
    """What environment or command line said of an option of Flower's, None if nothing."""
    from tornado.options import options

    return getattr(options, option, None) or None


def _asks_for_password() -> bool:
    return bool(_said("basic_auth") or _said("auth"))


def _check_address(address: object) -> None:
    if address == "localhost":
        return
    try:
        if ipaddress.ip_address(str(address)).is_loopback:
            return
    except ValueError:
        pass
    raise click.UsageError(
        f"Flower would listen on {address} without a password. Set FLOWER_BASIC_AUTH=user:password, or keep to "
        f"{LOOPBACK}."
    )
