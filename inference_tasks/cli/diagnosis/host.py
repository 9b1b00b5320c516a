"""This machine and this process: versions, GPUs, how worker processes start."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from inference_tasks.app import Inference
from inference_tasks.cli.diagnosis.finding import Finding, error, fine, warning
from inference_tasks.errors import PoolOptionError
from inference_tasks.worker.gpu import Gpus, discover, has_initialised_cuda
from inference_tasks.worker.pool_options import PoolRequest, check_pool

__all__ = ["examine_host", "examine_tasks"]

LEAST_OPEN_FILES = 1024
_PACKAGES = ("inference-tasks", "celery", "kombu", "amqp", "aiormq", "redis")


def examine_host(environ: Mapping[str, str] = os.environ, gpus: Gpus | None = None) -> Iterator[Finding]:
    """Look at what needs no app."""
    yield fine(
        "versions", ", ".join([f"Python {platform.python_version()}", *(f"{p} {_version(p)}" for p in _PACKAGES)])
    )
    yield _gpus(environ, discover(environ) if gpus is None else gpus)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        yield warning("open files", f"at most {soft} for a process", f"ulimit -n {LEAST_OPEN_FILES} or more.")


def examine_tasks(inference: Inference, gpus: Gpus | None = None) -> Iterator[Finding]:
    """Look at the app's tasks and at the pool that its workers would have by the settings."""
    gpus = discover(os.environ) if gpus is None else gpus
    worker = inference.settings.worker
    inference.celery_app.finalize()
    yield from (error("tasks", problem, "") for problem in inference.task_problems())
    request = PoolRequest(worker.pool, worker.slots, uses_gpu=len(gpus) > 0, has_cuda=has_initialised_cuda())
    try:
        check_pool(request, inference.celery_app)
    except PoolOptionError as problem:
        yield error("pool", str(problem), "")
    else:
        how = " with start method spawn, as CUDA needs" if request.uses_gpu and worker.pool == "prefork" else ""
        yield fine("pool", f"{worker.pool}, {worker.slots} slots{how}")


def _gpus(environ: Mapping[str, str], gpus: Gpus) -> Finding:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = ", ".join(f"{gpu.token} {gpu.model}".strip() for gpu in gpus.found)
    if gpus.source == "device files":
        return warning(
            "GPU", f"device files of {len(gpus)}, but no answer of the driver", 'pip install "inference-tasks[gpu]".'
        )
    if not gpus.found and visible is None:
        driver = Path("/proc/driver/nvidia/version").exists()
        if driver:
            return warning("GPU", "a driver, but no GPU", "Give the container or the user access to the devices.")
        return fine("GPU", "none; workers run on the CPU")
    if not gpus.found:
        return fine("GPU", f"none left by CUDA_VISIBLE_DEVICES={visible!r}; workers run on the CPU")
    return fine("GPU", f"{names} (known from: {gpus.source})")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
