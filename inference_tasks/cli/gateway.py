"""``inference-tasks gateway``: tasks over HTTP."""

from __future__ import annotations

import importlib.util
import logging
import resource
from pathlib import Path

import click
from rich.text import Text

from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.errors import DeploymentError
from inference_tasks.worker.supervisor import die_with

__all__ = ["gateway"]

DESCRIPTORS_WANTED = 65536


@click.group(invoke_without_command=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen. Other machines need --keys.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--keys",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of API keys; `inference-tasks gateway key new` makes one.  [gateway.keys]",
)
@click.option("--supervised-by", type=int, hidden=True)
@command_options
def gateway(invocation: Invocation, *, host: str, port: int, keys: Path | None, supervised_by: int | None) -> None:
    """Serve tasks over HTTP: submit, wait, look up, follow.

    Without keys it answers this machine alone, and refuses to listen elsewhere. The OpenAPI document is at
    /openapi.json.

    \b
    inference-tasks gateway -A vision:app
    curl -H 'Content-Type: application/json' -H 'Prefer: wait=2' \\
         -d '{"args": ["cat.png"]}' http://127.0.0.1:8000/v1/tasks/classify
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    _needs("fastapi", "prometheus_client", "uvicorn")
    if supervised_by is not None:
        die_with(supervised_by)
    from inference_tasks.gateway.access import is_loopback
    from inference_tasks.gateway.app import gateway_for
    from inference_tasks.gateway.server import serve

    inference = invocation.needs_app()
    keys = keys or (Path(named) if (named := inference.settings.gateway.keys) else None)
    if keys is None and not is_loopback(host):
        raise click.UsageError(
            f"Without API keys the gateway listens on this machine only, not on {host}. Make a key with "
            "`inference-tasks gateway key new --tenant NAME`, put its entry into a file, and name that with --keys "
            "or gateway.keys."
        )
    _raise_descriptor_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    made = gateway_for(inference.celery_app, keys=keys)
    # Before anybody comes: what is wrong with the settings or the tasks is told here, not to the first client.
    made.inference.client  # noqa: B018
    serve(made, host, port, tell=invocation.screen.tell)


@gateway.group("key")
def key() -> None:
    """Make API keys."""


@key.command("new")
@click.option("--tenant", required=True, help="Whose key it is; tenants do not see each other's tasks.")
@command_options
def new(invocation: Invocation, *, tenant: str) -> None:
    """Make a key, and print it this once, with the entry for the file of keys.

    The key goes to whoever will use it. The entry holds its hash alone; tiers, rate_per_s, in_flight_max and
    may_name_tenants can be added to it. To change a key, add the new one, and remove the old one once nobody uses it.
    """
    _needs("pydantic_core")
    from inference_tasks.gateway.keys import entry_of, new_key

    secret, made = new_key(tenant)
    answer = {"key": secret, "entry": {"id": made.id, "tenant": made.tenant, "sha256": made.sha256}}
    invocation.screen.show(answer, lambda: Text(f"key: {secret}\n\n{entry_of(made)}"))


def _needs(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise DeploymentError(
            f'The gateway needs {", ".join(missing)}; pip install "inference-tasks[gateway]" adds what is missing.'
        )


def _raise_descriptor_limit() -> None:
    """Every client that waits is an open socket, and many systems allow for 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
