"""The app: Celery with tiers as a class of its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from celery import Celery
from celery.app.defaults import SETTING_KEYS

from inference_tasks.app import OVERRIDES_KEY, adopt
from inference_tasks.errors import UnknownOptionError
from inference_tasks.handles import TaskHandle
from inference_tasks.settings import Settings
from inference_tasks.state.records import TaskRecord

__all__ = ["InferenceApp"]

_SECTIONS = (
    "broker",
    "state",
    "worker",
    "retry",
    "tiers",
    "aging",
    "maintenance",
    "gateway",
    "default_tier",
    "namespace",
)
_CELERY_PARAMETERS = tuple(
    name
    for name, parameter in inspect.signature(Celery.__init__).parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name not in ("self", *_SECTIONS)
)


class InferenceApp(Celery):
    """A Celery app with tiers: everything of Celery, and ``inference``, ``model``, ``status``, ``result``, ``cancel``.

    Settings are read at first use, never at import.
    """

    def __init__(
        self,
        main: str | None = None,
        *,
        broker: str | Mapping[str, object] | None = None,
        state: str | Mapping[str, object] | None = None,
        worker: Mapping[str, object] | None = None,
        retry: Mapping[str, object] | None = None,
        tiers: Mapping[str, Mapping[str, object]] | None = None,
        aging: Mapping[str, object] | None = None,
        maintenance: Mapping[str, object] | None = None,
        gateway: Mapping[str, object] | None = None,
        default_tier: str | None = None,
        namespace: str | None = None,
        config_namespace: str | None = None,
        **celery_options: object,
    ) -> None:
        """Make the app; nothing is read or connected yet.

        Args:
            main: name of the app, and of the module that runs as ``__main__``.
            broker: the settings of section ``broker``, or its URL alone.
            state: the settings of section ``state``, or its URL alone.
            worker: the settings of section ``worker``.
            retry: the settings of section ``retry``.
            tiers: {tier: its settings}.
            aging: the settings of section ``aging``.
            maintenance: the settings of section ``maintenance``.
            gateway: the settings of section ``gateway``.
            default_tier: tier of tasks that name none.
            namespace: first part of the names of exchange and queues.
            config_namespace: what Celery calls ``namespace``: the prefix of the keys of its configuration source.
            celery_options: other options of ``Celery(...)``, and keys of its configuration.

        Raises:
            UnknownOptionError: an option that neither knows, with the nearest one that exists.
        """
        for option in celery_options:
            if option not in _CELERY_PARAMETERS and option not in SETTING_KEYS:
                known = (*_SECTIONS, "config_namespace", *_CELERY_PARAMETERS, *SETTING_KEYS)
                raise UnknownOptionError(option, known, where="InferenceApp()")
        sections: dict[str, object] = {
            "broker": {"url": broker} if isinstance(broker, str) else broker,
            "state": {"url": state} if isinstance(state, str) else state,
            "worker": worker,
            "retry": retry,
            "tiers": tiers,
            "aging": aging,
            "maintenance": maintenance,
            "gateway": gateway,
            "default_tier": default_tier,
            "namespace": namespace,
        }
        given = {name: value for name, value in sections.items() if value is not None}
        options = cast("dict[str, Any]", celery_options)
        if given:
            options["changes"] = {**(options.get("changes") or {}), OVERRIDES_KEY: tuple(given.items())}
        super().__init__(main, namespace=config_namespace, **options)
        self._inference = adopt(self)
        self.inference = self._inference.inference
        self.model = self._inference.model

    def __reduce_keys__(self) -> dict[str, Any]:
        """Return the constructor's arguments that rebuild this app in another process."""
        keys = super().__reduce_keys__()
        keys["config_namespace"] = keys.pop("namespace", None)
        return keys

    @property
    def settings(self) -> Settings:
        """The settings in use."""
        return self._inference.settings

    def handle(self, task_id: str) -> TaskHandle[object]:
        """Return a handle on a task by its id; nothing is looked up yet."""
        return self._inference.handle(task_id)

    def status(self, task_id: str) -> TaskRecord:
        """Look a task up by its id; see ``TaskHandle.status``."""
        return self._inference.status(task_id)

    def result(self, task_id: str, *, timeout_s: float | None = None) -> object:
        """Wait for a task's result by its id; see ``TaskHandle.result``."""
        return self._inference.result(task_id, timeout_s=timeout_s)

    def cancel(self, task_id: str, *, terminate: bool = False) -> bool:
        """Cancel a task by its id, whoever holds it; see ``TaskHandle.cancel``."""
        return self._inference.cancel(task_id, terminate=terminate)
