"""What a submit takes and returns: calls, handles on tasks, the report on a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from inference_tasks.errors import InferenceError, InvalidArgumentsError

if TYPE_CHECKING:
    from inference_tasks.state.records import TaskRecord

__all__ = ["BatchSubmission", "Call", "LookUp", "RefusedCall", "TaskHandle", "as_call"]

R = TypeVar("R", covariant=True)


class LookUp(Protocol):
    """What a handle needs of the client."""

    def status(self, task_id: str) -> TaskRecord: ...

    async def status_async(self, task_id: str) -> TaskRecord: ...

    def result(self, task_id: str, *, timeout_s: float | None = None) -> object: ...

    async def result_async(self, task_id: str, *, timeout_s: float | None = None) -> object: ...

    def cancel(self, task_id: str, *, terminate: bool = False, nonce: str = "") -> bool: ...

    async def cancel_async(self, task_id: str, *, terminate: bool = False, nonce: str = "") -> bool: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a batch: its arguments, and its id if the caller chooses it."""

    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    task_id: str | None = None


class TaskHandle(Generic[R]):
    """One submitted task. All it needs is its id, so it can be made again from that at any time (``app.handle(id)``).

    The handle of a submit that shares its task with others knows its share: see ``cancel``.
    """

    __slots__ = ("_client", "_nonce", "id")

    def __init__(self, task_id: str, client: LookUp, nonce: str = "") -> None:
        self.id = task_id
        self._client = client
        self._nonce = nonce

    def __repr__(self) -> str:
        return f"TaskHandle({self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def status(self) -> TaskRecord:
        """Look the task up: one round trip to Redis, whatever the length of the queues.

        A task that waits to be tried again is ``retrying`` until it is due (``due_at_s``), and ``pending`` after that.

        Raises:
            TaskNotFoundError: its record has reached the end of its life.
            StateUnavailableError: Redis did not answer.
        """
        return self._client.status(self.id)

    async def status_async(self) -> TaskRecord:
        """Look the task up from a coroutine; see ``status``."""
        return await self._client.status_async(self.id)

    def result(self, *, timeout_s: float | None = None) -> R:
        """Wait until the task has ended and return its result.

        Args:
            timeout_s: longest wait; None waits as long as it takes, 0 only looks.

        Raises:
            TaskFailedError: it ended without a result.
            ResultTimeoutError: it has not ended yet.
            TaskNotFoundError: its record has reached the end of its life.
        """
        return cast(R, self._client.result(self.id, timeout_s=timeout_s))

    async def result_async(self, *, timeout_s: float | None = None) -> R:
        """Wait for the result in a coroutine; see ``result``."""
        return cast(R, await self._client.result_async(self.id, timeout_s=timeout_s))

    def cancel(self, *, terminate: bool = False) -> bool:
        """Cancel the task; false if it had ended before.

        One that waits, or is to be tried again, never runs after this, whether or not a worker is there to hear of it.
        One that runs is asked to stop (``task.is_cancelled()``). Where several submits share the task, this one gives
        up its share, and the task goes on for the others.

        Args:
            terminate: whether the process that runs it is killed, within some seconds; pools other than prefork cannot
                do that, and only ask.

        Raises:
            TaskNotFoundError: its record has reached the end of its life.
            StateUnavailableError: Redis did not answer; it may or may not be cancelled.
        """
        return self._client.cancel(self.id, terminate=terminate, nonce=self._nonce)

    async def cancel_async(self, *, terminate: bool = False) -> bool:
        """Cancel the task from a coroutine; see ``cancel``."""
        return await self._client.cancel_async(self.id, terminate=terminate, nonce=self._nonce)


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call of a batch that was not, or perhaps not, accepted: where it stood, its id, and why."""

    index: int
    task_id: str
    error: InferenceError


@dataclass(frozen=True, slots=True)
class BatchSubmission(Generic[R]):
    """What became of the calls of one ``submit_many``.

    Attributes:
        accepted: one handle for each accepted call, in the order of the calls.
        refused: calls that were surely not accepted.
        unknown: calls of which that is not known; submitting the same ids again is harmless.
    """

    accepted: tuple[TaskHandle[R], ...]
    refused: tuple[RefusedCall, ...] = ()
    unknown: tuple[RefusedCall, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every call was accepted."""
        return not self.refused and not self.unknown

    def raise_for_refused(self) -> None:
        """Raise the error of the first call that was not accepted, if there is one."""
        for one in (*self.refused, *self.unknown):
            raise one.error


def as_call(item: Call | tuple[object, ...] | Mapping[str, object], index: int, task: str) -> Call:
    """Return one item of a batch as a call.

    Raises:
        InvalidArgumentsError: it is neither a tuple, a mapping nor a ``Call``.
    """
    if isinstance(item, Call):
        return item
    if isinstance(item, tuple | list):
        return Call(tuple(item))
    if isinstance(item, Mapping):
        return Call(kwargs=item)
    # A bare string is the likely slip, and iterating over its letters the silent failure.
    raise InvalidArgumentsError(
        f"Call {index} of {task}: expected a tuple of arguments such as ({item!r},), a mapping of keyword arguments or "
        f"a Call, found {type(item).__name__}.",
        task=task,
    )
