"""The values that go into and come out of the state store.

What the hot path makes by the thousand is a ``NamedTuple`` (four times cheaper to build than a frozen dataclass); what
people read is a dataclass.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypedDict

__all__ = [
    "DEFAULT_CRASH_LIMIT",
    "END_STATES",
    "Claim",
    "Claimant",
    "Crash",
    "Finish",
    "NewTask",
    "State",
    "SubmitAnswer",
    "TaskError",
    "TaskRecord",
    "Verdict",
    "WorkerBeat",
]

DEFAULT_CRASH_LIMIT = 3


class State(StrEnum):
    """Where a task stands. The five end states are final within a generation."""

    PENDING = "pending"
    WAITING = "waiting"
    PROCESSING = "processing"
    RETRYING = "retrying"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DROPPED = "dropped"


END_STATES: frozenset[str] = frozenset({State.SUCCESS, State.FAILED, State.CANCELLED, State.EXPIRED, State.DROPPED})


class Verdict(StrEnum):
    """What a claim came to. Only ``RUN`` may start the task.

    ``CRASHED`` is also the answer to later messages of a task that its crashes have ended.
    """

    RUN = "run"
    FINISHED = "finished"
    HELD = "held"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    CRASHED = "crashed"


class Finish(StrEnum):
    """What became of a write at the end of a run."""

    WRITTEN = "written"
    REPEATED = "repeated"
    """The same claim had written the same state before: a write whose answer was lost, tried again."""
    ENDED = "ended"
    """The task had reached an end state by another way; nothing was changed."""
    STALE = "stale"
    """The claim is over, or the message of an older generation; nothing was changed."""
    HELD = "held"
    """A write from outside a claim, while a live claim holds the task; nothing was changed."""
    MISSING = "missing"
    """No record, and none was to be made."""

    @property
    def is_done(self) -> bool:
        """Whether the store holds what the writer wanted to write."""
        return self in (Finish.WRITTEN, Finish.REPEATED)


class TaskError(TypedDict):
    """Why a run or a task failed."""

    type: str
    message: str


class NewTask(NamedTuple):
    """A task about to be published.

    ``nonce`` names this one submission: only it may take the record back. The record's moments are the server's: of
    ``submitted_at_s`` and ``expires_at_s`` only the distance counts when both are given, so a client with a wrong
    clock cannot shorten a deadline.
    """

    id: str
    name: str
    tier: str
    tier_first: str
    lane: str
    generation: int
    nonce: str
    submitted_at_s: float | None = None
    expires_at_s: float | None = None
    worker_published: bool = False


class SubmitAnswer(NamedTuple):
    """Whether this submission made the record, and the state it found or made."""

    created: bool
    state: str


class Claimant(NamedTuple):
    """What a message says of its task: enough to make the record again when Redis has lost it.

    ``crash_limit``: crashes after which the task fails; None takes the store's default. ``tier_first``: the tier of
    the first submission; None means ``tier``.
    """

    id: str
    name: str
    tier: str
    lane: str
    generation: int = 0
    submitted_at_s: float | None = None
    expires_at_s: float | None = None
    crash_limit: int | None = None
    tier_first: str | None = None


class Claim(NamedTuple):
    """The answer to one claim.

    Attributes:
        verdict: whether the task may start, and if not, why.
        token: of this claim when the verdict is ``run``, else the last one of the record.
        attempts: runs started, this one included.
        held_until_s: end of the lease, Redis time; None unless ``run`` or ``held``.
        tier_first: tier of the first submission.
        wait_s: seconds from submit to this start; None for later attempts.
        worker: who holds it, when ``held``. A worker that finds itself there and does not run the task lost the answer
            to an earlier claim, and may release it with ``token``.
    """

    verdict: Verdict
    token: int
    attempts: int
    held_until_s: float | None
    tier_first: str
    wait_s: float | None
    worker: str | None = None


class Crash(NamedTuple):
    """How often the task's runs have ended without a report, and whether it is over for it."""

    crashes: int
    over: bool


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What is known of a task. Times are unix seconds by the Redis server's clock."""

    id: str
    name: str
    state: str
    tier: str
    tier_first: str
    lane: str
    generation: int
    attempts: int
    failures: int
    crashes: int
    token: int | None
    worker: str | None
    submitted_at_s: float | None
    started_at_s: float | None
    finished_at_s: float | None
    expires_at_s: float | None
    held_until_s: float | None
    error: TaskError | None

    @property
    def is_finished(self) -> bool:
        """Whether the state is an end state."""
        return self.state in END_STATES

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """One worker's heartbeat. ``seen_at_s`` is set by the store; the rest is the worker's word.

    ``starts_60s`` and ``slot_s_60s``: starts and slot seconds of the last minute, {served tier: {first tier: amount}}.
    ``started_per_s``: {tier: starts per second}.
    """

    node: str
    pid: int
    gpu: str | None
    pool: str
    slots: int
    reserve: int
    tiers: tuple[str, ...]
    busy: int
    seen_at_s: float = 0.0
    starts_60s: dict[str, dict[str, int]] = field(default_factory=dict)
    slot_s_60s: dict[str, dict[str, float]] = field(default_factory=dict)
    started_per_s: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)
