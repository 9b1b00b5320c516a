"""The command line: ``inference-tasks …``, and the same commands as ``celery -A … inference …``."""

from __future__ import annotations

import click

from inference_tasks.cli.group import CommandGroup
from inference_tasks.cli.invocation import app_option, remember_app

__all__ = ["COMMANDS", "celery_command", "main"]

# {command: where it is}, in the order of --help. A command's module is imported when the command is used.
COMMANDS = {
    "worker": "inference_tasks.cli.worker:worker",
    "maintenance": "inference_tasks.cli.maintenance:maintenance",
    "submit": "inference_tasks.cli.submit:submit",
    "status": "inference_tasks.cli.status:status",
    "result": "inference_tasks.cli.status:result",
    "why": "inference_tasks.cli.why:why_command",
    "cancel": "inference_tasks.cli.cancel:cancel",
    "gateway": "inference_tasks.cli.gateway:gateway",
    "flower": "inference_tasks.cli.flower:flower",
    "top": "inference_tasks.cli.top:top",
    "tiers": "inference_tasks.cli.tiers:tiers",
    "probe": "inference_tasks.cli.probe:probe_command",
    "pause": "inference_tasks.cli.pause:pause",
    "resume": "inference_tasks.cli.pause:resume",
    "drain": "inference_tasks.cli.pause:drain",
    "switches": "inference_tasks.cli.pause:switches",
    "dead": "inference_tasks.cli.dead:dead",
    "topology": "inference_tasks.cli.topology:topology",
    "settings": "inference_tasks.cli.settings:settings",
    "metrics": "inference_tasks.cli.metrics:metrics",
    "dev": "inference_tasks.cli.dev:dev",
    "demo": "inference_tasks.cli.demo:demo",
    "doctor": "inference_tasks.cli.doctor:doctor",
}

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

_EPILOG = """\
Exit codes: 0 done, 1 unexpected error or findings of doctor, 2 wrong usage, 3 task not found, 4 tier full (ask again
later), 5 broker or state store unreachable, 6 the task failed, 7 something to change in the deployment or its settings,
124 the wait timed out.

Settings come from inference.toml and INFERENCE_* variables; `inference-tasks settings show` lists them all.
"""


@click.group(
    cls=CommandGroup,
    commands_by_name=COMMANDS,
    epilog=_EPILOG,
    context_settings=_HELP,
)
@app_option
@click.version_option(package_name="inference-tasks", prog_name="inference-tasks")
@click.pass_context
def main(context: click.Context, app: str | None) -> None:
    """Serve inference tasks of three tiers from RabbitMQ queues.

    \b
    Start a worker for each GPU:   inference-tasks worker -A vision:app
    Submit a task, wait for it:    inference-tasks submit -A vision:app classify cat.png --wait
    See what the tiers are doing:  inference-tasks tiers --watch
    Find what is wrong:            inference-tasks doctor
    """
    remember_app(context, app)


@click.group("inference", cls=CommandGroup, commands_by_name=COMMANDS, epilog=_EPILOG, context_settings=_HELP)
def celery_command() -> None:
    """Serve inference tasks of three tiers (inference-tasks)."""
