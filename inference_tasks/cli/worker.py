"""``inference-tasks worker``: one worker for each GPU."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import cast

import click

from inference_tasks.app import Inference
from inference_tasks.broker.consumer_timeout import DEFAULT_S, LongTask, configuration_line, long_tasks, node_timeout
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.broker.management import Management, ManagementError
from inference_tasks.broker.topology import broker_version
from inference_tasks.cli.exit import DEPLOYMENT, USAGE
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.metrics_port import metrics_port_option
from inference_tasks.errors import BrokerUnavailableError, DeploymentError, SettingsError
from inference_tasks.observe.exporter import WorkerExporter
from inference_tasks.observe.exposition import Address
from inference_tasks.settings.tree import CONSUMER_TIMEOUT_SINCE
from inference_tasks.worker.gpu import VISIBLE, Gpu, Gpus, choose, discover, environment_for, has_initialised_cuda
from inference_tasks.worker.heartbeat import own_version
from inference_tasks.worker.pool_options import PoolRequest, check_pool, refuse_pool
from inference_tasks.worker.supervisor import ChildPlan, Supervisor, die_with

__all__ = ["node_name", "worker"]


@click.command()
@click.option(
    "--gpu",
    default="all",
    show_default=True,
    metavar="0|0,1|all|none",
    help="Which GPUs, by index or UUID: one worker process for each, supervised if there are several. Without a GPU "
    "the worker says so and runs on the CPU.",
)
@click.option("--slots", type=click.IntRange(min=1), help="Tasks at a time for each GPU.  [worker.slots]")
@click.option("--reserve", type=click.IntRange(min=0), help="Slots that only realtime may use.  [worker.reserve]")
@click.option("--tiers", metavar="all|LIST", help="Which tiers, such as realtime,batch.  [worker.tiers]")
@click.option("--pool", metavar="prefork|threads|solo", help="How tasks run.  [worker.pool]")
@click.option("--share", type=click.Choice(["time", "count"]), help="What the weights divide.  [worker.share]")
@click.option("--hold-s", type=float, help="Longest wait of a message inside the worker.  [worker.hold_s]")
@metrics_port_option(
    "Serve metrics for Prometheus there. With several GPUs the first worker takes this port, each further one the next."
)
@click.option("--name", help="First part of the node name; gpu0 and the like by default.")
@click.option(
    "-l",
    "--loglevel",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], case_sensitive=False),
    help="How much to log.",
)
@click.option(
    "--max-tasks-per-child", type=click.IntRange(min=1), help="Replace a process after so many tasks; prefork only."
)
@click.option(
    "--max-memory-per-child", type=click.IntRange(min=1), metavar="KIB", help="Replace a larger one; prefork only."
)
@click.option(
    "--kill-after-s",
    type=click.FloatRange(min=0),
    help="End running tasks so long after SIGTERM. By default they take as long as they take.",
)
@click.option("--autoscale", hidden=True)
@click.option("--supervised-by", type=int, hidden=True)
@command_options
def worker(
    invocation: Invocation,
    *,
    gpu: str,
    slots: int | None,
    reserve: int | None,
    tiers: str | None,
    pool: str | None,
    share: str | None,
    hold_s: float | None,
    metrics_port: Address | None,
    name: str | None,
    loglevel: str,
    max_tasks_per_child: int | None,
    max_memory_per_child: int | None,
    kill_after_s: float | None,
    autoscale: str | None,
    supervised_by: int | None,
) -> None:
    """Start a worker on each GPU.

    What is not said here comes from the settings named in brackets. SIGTERM or Ctrl-C drains: nothing new is taken,
    what is running ends, exit code 0.

    \b
    inference-tasks worker -A vision:app                              every GPU, one slot each
    inference-tasks worker -A vision:app --gpu 0 --slots 2 --reserve 1
    inference-tasks worker -A vision:app --gpu none --pool threads --slots 8
    """
    if not invocation.has_app:
        invocation.needs_app()
    if pool is not None:
        refuse_pool(pool)
    gpus = discover(os.environ)
    chosen = choose(gpu, gpus, restricted=VISIBLE in os.environ)
    if len(chosen) > 1 or (kill_after_s is not None and supervised_by is None):
        click.get_current_context().exit(_supervise(chosen, name, kill_after_s, metrics_port))
    if supervised_by is not None:
        die_with(supervised_by)
    told = {
        "slots": slots,
        "reserve": reserve,
        "tiers": tiers,
        "pool": pool,
        "share": share,
        "hold_s": hold_s,
    }
    one = chosen[0] if chosen else None
    variables = {f"INFERENCE_WORKER__{key.upper()}": str(value) for key, value in told.items() if value is not None}
    if one is not None or gpu == "none":
        variables |= environment_for(one)
    _enter(variables, is_imported=invocation.celery_app is not None)
    _tell_device(invocation, one, gpus, gpu)

    inference = invocation.inference
    _check_told(inference, told)
    _prepare(invocation, inference, one, autoscale, max_tasks_per_child, max_memory_per_child)
    label = name or (one.label if one else "cpu")
    if metrics_port is not None:
        gpu_name = one.label if one else None
        pool_name = inference.settings.worker.pool
        exporter = WorkerExporter(metrics_port, gpu=gpu_name, pool=pool_name, version=own_version())
        invocation.screen.tell(f"Metrics on http://{exporter.server.address}/metrics")
    click.get_current_context().exit(_run(inference, node_name(label), loglevel))


def _supervise(chosen: tuple[Gpu, ...], name: str | None, kill_after_s: float | None, metrics: Address | None) -> int:
    """Run this same command once for each GPU, or for the CPU; what is said last on a command line wins."""
    told = (sys.executable, *sys.orig_argv[1:])
    mine = ("--supervised-by", str(os.getpid()))
    plans = [
        ChildPlan(
            one.label,
            (
                *(*told, "--gpu", one.token),
                *(("--name", f"{name}-{one.label}") if name else ()),
                *(("--metrics-port", str(metrics.after(place))) if metrics else ()),
                *mine,
            ),
            environment_for(one),
        )
        for place, one in enumerate(chosen)
    ] or [ChildPlan("cpu", (*told, *mine))]
    return Supervisor(plans, kill_after_s=kill_after_s, final_codes=frozenset({USAGE, DEPLOYMENT})).run()


def _tell_device(invocation: Invocation, one: Gpu | None, gpus: Gpus, asked: str) -> None:
    if one is not None:
        invocation.screen.tell(f"GPU {one.token}{f' ({one.model})' if one.model else ''}, known from: {gpus.source}.")
    elif asked == "none":
        invocation.screen.tell("Running on the CPU, as asked for.")
    else:
        hint = (
            "" if gpus.source != "none" else ' If there should be one, install "inference-tasks[gpu]" and its driver.'
        )
        invocation.screen.tell(f"No GPU found; running on the CPU.{hint}")


def _enter(variables: Mapping[str, str], *, is_imported: bool) -> None:
    """Put variables into the environment before anything can have read them.

    Celery's own command line has imported the user's module by now: then the command starts over, with them.
    """
    if all(os.environ.get(key) == value for key, value in variables.items()):
        return
    os.environ.update(variables)
    if is_imported:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _check_told(inference: Inference, told: Mapping[str, object]) -> None:
    """Refuse an option that the app's own code overrules, rather than ignore it."""
    settings = inference.settings
    overruled = [
        f"--{key.replace('_', '-')} {told[key]}: the app's code says worker.{key} = "
        f"{getattr(settings.worker, key)!r}, and code outranks the command line. Remove it from the code."
        for key in told
        if told[key] is not None and settings.origin(f"worker.{key}") == "argument"
    ]
    if overruled:
        raise SettingsError(overruled)


