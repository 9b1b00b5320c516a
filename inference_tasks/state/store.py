"""The state of tasks, for threads: submit, claim, renew, finish, look up. Every call is one round trip."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inference_tasks.errors import TaskNotFoundError
from inference_tasks.state import keys, packing, submits
from inference_tasks.state.calling import DEFAULT_NAMESPACE
from inference_tasks.state.cancelling import Cancelling
from inference_tasks.state.dead_letters import DeadLetters
from inference_tasks.state.depending import Depending, unpack_freed
from inference_tasks.state.held import held
from inference_tasks.state.records import (
    DEFAULT_CRASH_LIMIT,
    Accounts,
    Claim,
    Claimant,
    Crash,
    Finish,
    NewTask,
    Renewal,
    State,
    SubmitAnswer,
    TaskError,
    TaskRecord,
    WorkerBeat,
)
from inference_tasks.state.scenes import Scenes
from inference_tasks.state.script import Commands, as_text
from inference_tasks.state.sweeps import Sweeps
from inference_tasks.state.switching import Switching

__all__ = ["FINISHED_TTL_S", "MAX_ERROR_CHARS", "UNFINISHED_TTL_S", "TaskStore", "client_from_url", "plain_url"]

UNFINISHED_TTL_S = 30 * 86400
FINISHED_TTL_S = 86400
MAX_ERROR_CHARS = 1000


def plain_url(url: str) -> str:
    """Return an address as redis-py reads it; ``redis+socket://`` and ``socket://`` name a Unix socket for Celery."""
    for scheme in ("redis+socket://", "socket://"):
        if url.startswith(scheme):
            return "unix://" + url.removeprefix(scheme).replace("virtual_host=", "db=")
    return url


def client_from_url(url: str, *, socket_timeout_s: float = 2.0) -> Commands:
    """Return a client with a deadline on every call."""
    url = plain_url(url)
    options: dict[str, Any] = {} if url.startswith("unix://") else {"socket_keepalive": True}
    # A lost connection is tried once more at once, a time-out is not: the caller's own deadline is the next to end.
    return redis.Redis.from_url(
        url,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=socket_timeout_s,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        **options,
    )


