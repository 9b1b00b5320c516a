"""The public API is what it is on purpose: a name comes or goes by changing this list."""

from __future__ import annotations

import inference_tasks

NAMES = """
    Backoff BatchSubmission BrokerUnavailableError BugError BusyError Call CallerError DeadlineError
    DependencyCycleError DependencyFailedError DependencyUnknownError DeploymentError IdempotencyConflictError
    Inference InferenceApp InferenceError InferenceTask InvalidArgumentsError MessageTooLargeError Model
    ModelLoadError OutcomeUnknownError PermanentError PoolOptionError QueueFullError RefusedCall ResultTimeoutError
    RetryAfter Settings SettingsError StateUnavailableError Submitter TaskCancelledError TaskFailedError TaskHandle
    TaskNotFoundError TaskRecord TemporaryError TierPausedError TopologyMismatchError UnknownOptionError
    UnknownTaskError UnknownTierError adopt load_settings
"""


def test_the_public_names_are_these() -> None:
    assert sorted(inference_tasks.__all__) == NAMES.split()
    assert len(set(inference_tasks.__all__)) == len(inference_tasks.__all__)


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in inference_tasks.__all__:
        assert getattr(inference_tasks, name).__doc__, name