def _prepare(
    invocation: Invocation,
    inference: Inference,
    gpu: Gpu | None,
    autoscale: str | None,
    max_tasks_per_child: int | None,
    max_memory_per_child: int | None,
) -> None:
    """Check everything that would otherwise fail, or be ignored, later."""
    app, settings = inference.celery_app, inference.settings
    for key, value in (
        ("worker_max_tasks_per_child", max_tasks_per_child),
        ("worker_max_memory_per_child", max_memory_per_child),
    ):
        if value is not None:
            app.conf[key] = value
    app.loader.import_default_modules()
    app.finalize()
    request = PoolRequest(
        settings.worker.pool,
        settings.worker.slots,
        uses_gpu=gpu is not None,
        autoscale=autoscale,
        has_cuda=has_initialised_cuda(),
    )
    check_pool(request, app)
    if problems := inference.task_problems():
        raise SettingsError(problems)
    if request.uses_gpu and request.pool == "prefork":
        app.conf.worker_pool_start_method = "spawn"
    _check_consumer_timeout(invocation, inference)


def _check_consumer_timeout(invocation: Invocation, inference: Inference) -> None:
    """Refuse tasks that run longer than the broker waits for them, where its queues cannot be told to wait."""
    limits = time_limits(inference)
    broker = inference.settings.broker
    url = cast(str, broker.url)
    if not limits or is_embedded(url):
        return
    try:
        if broker_version(url, connect_timeout_s=broker.connect_timeout_s) >= CONSUMER_TIMEOUT_SINCE:
            return
    except BrokerUnavailableError:
        # The worker itself waits for the broker; that is no reason to end.
        invocation.screen.tell("The broker is not reachable yet; its consumer time-out is not checked.")
        return
    try:
        management = inference.settings.management_url
        node = node_timeout(Management(management)) if management else None
    except ManagementError:
        node = None
    longer = long_tasks(limits, node.timeout_s if node else DEFAULT_S)
    if not longer:
        return
    if node is None:
        invocation.screen.tell(
            f"Warning: {_too_long(longer, DEFAULT_S)} The node may have another value; it is unknown here."
        )
        return
    raise DeploymentError(_too_long(longer, cast(float, node.timeout_s)))


def _too_long(tasks: list[LongTask], timeout_s: float) -> str:
    named = ", ".join(f"{task.name} ({task.time_limit_s:g} s)" for task in tasks)
    return (
        f"RabbitMQ takes a message back after {timeout_s:g} s (consumer_timeout), and these tasks may run longer: "
        f"{named}. Before 3.12 only the node's configuration can change that; put into rabbitmq.conf and restart the "
        f"node: {configuration_line(tasks)}"
    )


def time_limits(inference: Inference) -> dict[str, float]:
    """Return {task: the longest it may run} of the tasks that have a limit."""
    return {
        name: float(task.time_limit) for name, task in inference.celery_app.tasks.items() if task.time_limit is not None
    }


def node_name(label: str) -> str:
    """Return a node name that no other start has: the queues of an earlier one may still be there, and locked."""
    return f"{label}-{secrets.token_hex(3)}@{socket.gethostname()}"


def _run(inference: Inference, node: str, loglevel: str) -> int:
    """Run Celery's worker in this process, which keeps signals and exit code, and return the exit code."""
    app, worker_settings = inference.celery_app, inference.settings.worker
    app.set_current()
    program = app.Worker(
        hostname=node,
        pool_cls=worker_settings.pool,
        concurrency=worker_settings.slots,
        loglevel=loglevel.upper(),
    )
    program.start()
    return int(program.exitcode or 0)