class TaskStore(Sweeps, DeadLetters, Cancelling, Depending, Switching, Scenes):
    """Records and claims in Redis, the counts of all work, and the indices of what waits and of what is dead.

    Every method is atomic and one round trip, whatever the batch. All raise ``StateUnavailableError`` when Redis does
    not answer or takes no writes; the change may then have happened, and every method may be called again: a repeated
    ``finish`` is recognised, a repeated ``claim`` answers ``held`` and names this worker as the holder.

    Safe to share between threads, and across a fork, as ``redis.Redis`` is.
    """

    def __init__(
        self,
        client: Commands,
        prefix: str = keys.DEFAULT_PREFIX,
        *,
        unfinished_ttl_s: float = UNFINISHED_TTL_S,
        finished_ttl_s: float = FINISHED_TTL_S,
        max_crashes: int = DEFAULT_CRASH_LIMIT,
        namespace: str = DEFAULT_NAMESPACE,
        bounds: Mapping[str, int] | None = None,
    ) -> None:
        """Make a store on a client.

        Args:
            client: of ``redis.Redis``.
            prefix: what every key begins with.
            unfinished_ttl_s: lifetime of the record of a task that has not ended.
            finished_ttl_s: lifetime of the record of one that has.
            max_crashes: the crash limit of tasks that have none of their own.
            namespace: first part of the queues' names.
            bounds: {tier: bound}; a tier without one refuses nothing for what is parked.
        """
        super().__init__(client, prefix, namespace, unfinished_ttl_s=unfinished_ttl_s, finished_ttl_s=finished_ttl_s)
        self._max_crashes = max_crashes
        self._bounds = submits.pack_bounds(bounds or {})

    @classmethod
    def from_url(
        cls,
        url: str,
        prefix: str = keys.DEFAULT_PREFIX,
        *,
        unfinished_ttl_s: float = UNFINISHED_TTL_S,
        finished_ttl_s: float = FINISHED_TTL_S,
        max_crashes: int = DEFAULT_CRASH_LIMIT,
        namespace: str = DEFAULT_NAMESPACE,
        bounds: Mapping[str, int] | None = None,
        socket_timeout_s: float = 2.0,
    ) -> Self:
        """Return a store with a client of its own; nothing is connected before the first call."""
        return cls(
            held(client_from_url(url, socket_timeout_s=socket_timeout_s)),
            prefix,
            unfinished_ttl_s=unfinished_ttl_s,
            finished_ttl_s=finished_ttl_s,
            max_crashes=max_crashes,
            namespace=namespace,
            bounds=bounds,
        )

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        disconnect = getattr(getattr(self._client, "connection_pool", None), "disconnect", None)
        if disconnect is not None:
            disconnect()

    def submit(self, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        """Make a ``pending`` record for each task that has none; answers in the order of ``tasks``.

        A first submit from outside, into ``fresh`` or with a delay, gets no record and the answer ``PARKED`` while as
        many tasks of its tier are parked or in ``returned`` as the tier's bound: they will need the room. It gets none
        and the answer ``LATE`` while more wait before it than its ``max_ahead``, ``PAUSED`` while an operator refuses
        its tier's submits.

        A task with keys to share joins the one that was submitted under one of them, if that has not ended (or has
        succeeded, so lately that its result is reused) and nobody has asked it to stop. The submit then holds it too:
        the deadline is the latest of its holders'. Where tasks with and without such keys are mixed, that takes two
        round trips.
        """
        by_script = submits.parted(tasks)
        answers = {script: self._submit(script, found) for script, found in by_script.items()}
        return submits.brought_together(tasks, answers)

    def _submit(self, script: str, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        names, args = submits.pack_submit(self.prefix, tasks, script=script)
        return submits.unpack_submit(self._change(script, names, (self._unfinished_ttl_s, self._bounds, *args)))

    def confirmed(self, task_ids: Iterable[str]) -> None:
        """Note that the messages of shared tasks are stored: who joins them needs none of his own."""
        names = self._task_keys(task_ids)
        if names:
            self._call("confirmed", names)

    def retract(self, task_ids: Iterable[str], nonce: str, refused: str = "") -> int:
        """Delete the records that the submission ``nonce`` made and nobody has claimed; return how many.

        Of a shared task it gives up its share, and the record goes, with its keys, when it was the last. With a reason
        in ``refused`` they are counted as refused for it.
        """
        names = self._task_keys(task_ids)
        return int(self._change("retract", names, (nonce, refused))) if names else 0

    def claim(self, claimants: Sequence[Claimant], worker: str, lease_s: float) -> list[Claim]:
        """Lease tasks to ``worker`` for ``lease_s`` seconds; answers in the order of ``claimants``.

        Only the verdict ``run`` may start its task. A missing record is made from the message. A lease that is over
        counts as a crash; the task fails when that reaches its limit, and expires when its deadline has passed, in
        the same step, with Celery's result document written too. A message with fewer hops than the record has been
        replaced by a copy; one with more is believed, the mark of its copying being late or lost.
        """
        if not claimants:
            return []
        names = [*self._dead_keys()]
        args: list[str | bytes | int] = [
            worker,
            repr(lease_s),
            self._unfinished_ttl_s,
            self._finished_ttl_s,
            self._max_crashes,
        ]
        prefix = self.prefix
        for claimant in claimants:
            names.append(keys.task(prefix, claimant[0]))
            args.append(packing.pack_claimant(claimant))
        return packing.unpack_claims(self._change("claim", names, args))

    def release(self, claims: Sequence[tuple[str, int]], *, has_started: bool = False) -> None:
        """Give back claims, as (id, token); those that are over already are left alone.

        A task that was asked to stop ends as cancelled by that.

        Args:
            claims: what is given back.
            has_started: whether their runs did start, and were cut off on purpose: then they count as attempts.
        """
        if claims:
            names = self._task_keys(task_id for task_id, _ in claims)
            args = (0 if has_started else 1, self._finished_ttl_s, *(token for _, token in claims))
            self._change("release", names, args)

    def crashed(self, task_id: str, token: int, worker: str) -> Crash:
        """Note that the run's process died without a report: one crash more, and the claim is given back.

        The task becomes ``pending``, or ``failed`` when its crash limit is reached, or ``cancelled`` if it was asked to
        stop. A claim that is over already changes nothing.
        """
        names = (keys.task(self.prefix, task_id),)
        return packing.unpack_crash(self._change("crashed", names, (token, self._max_crashes, self._finished_ttl_s)))

    def renew(
        self,
        running: Sequence[tuple[str, int, Claimant | None]],
        worker: str,
        lease_s: float,
        heartbeat: WorkerBeat | None = None,
    ) -> Renewal:
        """Extend the leases of ``running``, as (id, token, what its message says), and note that the worker lives.

        Answers whose claim is lost (somebody else holds the task, or it has ended), who is asked to stop, and what is
        switched off. Records that Redis has lost are made again. The heartbeat is forgotten after ``lease_s`` seconds
        without another one.
        """
        if not running and heartbeat is None:
            return Renewal([], {})
        names = [keys.workers(self.prefix), keys.worker(self.prefix, worker)]
        args: list[str | bytes | int] = [
            worker,
            repr(lease_s),
            self._unfinished_ttl_s,
            json.dumps(heartbeat.as_dict()) if heartbeat else "",
        ]
        for task_id, token, claimant in running:
            names.append(keys.task(self.prefix, task_id))
            args.append(token)
            args.append(packing.pack_claimant(claimant or Claimant(task_id, "", "", "")))
        return packing.unpack_renewal(self._change("renew", names, args), [task_id for task_id, _, _ in running])

    def finish(
        self,
        task_id: str,
        token: int | None,
        generation: int | None,
        state: str | None,
        error: TaskError | None = None,
        meta: bytes | str | None = None,
        result_ttl_s: float | None = None,
        *,
        name: str = "",
        tier: str = "",
        may_create: bool = True,
        due_at_s: float | None = None,
    ) -> bool:
        """Write how a run ended; return whether the store now holds it. See ``write`` for the arguments."""
        return self.write(
            task_id,
            token,
            generation,
            state,
            error,
            meta,
            result_ttl_s,
            name=name,
            tier=tier,
            may_create=may_create,
            due_at_s=due_at_s,
        ).is_done

    def write(
        self,
        task_id: str,
        token: int | None,
        generation: int | None,
        state: str | None,
        error: TaskError | None = None,
        meta: bytes | str | None = None,
        result_ttl_s: float | None = None,
        *,
        name: str = "",
        tier: str = "",
        may_create: bool = True,
        due_at_s: float | None = None,
    ) -> Finish:
        """Write state and result of a task in one step, and say what came of it.

        Args:
            task_id: the task.
            token: of the claim; None for a write from outside a claim, refused while a live claim holds the task.
            generation: of the message; None if unknown.
            state: the new state; None leaves the record as it is and writes the result only (progress).
            error: why, for ``failed`` and ``retrying``; kept to ``MAX_ERROR_CHARS``.
            meta: Celery's result document, announced to those who wait for it; None for none.
            result_ttl_s: its lifetime; 0 for no end, None for that of finished records.
            name: the task's name, for a record that has to be made.
            tier: its tier, likewise.
            may_create: whether a record is made where there is none.
            due_at_s: with the state ``retrying``: when the parked copy of the message is due, unix seconds. The record
                gets its hop, one more than that of the run's message, so that the latter never runs again (unless
                the record is not this claim's any more). None says that no such copy is known of; the hop stays. In
                both cases the lane is ``returned`` from then on, unless it is ``aged``.
        """
        prefix = self.prefix
        names = (keys.task(prefix, task_id), keys.result(prefix, task_id), keys.counters(prefix))
        ttl_s = self._finished_ttl_s if result_ttl_s is None else max(0, int(result_ttl_s))
        args = (
            "" if token is None else token,
            "" if generation is None else generation,
            state or "",
            packing.clean(error["type"])[:MAX_ERROR_CHARS] if error else "",
            packing.clean(error["message"])[:MAX_ERROR_CHARS] if error else "",
            meta or "",
            ttl_s,
            self._unfinished_ttl_s,
            self._finished_ttl_s,
            name,
            tier,
            1 if may_create else 0,
            "" if due_at_s is None else f"{due_at_s:.6f}",
        )
        outcome, *freed = as_text(self._change("finish", names, args)).split(packing.RECORD)
        self._tell_freed(unpack_freed(freed))
        return Finish(outcome)

    def get(self, task_id: str) -> TaskRecord:
        """Return the record of a task.

        Raises:
            TaskNotFoundError: there is none: never accepted, or finished too long ago.
        """
        record = self.get_many((task_id,))[0]
        if record is None:
            raise TaskNotFoundError(task_id)
        return record

    def get_many(self, task_ids: Sequence[str]) -> list[TaskRecord | None]:
        """Return the records of several tasks, None for those not known, in the order of ``task_ids``."""
        if not task_ids:
            return []
        reply = as_text(self._call("get", self._task_keys(task_ids), packing.RECORD_FIELDS))
        lines = reply.split(packing.RECORD)
        return [packing.unpack_record(task_id, line) for task_id, line in zip(task_ids, lines, strict=True)]

    def fail_unclaimed(self, task_id: str, *, name: str, tier: str, error_type: str, error: str) -> bool:
        """Record that a task can never run, because its message is unfit; return whether the store now says so.

        Those who wait for its result learn it too. Nothing happens to a task that has ended or that a claim holds.
        """
        meta = packing.failure_document(task_id, error_type, error)
        return self.finish(
            task_id, None, None, State.FAILED, {"type": error_type, "message": error}, meta, name=name, tier=tier
        )

    def leave(self, worker: str) -> None:
        """Forget a worker's heartbeat: it ends on purpose."""
        self._call("leave", (keys.workers(self.prefix), keys.worker(self.prefix, worker)), (worker,))

    def workers(self) -> list[WorkerBeat]:
        """Return the last heartbeat of every live worker, by the time it was seen."""
        reply = self._call("workers", (keys.workers(self.prefix),), (keys.worker(self.prefix, ""),))
        return [packing.unpack_beat(seen, beat) for seen, beat in zip(reply[1::3], reply[2::3], strict=True)]

    def rates(self) -> dict[str, float]:
        """Return the starts per second of each tier, summed over the live workers: {tier: per second}."""
        return packing.summed_rates(self.workers())

    def drain_rates(self) -> dict[str, float]:
        """Return how many tasks per second the live workers start, or would if there were more; see ``packing``."""
        return packing.drain_rates(self.workers())

    def stale_writes(self) -> int:
        """Return how many late writes have been refused in the last weeks."""
        return int(self._call("counter", (keys.counters(self.prefix),), ("stale_writes",)))

    def accounts(self) -> Accounts:
        """Return what became of all admitted work since the count began; see ``Accounts``.

        A record that was made anew from a message counts as admitted. A record that ended its days unfinished stays
        counted as what it was.
        """
        return packing.unpack_accounts(self._call("accounts", self._counted_keys))
