"""Which broker and which Redis are in use, wherever their addresses were set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from inference_tasks.broker.embedded_server import EmbeddedServer, is_installed
from inference_tasks.celery_settings import RESULT_BACKEND
from inference_tasks.errors import DeploymentError
from inference_tasks.settings import Settings, masked

__all__ = ["EMBEDDED", "RECORD_BACKEND", "broker_in_use", "with_broker", "with_state"]

EMBEDDED = "embedded"
STATE_URL = "redis://localhost:6379/0"
RECORD_BACKEND = "inference_tasks.app:record_backend"
_STATE_SCHEMES = ("redis", "rediss", "redis+socket", "socket", "unix", "sentinel")


def broker_in_use(settings: Settings) -> str:
    """Return the broker's address when none is configured: that of the embedded one, started if it does not run yet.

    Raises:
        DeploymentError: it is not installed, or does not start.
    """
    if not is_installed():
        raise DeploymentError(
            "No broker is configured. Either set its address: INFERENCE_BROKER__URL=amqp://user:password@host:5672/vhost,"
            " or broker.url in inference.toml. Or use the embedded broker, for development without RabbitMQ: "
            'pip install "inference-tasks[embedded]".'
        )
    server = EmbeddedServer(Path(settings.broker.directory))
    server.start()
    return server.url


def with_state(settings: Settings, result_backend: object, problems: list[str]) -> Settings:
    """Return the settings with the address of the state store: ``state.url``, else Celery's result backend, else local.

    Called after ``with_broker``: without an address of its own, the state of the embedded broker's tasks is in it too.
    What contradicts is appended to ``problems``.
    """
    found = result_backend if isinstance(result_backend, str) else ""
    # What an app was rebuilt from in a new process names our own.
    found = "" if found == RECORD_BACKEND else found.removeprefix(RESULT_BACKEND).removeprefix("+")
    if found and found.partition("://")[0] not in _STATE_SCHEMES:
        problems.append(
            f"Celery's result_backend is {masked(found)}; results are kept beside the state of the tasks, in Redis. "
            "Remove it, or set a redis:// address."
        )
    elif found and settings.state.url and found != settings.state.url:
        problems.append(
            f"state.url ({settings.origin('state.url')}) and Celery's result_backend name two different places, "
            f"{masked(settings.state.url)} and {masked(found)}. Remove one."
        )
    origin = settings.origin("state.url") if settings.state.url else "Celery's result_backend" if found else "default"
    url = settings.state.url or found or STATE_URL
    if origin == "default" and settings.origin("broker.url") == EMBEDDED:
        url, origin = EmbeddedServer(Path(settings.broker.directory)).state_url, EMBEDDED
    return replace(settings, state=replace(settings.state, url=url), origins={**settings.origins, "state.url": origin})


def with_broker(settings: Settings, celery_url: object, problems: list[str], *, is_needed: bool) -> Settings:
    """Return the settings with the broker's address: ``broker.url``, else Celery's, else ``broker_in_use``.

    What contradicts is appended to ``problems``. ``is_needed``: whether tasks go anywhere at all.
    """
    found = ";".join(celery_url) if isinstance(celery_url, list | tuple) else str(celery_url or "")
    url, origin = settings.broker.url, settings.origin("broker.url")
    if url and found and url != found:
        problems.append(
            f"broker.url ({origin}) and Celery's broker_url (or CELERY_BROKER_URL) name two different brokers, "
            f"{masked(url)} and {masked(found)}. Remove one."
        )
    if not url and found:
        url, origin = found, "Celery's broker_url"
    if not url and is_needed:
        url, origin = broker_in_use(settings), EMBEDDED
    return replace(
        settings, broker=replace(settings.broker, url=url), origins={**settings.origins, "broker.url": origin}
    )
