"""Exit codes by kind of failure, and what is printed for an error."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from inference_tasks.cli.exit import exit_code
from inference_tasks.cli.group import CommandGroup
from inference_tasks.errors import (
    BrokerUnavailableError,
    BugError,
    DeploymentError,
    InferenceError,
    InvalidArgumentsError,
    MessageTooLargeError,
    ModelLoadError,
    OutcomeUnknownError,
    PoolOptionError,
    QueueFullError,
    ResultTimeoutError,
    SettingsError,
    StateUnavailableError,
    TaskFailedError,
    TaskNotFoundError,
    TopologyMismatchError,
    UnknownTierError,
)
from inference_tasks.worker.gpu import GpuChoiceError

CASES: list[tuple[InferenceError, int]] = [
    (BugError("x"), 1),
    (InvalidArgumentsError("x", task="t"), 2),
    (MessageTooLargeError(size_bytes=2, limit_bytes=1), 2),
    (UnknownTierError("x"), 2),
    (TaskNotFoundError("x"), 3),
    (QueueFullError(tier="realtime", limit=1), 4),
    (BrokerUnavailableError("x"), 5),
    (OutcomeUnknownError("id", "x"), 5),
    (StateUnavailableError("x"), 5),
    (TaskFailedError("id", state="failed"), 6),
    (SettingsError(["x"]), 7),
    (TopologyMismatchError(["x"]), 7),
    (PoolOptionError("solo", "x", "y"), 7),
    (ModelLoadError("m", step="loading", reason="x"), 7),
    (GpuChoiceError("7", [], restricted=False), 7),
    (DeploymentError("x"), 7),
    (ResultTimeoutError("id", timeout_s=1.0, state="pending"), 124),
]


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda one: type(one).__name__)
def test_each_kind_of_failure_has_its_code(error: InferenceError, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_is_told_on_standard_error_with_the_next_step_and_no_traceback() -> None:
    @click.command()
    def fails() -> None:
        raise BrokerUnavailableError("connection refused")

    ran = CliRunner().invoke(CommandGroup("x", commands={"fails": fails}), ["fails"])
    assert ran.exit_code == 5
    assert ran.stdout == ""
    assert "connection refused" in ran.stderr
    assert "inference-tasks doctor" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_ctrl_c_ends_with_the_code_of_a_shell() -> None:
    @click.command()
    def waits() -> None:
        raise KeyboardInterrupt

    assert CliRunner().invoke(CommandGroup("x", commands={"waits": waits}), ["waits"]).exit_code == 130
