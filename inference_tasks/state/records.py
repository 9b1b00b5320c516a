"""The values that go into and come out of the state store.

What the hot path makes by the thousand is a ``NamedTuple`` (four times cheaper to build than a frozen dataclass); what
people read is a dataclass.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypedDict

from inference_tasks.state.switches import ALL_ON, Switches

__all__ = [
    "CONFLICT",
    "DEFAULT_CRASH_LIMIT",
    "DEPENDENCY_CYCLE",
    "DEPENDENCY_FAILED",
    "DEPENDENCY_UNKNOWN",
    "END_STATES",
    "LATE",
    "PARKED",
    "PAUSED",
    "Accounts",
    "Backlog",
    "Cancellation",
    "Claim",
    "Claimant",
    "Crash",
    "DeadKind",
    "DeadLetter",
    "Finish",
    "Freed",
    "Lift",
    "Move",
    "NewTask",
    "Renewal",
    "Run",
    "RunningTask",
    "ShareKey",
    "State",
    "SubmitAnswer",
    "TaskError",
    "TaskRecord",
    "Verdict",
    "Visit",
    "Visitor",
    "Waiting",
    "WorkerBeat",
]

DEFAULT_CRASH_LIMIT = 3

PARKED = "parked"
"""What ``submit`` answers in place of a state: too much of the tier is parked or has come back, no record was made."""


PAUSED = "paused"
"""What ``submit`` answers in place of a state: an operator has switched the tier's submits off, no record was made."""

LATE = "late"
"""What ``submit`` answers in place of a state: too many wait before it, it could not start in time; no record."""

DEPENDENCY_UNKNOWN = "dependency unknown"
DEPENDENCY_FAILED = "dependency failed"
DEPENDENCY_CYCLE = "dependency cycle"
"""What ``submit`` answers in place of a state: a task that it needs is not known, has ended without success, or waits
for the new one; no record was made."""

CONFLICT = "conflict"
"""What ``submit`` answers in place of a state: a task of the same key was asked for something else; no record."""


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
    """What a claim came to. Only ``RUN`` may start the task."""

    RUN = "run"
    FINISHED = "finished"
    HELD = "held"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    """A copy has replaced this message, or a later life of the task has begun: it is acked and forgotten."""
    CRASHED = "crashed"
    """This claim has failed the task: its runs ended without a report as often as they may."""
    WAITING = "waiting"
    """It waits for other tasks; its message is to be put off."""
    UNBURIED = "unburied"
    """The task has failed and its message is not known to lie in the dead letters: bury it, then ack it."""


class Cancellation(StrEnum):
    """What became of a wish to cancel a task."""

    CANCELLED = "cancelled"
    """It has ended now, and will not run."""
    ASKED = "asked"
    """It runs, and has been asked to stop."""
    LEFT = "left"
    """It goes on for others, who submitted the same."""
    ENDED = "ended"
    """It had ended before."""
    MISSING = "missing"
    """No record."""


class DeadKind(StrEnum):
    """Where the message of a failed task is, once it has been among the dead letters."""

    REPLAYABLE = "replayable"
    UNFIT = "unfit"
    """Among the dead letters, but it could never run."""
    DROPPED = "dropped"
    """Taken out of the dead letters by an operator, for good."""


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


class ShareKey(NamedTuple):
    """A key under which equal submits share one task.

    Attributes:
        digest: of what makes them equal.
        window_s: how long after the first submit others join it.
        reuse_s: for how long after its end a success is handed out again.
        print: digest of what was asked, where equal keys may ask for different things; such a submit is a conflict.
    """

    digest: str
    window_s: float
    reuse_s: float = 0.0
    print: str = ""


