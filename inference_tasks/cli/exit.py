"""What a command's exit code says: one table from error class to code."""

from __future__ import annotations

from inference_tasks.errors import (
    BrokerUnavailableError,
    CallerError,
    DeadLetterNotFoundError,
    DeadLettersBusyError,
    DeadlineError,
    DeploymentError,
    InferenceError,
    OutcomeUnknownError,
    QueueFullError,
    ResultTimeoutError,
    SettingsError,
    StateUnavailableError,
    TaskFailedError,
    TaskNotFoundError,
)

__all__ = ["DEPLOYMENT", "FINDINGS", "INTERRUPTED", "TASK_FAILED", "USAGE", "exit_code", "next_step"]

UNEXPECTED = FINDINGS = 1
USAGE = 2
NOT_FOUND = 3
FULL = 4
UNREACHABLE = 5
TASK_FAILED = 6
DEPLOYMENT = 7
TIMED_OUT = 124
INTERRUPTED = 130

_DOCTOR = "Next: `inference-tasks doctor` looks for the cause."
_SETTINGS = "Next: `inference-tasks settings show` lists every setting and where it came from."

# The first class that fits; so the narrow ones stand before their families.
_TABLE: tuple[tuple[type[InferenceError], int, str], ...] = (
    (TaskNotFoundError, NOT_FOUND, ""),
    (DeadLetterNotFoundError, NOT_FOUND, ""),
    (DeadLettersBusyError, FULL, ""),
    (DeadlineError, FULL, "Next: `inference-tasks tiers` shows what waits and who works on it."),
    (QueueFullError, FULL, "Next: `inference-tasks tiers` shows what waits and who works on it."),
    (OutcomeUnknownError, UNREACHABLE, _DOCTOR),
    (BrokerUnavailableError, UNREACHABLE, _DOCTOR),
    (StateUnavailableError, UNREACHABLE, _DOCTOR),
    (ResultTimeoutError, TIMED_OUT, ""),
    (TaskFailedError, TASK_FAILED, ""),
    (CallerError, USAGE, ""),
    (SettingsError, DEPLOYMENT, _SETTINGS),
    (DeploymentError, DEPLOYMENT, ""),
)


def exit_code(error: InferenceError) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code, _ in _TABLE if isinstance(error, kind)), UNEXPECTED)


def next_step(error: InferenceError) -> str:
    """Return the command that helps with an error, or nothing."""
    return next((step for kind, _, step in _TABLE if isinstance(error, kind)), "")
