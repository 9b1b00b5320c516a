"""What every command is given: the app it works on, and how to show its answer."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
from celery import Celery
from celery.app.utils import find_app

from inference_tasks.app import Inference, inference_of
from inference_tasks.cli.screen import Screen
from inference_tasks.errors import DeploymentError
from inference_tasks.inference_app import InferenceApp

__all__ = ["Invocation", "app_option", "command_options", "remember_app"]

P = ParamSpec("P")
R = TypeVar("R")

_APP_KEY = "inference_tasks.app"

app_option = click.option(
    "-A",
    "--app",
    metavar="MODULE[:ATTR]",
    help="The app, such as vision:app. Also INFERENCE_APP. Needed for worker and submit; without it, the other "
    "commands work by the settings alone.",
)


@dataclass(frozen=True)
class Invocation:
    """One call of one command.

    Attributes:
        app_name: what ``-A`` named, None if nothing did.
        screen: where answers and messages go.
        celery_app: the app that Celery's own command line has loaded, None outside of it.
    """

    app_name: str | None
    screen: Screen
    celery_app: Celery | None = None

    @property
    def has_app(self) -> bool:
        """Whether there is an app of the user's."""
        return self.app_name is not None or self.celery_app is not None

    @functools.cached_property
    def inference(self) -> Inference:
        """The user's app, imported now; or one made of the settings alone.

        Raises:
            click.UsageError: there is no such module or app.
            DeploymentError: the module failed while it was imported.
        """
        if self.celery_app is not None:
            return inference_of(self.celery_app)
        if self.app_name is None:
            return inference_of(InferenceApp("inference-tasks", set_as_current=False))
        return inference_of(load_app(self.app_name))

    def needs_app(self) -> Inference:
        """Return the user's app.

        Raises:
            click.UsageError: none was named.
        """
        if not self.has_app:
            raise click.UsageError("Which app? Name it with -A, such as -A vision:app, or in INFERENCE_APP.")
        return self.inference


def load_app(name: str) -> Celery:
    """Import ``module``, ``module:attribute`` or ``package.module.attribute`` and return its Celery app."""
    # A console script has its own folder on the path, not the one it is called in.
    if os.getcwd() not in sys.path:  # noqa: PTH109 -- as it stands in sys.path
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    module, _, attribute = name.partition(":")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Its own absence, not that of something it imports; a.b may still be attribute b of module a.
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise _import_failed(module, error) from error
        if attribute or "." not in module:
            raise _no_app(name, f"there is no module {error.name!r} in {os.getcwd()} or on the path") from error  # noqa: PTH109
    except Exception as error:
        raise _import_failed(module, error) from error
    try:
        found = find_app(name)
    except (AttributeError, ImportError) as error:
        raise _no_app(name, str(error) or "there is no app in it") from error
    if not isinstance(found, Celery):
        raise _no_app(name, f"it is {type(found).__name__}, not an app")
    return found


def remember_app(context: click.Context, name: str | None) -> None:
    """Keep what ``-A`` before the command said, for the command."""
    if name is not None:
        context.meta[_APP_KEY] = name


def command_options(function: Callable[Concatenate[Invocation, P], R]) -> Callable[..., R]:
    """Give a command the options that all have, and its ``Invocation`` as the first argument."""

    @app_option
    @click.option("--json", "as_json", is_flag=True, help="Answer in JSON; messages go to standard error as always.")
    @click.option("--no-color", is_flag=True, help="No colours; as with the variable NO_COLOR.")
    @functools.wraps(function)
    def command(*args: Any, app: str | None, as_json: bool, no_color: bool, **kwargs: Any) -> R:
        context = click.get_current_context()
        if no_color or os.environ.get("NO_COLOR"):
            # click reads it wherever it prints: here, and where the groups above tell an error.
            above: click.Context | None = context
            while above is not None:
                above.color, above = False, above.parent
        celery_app = getattr(context.obj, "app", None)
        name = app or context.meta.get(_APP_KEY)
        if name is None and not isinstance(celery_app, Celery):
            name = os.environ.get("INFERENCE_APP") or None
        screen = Screen(as_json=as_json, has_color=context.color is not False)
        invocation = Invocation(name, screen, celery_app if isinstance(celery_app, Celery) and name is None else None)
        return function(invocation, *args, **kwargs)

    return command


def _no_app(name: str, why: str) -> click.UsageError:
    return click.UsageError(f"-A {name}: {why}. Expected MODULE or MODULE:ATTRIBUTE, such as vision:app.")


def _import_failed(module: str, error: Exception) -> DeploymentError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return DeploymentError(f"The module {module} failed while it was imported: {type(error).__name__}: {error}{where}")
