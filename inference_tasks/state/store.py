"""The state of tasks, for threads: submit, claim, renew, finish, look up. Every call is one round trip."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inference_tasks.errors import TaskNotFoundError
from inference_tasks.state import keys, packing
from inference_tasks.state.records import (
    DEFAULT_CRASH_LIMIT,
    Claim,
    Claimant,
    Crash,
    Finish,
    NewTask,
    State,
    SubmitAnswer,
    TaskError,
    TaskRecord,
    WorkerBeat,
)
from inference_tasks.state.script import Commands, as_text, load

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


class TaskStore:
    """Records and claims in Redis.

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
    ) -> None:
        self.prefix = prefix
        self._client = client
        self._unfinished_ttl_s = max(1, int(unfinished_ttl_s))
        self._finished_ttl_s = max(1, int(finished_ttl_s))
        self._max_crashes = max_crashes
        self._submit = load("submit")
        self._retract = load("retract")
        self._claim = load("claim")
        self._release = load("release")
        self._crashed = load("crashed")
        self._renew = load("renew")
        self._finish = load("finish")
        self._get = load("get")
        self._workers = load("workers")
        self._leave = load("leave")
        self._counter = load("counter")

    @classmethod
    def from_url(
        cls,
        url: str,
        prefix: str = keys.DEFAULT_PREFIX,
        *,
        unfinished_ttl_s: float = UNFINISHED_TTL_S,
        finished_ttl_s: float = FINISHED_TTL_S,
        max_crashes: int = DEFAULT_CRASH_LIMIT,
        socket_timeout_s: float = 2.0,
    ) -> Self:
        """Return a store with a client of its own; nothing is connected before the first call."""
        return cls(
            client_from_url(url, socket_timeout_s=socket_timeout_s),
            prefix,
            unfinished_ttl_s=unfinished_ttl_s,
            finished_ttl_s=finished_ttl_s,
            max_crashes=max_crashes,
        )

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        disconnect = getattr(getattr(self._client, "connection_pool", None), "disconnect", None)
        if disconnect is not None:
            disconnect()

    def submit(self, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        """Make a ``pending`` record for each task that has none; answers in the order of ``tasks``."""
        if not tasks:
            return []
        names, args = packing.pack_submit(self.prefix, tasks, self._unfinished_ttl_s)
        return packing.unpack_submit(self._submit.call(self._client, names, args))

    def retract(self, task_ids: Iterable[str], nonce: str) -> int:
        """Delete the records that the submission ``nonce`` made and nobody has claimed; return how many."""
        names = [keys.task(self.prefix, task_id) for task_id in task_ids]
        return int(self._retract.call(self._client, names, (nonce,))) if names else 0

    def claim(self, claimants: Sequence[Claimant], worker: str, lease_s: float) -> list[Claim]:
        """Lease tasks to ``worker`` for ``lease_s`` seconds; answers in the order of ``claimants``.

        Only the verdict ``run`` may start its task. A missing record is made from the message. A lease that is over
        counts as a crash; the task fails when that reaches its limit, and expires when its deadline has passed, in
        the same step, with Celery's result document written too.
        """
        if not claimants:
            return []
        names: list[str] = []
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
        return packing.unpack_claims(self._claim.call(self._client, names, args))

    def release(self, claims: Sequence[tuple[str, int]], *, has_started: bool = False) -> None:
        """Give back claims, as (id, token); those that are over already are left alone.

        Args:
            claims: what is given back.
            has_started: whether their runs did start, and were cut off on purpose: then they count as attempts.
        """
        if claims:
            names = [keys.task(self.prefix, task_id) for task_id, _ in claims]
            self._release.call(self._client, names, [*(token for _, token in claims), 0 if has_started else 1])

    def crashed(self, task_id: str, token: int, worker: str) -> Crash:
        """Note that the run's process died without a report: one crash more, and the claim is given back.

        The task becomes ``pending``, or ``failed`` when its crash limit is reached. A claim that is over already
        changes nothing.
        """
        names = (keys.task(self.prefix, task_id),)
        args = (token, self._max_crashes, self._finished_ttl_s, task_id)
        return packing.unpack_crash(self._crashed.call(self._client, names, args))

    def renew(
        self,
        running: Sequence[tuple[str, int, Claimant | None]],
        worker: str,
        lease_s: float,
        heartbeat: WorkerBeat | None = None,
    ) -> list[str]:
        """Extend the leases of ``running``, as (id, token, what its message says), and note that the worker lives.

        Returns the ids whose claim is lost: somebody else holds the task, or it has ended. Records that Redis has
        lost are made again. The heartbeat is forgotten after ``lease_s`` seconds without another one.
        """
        if not running and heartbeat is None:
            return []
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
        reply = as_text(self._renew.call(self._client, names, args))
        return [running[int(position) - 1][0] for position in reply.split(packing.RECORD)] if reply else []

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
    ) -> bool:
        """Write how a run ended; return whether the store now holds it. See ``write`` for the arguments."""
        return self.write(
            task_id, token, generation, state, error, meta, result_ttl_s, name=name, tier=tier, may_create=may_create
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
        )
        return Finish(as_text(self._finish.call(self._client, names, args)))

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
        names = [keys.task(self.prefix, task_id) for task_id in task_ids]
        reply = as_text(self._get.call(self._client, names, packing.RECORD_FIELDS))
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
        self._leave.call(self._client, (keys.workers(self.prefix), keys.worker(self.prefix, worker)), (worker,))

    def workers(self) -> list[WorkerBeat]:
        """Return the last heartbeat of every live worker, by the time it was seen."""
        reply = self._workers.call(self._client, (keys.workers(self.prefix),), (keys.worker(self.prefix, ""),))
        return [packing.unpack_beat(seen, beat) for seen, beat in zip(reply[1::3], reply[2::3], strict=True)]

    def rates(self) -> dict[str, float]:
        """Return the starts per second of each tier, summed over the live workers: {tier: per second}."""
        return packing.summed_rates(self.workers())

    def stale_writes(self) -> int:
        """Return how many late writes have been refused in the last weeks."""
        return int(self._counter.call(self._client, (keys.counters(self.prefix),), ("stale_writes",)))
