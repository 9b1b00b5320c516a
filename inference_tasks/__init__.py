"""Three service classes for GPU inference on Celery and RabbitMQ: the public names."""

from inference_routing.backoff import Backoff
from inference_tasks.app import Inference, adopt
from inference_tasks.errors import (
    BrokerUnavailableError,
    BugError,
    BusyError,
    CallerError,
    DeadlineError,
    DependencyCycleError,
    DependencyFailedError,
    DependencyUnknownError,
    DeploymentError,
    IdempotencyConflictError,
    InferenceError,
    InvalidArgumentsError,
    MessageTooLargeError,
    ModelLoadError,
    OutcomeUnknownError,
    PermanentError,
    PoolOptionError,
    QueueFullError,
    ResultTimeoutError,
    RetryAfter,
    SettingsError,
    StateUnavailableError,
    TaskCancelledError,
    TaskFailedError,
    TaskNotFoundError,
    TemporaryError,
    TierPausedError,
    TopologyMismatchError,
    UnknownOptionError,
    UnknownTaskError,
    UnknownTierError,
)
from inference_tasks.handles import BatchSubmission, Call, RefusedCall, TaskHandle
from inference_tasks.inference_app import InferenceApp
from inference_tasks.models import Model
from inference_tasks.settings import Settings, load_settings
from inference_tasks.state.records import TaskRecord
from inference_tasks.task import InferenceTask, Submitter

__all__ = [  # noqa: RUF022 -- grouped by what a reader looks for
    # the app
    "InferenceApp",
    "adopt",
    "Inference",
    "Settings",
    "load_settings",
    # tasks and models
    "InferenceTask",
    "Submitter",
    "Call",
    "Model",
    # for tasks that fail
    "TemporaryError",
    "RetryAfter",
    "PermanentError",
    "TaskCancelledError",
    "Backoff",
    # what a submit returns
    "TaskHandle",
    "TaskRecord",
    "BatchSubmission",
    "RefusedCall",
    # errors: the caller must change something
    "CallerError",
    "DependencyCycleError",
    "DependencyFailedError",
    "DependencyUnknownError",
    "IdempotencyConflictError",
    "InvalidArgumentsError",
    "MessageTooLargeError",
    "TaskNotFoundError",
    "UnknownOptionError",
    "UnknownTaskError",
    "UnknownTierError",
    # errors: the caller may ask again
    "BusyError",
    "BrokerUnavailableError",
    "DeadlineError",
    "OutcomeUnknownError",
    "QueueFullError",
    "ResultTimeoutError",
    "StateUnavailableError",
    "TierPausedError",
    # errors: somebody must change the deployment
    "DeploymentError",
    "ModelLoadError",
    "PoolOptionError",
    "SettingsError",
    "TopologyMismatchError",
    # errors: beside the families
    "InferenceError",
    "TaskFailedError",
    "BugError",
]