class NewTask(NamedTuple):
    """A task about to be published.

    ``nonce`` names this one submission: only it may take the record back. The record's moments are the server's: of
    ``submitted_at_s`` and ``expires_at_s`` only the distance counts when both are given, so a client with a wrong
    clock cannot shorten a deadline; the same holds for ``due_at_s``.

    ``hop``: how many messages of the task this one has behind it; 0 for the first. A record that is made for a copy is
    one hop behind it, until the copy is claimed or marked: no confirm, no superseding. ``due_at_s``: when the broker
    lets the message go, None if at once; its task then counts as parked, in ``returned``, until it is claimed.
    ``tenant``: for whom it is, empty if that was not said.
    ``max_ahead``: refused if more than these wait in its tier before it; None for no such limit. ``shared``: the keys
    under which it joins an equal task, or under which others will join it.
    ``depends_on``: ids of the tasks that must succeed first. ``message``: the message that is to be published when they
    have, kept with the record; empty if it is not to be kept.
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
    hop: int = 0
    due_at_s: float | None = None
    tenant: str = ""
    max_ahead: int | None = None
    shared: tuple[ShareKey, ...] = ()
    depends_on: tuple[str, ...] = ()
    message: str = ""

    @property
    def may_be_refused(self) -> bool:
        """Whether it is a first submit from outside, into ``fresh``, with a delay, or to wait for other tasks."""
        is_first = self.hop == 0 and self.generation == 0 and not self.worker_published
        return is_first and (self.lane == "fresh" or self.due_at_s is not None or bool(self.depends_on))


class SubmitAnswer(NamedTuple):
    """What became of one submission.

    Attributes:
        created: whether it made the record.
        state: that it found or made, or ``PARKED``, ``LATE``, ``CONFLICT``, ``DEPENDENCY_…``.
        ahead: how many wait before it, if ``LATE``.
        shares: id of the task that it has joined, or conflicts with; empty for none.
        is_unsure: whether the message of the task that it has joined may not be stored yet.
        lift: the tier that this task should be lifted to, being higher than its own; empty for none.
        dependency: id of the task that it needs, and that is why no record was made; empty for none.
        dependency_state: the state of that task, if it has ended.
    """

    created: bool
    state: str
    ahead: int = 0
    shares: str = ""
    is_unsure: bool = False
    lift: str = ""
    dependency: str = ""
    dependency_state: str = ""


class Claimant(NamedTuple):
    """What a message says of its task: enough to make the record again when Redis has lost it.

    ``crash_limit``: crashes after which the task fails; None takes the store's default. ``tier_first``: the tier of
    the first submission; None means ``tier``. ``hop``: as in ``NewTask``.
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
    hop: int = 0
    tenant: str = ""


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


class Waiting(NamedTuple):
    """A task that waits in a queue, and since when (a parked one: from when on)."""

    id: str
    ready_at_s: float


class Backlog(NamedTuple):
    """How many tasks wait in a queue, those still parked left out, and since when the oldest does."""

    waiting: int
    oldest_ready_at_s: float | None


class Move(NamedTuple):
    """A copy of a task's message that the broker has confirmed: its hop, and tier and lane where it lies now.

    ``because``: the id of the task for whose sake it was lifted; empty if it was not, ``-`` if a lift has ended by it.
    """

    id: str
    generation: int
    hop: int
    tier: str
    lane: str
    because: str = ""


class Freed(NamedTuple):
    """A task that waited for others and may start by now, in this tier; the rest is as its message says it."""

    id: str
    generation: int
    hop: int
    tier: str
    message: str


class Visitor(NamedTuple):
    """A message of a task that waits for others, come round to be looked at.

    Attributes:
        claimant: what it says of its task.
        needs: ids of the tasks that it waits for by its own word.
        message: it, to be kept with a record that has to be made; empty if it is not to be kept.
    """

    claimant: Claimant
    needs: tuple[str, ...]
    message: str = ""


class Visit(NamedTuple):
    """What is to become of such a message.

    Attributes:
        outcome: ``over``: it is not needed any more; ``unburied``: its task has failed, bury it; ``free``: its task may
            start; ``wait``: it is to come round again.
        needs: ids of the tasks that it still waits for.
        missing: those of them that have no record and are not listed in a queue either.
        tier: in which a free one starts.
    """

    outcome: str
    needs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    tier: str = ""


class Lift(NamedTuple):
    """A task whose message is to be copied into another tier: into which, and for whose sake (``-``: nobody's)."""

    id: str
    generation: int
    hop: int
    tier: str
    because: str
    message: str


class Renewal(NamedTuple):
    """What a worker learns when it extends its leases.

    Attributes:
        lost: ids whose claim is lost.
        stopping: {id that is asked to stop: whether it is to be terminated}.
        switches: what operators have switched off.
    """

    lost: list[str]
    stopping: dict[str, bool]
    switches: Switches = ALL_ON


class Run(NamedTuple):
    """How a run stands: whether it should stop, and the seconds until its deadline, if it has one."""

    should_stop: bool
    left_s: float | None


