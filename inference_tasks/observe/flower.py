"""Flower, ready for the tiers: options that are safe without being told so, and the tier of each task as a column.

Used by a configuration file of two lines (``config/flowerconfig.py``, ``CONFIG_FILE``); Flower runs it as Python.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from celery import Celery, current_app

from inference_tasks.app import inference_of

__all__ = ["CONFIG_FILE", "flower_options", "show_tiers"]

log = logging.getLogger(__name__)

# For Flower's option --conf.
CONFIG_FILE = Path(__file__).with_name("flowerconfig.py")

LOOPBACK = "127.0.0.1"
# Some 2 KB each.
MAX_TASKS = 10_000
# Each start of a worker has a name of its own, so those of the past would pile up.
PURGE_OFFLINE_WORKERS_S = 3600
COLUMNS = "name,uuid,state,tier,received,runtime,worker"
COLUMNS_WITHOUT_TIER = "name,uuid,state,received,runtime,worker"

_PREFIX = "FLOWER_"

LaneOf = Callable[[str], tuple[str, str] | None]


def flower_options(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Return the options of Flower for the app that it was started with.

    An option that has a variable ``FLOWER_<OPTION>`` is left to it, and what the command line says wins over both.
    Flower listens on the loopback address; it changes nothing (``read_only``) unless it asks for a password. The queues
    in its Broker tab come from the management API of the settings, so that no password stands on a command line.

    Raises:
        click.UsageError: it would be reachable from other machines without a password; whoever sees it could stop
            workers and read arguments and results.
    """
    inference = inference_of(_app())
    has_columns = show_tiers(inference.door().lane_of)
    options: dict[str, object] = {
        "address": LOOPBACK,
        "max_tasks": MAX_TASKS,
        "purge_offline_workers": PURGE_OFFLINE_WORKERS_S,
        "tasks_columns": COLUMNS if has_columns else COLUMNS_WITHOUT_TIER,
    }
    if not _asks_for_password():
        _check_address(_said("address") or LOOPBACK)
        options["read_only"] = True
    if api := inference.settings.management_url:
        options["broker_api"] = f"{api.rstrip('/')}/api/"
    given = {name.removeprefix(_PREFIX).lower() for name in environ if name.startswith(_PREFIX)}
    return {name: value for name, value in options.items() if name not in given}


def show_tiers(lane_of: LaneOf) -> bool:
    """Teach Flower the fields ``tier`` and ``lane`` of a task; false if this version keeps its columns elsewhere.

    A task has the tier that its events name: of the submit, then of the queue that it was started from. Where Celery's
    own event of a publish names none, the routing key tells.
    """
    try:
        from celery.events.state import Task
        from flower.views.tasks import TASK_COLUMNS

        # Not Flower's own door (format_task): it is given a copy made of the known fields only, and neither sorting nor
        # the API goes through it.
        for index, (name, label) in enumerate((("tier", "Tier"), ("lane", "Lane"))):
            setattr(Task, name, property(_field(name, index, lane_of)))
            if name not in Task._fields:  # type: ignore[attr-defined]  # its stub leaves it out
                Task._fields += (name,)  # type: ignore[attr-defined]
            TASK_COLUMNS[name] = label
    except Exception as exc:
        log.warning("This version of Flower keeps its columns elsewhere; there is no column for the tier: %r", exc)
        return False
    return True


def _field(name: str, index: int, lane_of: LaneOf) -> Callable[[Any], object]:
    def read(task: Any) -> object:
        told = vars(task).get(name)
        if told is None and task.routing_key:
            lane = lane_of(task.routing_key)
            return lane and lane[index]
        return told

    return read


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