class Crash(NamedTuple):
    """How often the task's runs have ended without a report, and whether it is over for it."""

    crashes: int
    over: bool


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What is known of a task. Times are unix seconds by the Redis server's clock.

    Attributes:
        hop: of the message that leads to the task's present place; older ones are superseded.
        ready_at_s: since when it waits in its present queue; of a parked task, from when on it will.
        due_at_s: when the broker lets the message go; only while it is parked.
        dead: of a failed task, where its message is (``DeadKind``); None while it is not known to be a dead letter.
        tenant: for whom it was submitted; None if that was not said.
        tier_wanted: the highest tier of the submits that share it; None where none do.
        lifted_from: the tier that it had before it was lifted for a task that waits for it; None if it was not.
        lifted_by: id of that task, or ``shared`` if it was another submit that shares it.
        not_lifted: why it was not lifted, though it should have been.
        waits_for: ids of the tasks that must succeed before it may start; only while it is ``waiting``.
        cancel_asked: how it was asked to stop while it ran, ``stop`` or ``terminate``; None if it was not.
    """

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
    hop: int = 0
    ready_at_s: float | None = None
    due_at_s: float | None = None
    dead: str | None = None
    tenant: str | None = None
    cancel_asked: str | None = None
    tier_wanted: str | None = None
    lifted_from: str | None = None
    lifted_by: str | None = None
    not_lifted: str | None = None
    waits_for: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether the state is an end state."""
        return self.state in END_STATES

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What the index keeps of a message in the dead-letter queue.

    ``id`` is the task's; a message that names none gets one made up. ``message_id`` finds the message in the queue.
    """

    id: str
    task: str
    tier: str
    tier_first: str
    lane: str
    reason: str
    detail: str
    error: TaskError | None
    attempts: int
    failures: int
    crashes: int
    generation: int
    submitted_at_s: float | None
    dead_at_s: float
    is_replayable: bool
    message_id: str | None

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Accounts:
    """What became of all admitted work, counted since a moment (the first, or the first after a loss of Redis).

    Attributes:
        since_s: that moment; None if nothing has been counted.
        by_tier: {tier of the first submission: {name: count}}. Names: ``admitted``; the nine states, whose sum it is;
            ``dead:replayable``, ``dead:unfit`` and ``dead:dropped``, which are parts of ``failed``. What is left of
            ``failed`` is on its way into the dead letters. All names are there. Tasks without a tier are under "".
        away: {tier: admitted tasks that are parked or lie in ``returned``}.
        refused: {tier of the submission: {reason: submits that were refused}}; reasons: ``full``, ``parked``,
            ``paused``, ``late``. None of them is in ``by_tier``.
    """

    since_s: float | None
    by_tier: dict[str, dict[str, int]]
    away: dict[str, int]
    refused: dict[str, dict[str, int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)


class RunningTask(NamedTuple):
    """A task that has a slot, and since when, unix seconds by the worker's clock."""

    id: str
    task: str
    tier: str
    tier_first: str
    lane: str
    since_s: float


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """One worker's heartbeat. ``seen_at_s`` is set by the store; the rest is the worker's word.

    What is named ``…_60s`` is of the last minute. Waits and ends are by the tier of the submit: what moved up after
    half an hour says nothing of how the upper tier's own work is served.

    Attributes:
        starts_60s: starts, {served tier: {first tier: number}}.
        slot_s_60s: slot seconds, {served tier: {first tier: seconds}}.
        started_per_s: {served tier: starts per second}.
        started_at_s: when the worker began, unix seconds by its own clock, as are the other moments.
        running: what has a slot, the oldest first, at most 64 of them.
        busy_by_tier: {served tier: slots in use}.
        last_start_at_s: {served tier: when a task of it started last}.
        waits_60s: from submit to first start, {first tier: {place in WAIT_BUCKETS_S: number}}.
        longest_wait_60s: {first tier: seconds}.
        failed_60s: {first tier: tasks that failed for good}.
        ended_60s: {first tier: tasks that failed for good or succeeded}.
        floor_violations_60s: {served tier: windows in which it had work all the time and got less than its floor}.
        state: ``running``, ``paused`` or ``draining``.
        gpu_utilization: 0 to 1; None where it is not known.
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
    version: str = ""
    started_at_s: float = 0.0
    running: tuple[RunningTask, ...] = ()
    busy_by_tier: dict[str, int] = field(default_factory=dict)
    last_start_at_s: dict[str, float] = field(default_factory=dict)
    waits_60s: dict[str, dict[int, int]] = field(default_factory=dict)
    longest_wait_60s: dict[str, float] = field(default_factory=dict)
    failed_60s: dict[str, int] = field(default_factory=dict)
    ended_60s: dict[str, int] = field(default_factory=dict)
    floor_violations_60s: dict[str, int] = field(default_factory=dict)
    state: str = "running"
    gpu_memory_used_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    gpu_utilization: float | None = None

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return {**asdict(self), "running": [one._asdict() for one in self.running]}
