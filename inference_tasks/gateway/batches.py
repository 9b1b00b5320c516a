"""Reading an upload of many tasks, a line each, without ever holding more of it than some hundred lines."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import Field
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from inference_tasks.errors import BusyError, InferenceError
from inference_tasks.gateway.access import tenant_for
from inference_tasks.gateway.documents import SubmitBody, read_body
from inference_tasks.gateway.keys import ApiKey
from inference_tasks.gateway.problems import ProblemError, problem_of
from inference_tasks.gateway.service import Gateway
from inference_tasks.handles import Call
from inference_tasks.routes import choose
from inference_tasks.state.batches import BatchLine, line_task_id
from inference_tasks.task import InferenceTask, SubmitOptions

__all__ = ["LineBody", "Refusals", "Upload"]

LINES_AT_ONCE = 500
BYTES_AT_ONCE = 4 << 20
REFUSALS_TOLD = 1000
PAUSE_S = 0.25


class LineBody(SubmitBody):
    """One line of a batch."""

    task: str = Field(description="Name of the task, or its last part.", max_length=512)
    custom_id: str | None = Field(
        None, min_length=1, max_length=256, description="Lines with the same one are the same task, in any upload."
    )


class _Line(NamedTuple):
    number: int
    custom_id: str
    call: Call
    task: InferenceTask[..., Any]
    tier: str
    timeout_s: float | None
    tenant: str | None


@dataclass
class Refusals:
    """Lines that were not accepted, as ranges of numbers; the first ``REFUSALS_TOLD`` of them.

    Attributes:
        count: of all lines.
        is_cut: whether there are more ranges than are told.
    """

    count: int = 0
    is_cut: bool = False
    ranges: list[dict[str, Any]] = field(default_factory=list)

    def add(self, number: int, problem: ProblemError) -> None:
        """Refuse one more line."""
        self.count += 1
        last = self.ranges[-1] if self.ranges else None
        if last is not None and not self.is_cut and last["last"] == number - 1 and last["problem"] == problem.name:
            last["last"] = number
        elif len(self.ranges) < REFUSALS_TOLD:
            self.ranges.append(
                {"first": number, "last": number, "problem": problem.name, "detail": str(problem.detail)[:500]}
            )
        else:
            self.is_cut = True


class Upload:
    """One upload: lines are read, checked and submitted some hundred at a time.

    While a tier is full, or broker or Redis are away, nothing is read: the client's sending stops by itself. What is
    not accepted after ``max_wait_s`` without any progress is refused, and so is all that comes after it.
    """

    def __init__(self, gateway: Gateway, key: ApiKey, *, max_wait_s: float) -> None:
        self.id = f"b-{uuid.uuid4()}"
        self.lines = 0
        self.accepted = 0
        self.refusals = Refusals()
        self._gateway = gateway
        self._key = key
        self._max_wait_s = max_wait_s
        self._batches = gateway.batches
        self._pending: list[_Line] = []
        self._pending_bytes = 0
        self._given_up: ProblemError | None = None

    async def read(self, stream: AsyncIterator[bytes]) -> None:
        """Read all of it, and submit what is in it.

        Raises:
            ClientDisconnect: the client has left; what was accepted runs.
            StateUnavailableError: Redis was away at the very beginning.
        """
        await self._batches.begin(self.id, self._key.tenant)
        is_whole = False
        try:
            async for line in _lines(stream, self._gateway.settings.max_body_bytes):
                self.lines += 1
                await self._take(line)
            await self._flush()
            is_whole = True
        except ClientDisconnect:
            await self._flush()
            raise
        finally:
            await self._batches.end(self.id, lines=self.lines, refused=self.refusals.count, is_whole=is_whole)

    async def _take(self, line: bytes | ProblemError) -> None:
        if self._given_up is not None:
            self.refusals.add(self.lines, self._given_up)
            return
        try:
            if isinstance(line, ProblemError):
                raise line
            self._pending.append(self._checked(line))
        except ProblemError as problem:
            self.refusals.add(self.lines, problem)
        except InferenceError as error:
            self.refusals.add(self.lines, problem_of(error))
        else:
            self._pending_bytes += len(line)
            if len(self._pending) >= LINES_AT_ONCE or self._pending_bytes >= BYTES_AT_ONCE:
                await self._flush()

    def _checked(self, text: bytes) -> _Line:
        try:
            value = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise ProblemError(400, "malformed-json", "The line is not JSON", str(error)) from error
        body = read_body(LineBody, value)
        task, signature = self._gateway.task(body.task)
        app = self._gateway.inference
        choice = choose(app.celery_app, body.chosen_tier(), task.tier, app.settings.default_tier)
        if choice.tier not in self._key.tiers:
            raise ProblemError(403, "tier-not-allowed", "This key may not use the tier", f"Tier {choice.tier}.")
        tenant = tenant_for(self._key, body.tenant)
        signature.check(body.args, body.kwargs)
        call = Call(tuple(body.args), body.kwargs, line_task_id(tenant, body.custom_id or ""))
        return _Line(self.lines, body.custom_id or "", call, task, choice.tier, body.timeout_s, tenant)

    async def _flush(self) -> None:
        """Submit what has been read; again and again while there is no room for it."""
        left, self._pending, self._pending_bytes = self._pending, [], 0
        until_s = time.monotonic() + self._max_wait_s
        while left:
            accepted, refused = await self._submitted(left)
            if accepted:
                until_s = time.monotonic() + self._max_wait_s
            final = [(line, problem) for line, problem in refused if problem.status not in (429, 503)]
            again = [(line, problem) for line, problem in refused if problem.status in (429, 503)]
            for line, problem in final:
                self._refuse(line, problem)
            left_s = until_s - time.monotonic()
            if again and (left_s <= 0 or self._gateway.is_ending):
                self._given_up = again[0][1]
                for line, problem in again:
                    self._refuse(line, problem)
                return
            left = [line for line, _ in again]
            if left:
                await asyncio.sleep(min(PAUSE_S, left_s))

    def _refuse(self, line: _Line, problem: ProblemError) -> None:
        self.refusals.add(line.number, problem)
        self._gateway.metrics.refused(line.tier, problem)

    async def _submitted(self, lines: Sequence[_Line]) -> tuple[int, list[tuple[_Line, ProblemError]]]:
        together: dict[tuple[Any, ...], list[_Line]] = defaultdict(list)
        for line in lines:
            together[line.task.name, line.tier, line.timeout_s, line.tenant].append(line)
        accepted, refused = 0, list[tuple[_Line, ProblemError]]()
        for some in together.values():
            entered, no_room = await self._gateway.entered(
                self._key, [(line, line.call.task_id or "") for line in some]
            )
            refused += no_room
            taken, not_taken = await self._sent(entered)
            refused += not_taken
            accepted += len(taken)
            self._gateway.metrics.submitted(some[0].tier, len(taken))
            await self._gateway.left(self._key, [line.call.task_id or "" for line, _ in not_taken])
            await self._enlisted(taken)
        self.accepted += accepted
        return accepted, sorted(refused, key=lambda one: one[0].number)

    async def _sent(self, lines: list[_Line]) -> tuple[list[_Line], list[tuple[_Line, ProblemError]]]:
        if not lines:
            return [], []
        first = lines[0]
        # Never shared with others: a line's task has the line's id, by which the batch counts it.
        options = SubmitOptions(tier=first.tier, timeout_s=first.timeout_s, tenant=first.tenant, dedup=False)
        try:
            sent = await self._gateway.inference.client.submit_many_async(
                first.task, [line.call for line in lines], options.checked()
            )
        except InferenceError as error:
            return [], [(line, problem_of(error)) for line in lines]
        # What is unknown is sent again under the same id, which is harmless.
        problems = {one.index: problem_of(one.error) for one in (*sent.refused, *sent.unknown)}
        taken = [line for index, line in enumerate(lines) if index not in problems]
        return taken, [(lines[index], problem) for index, problem in problems.items()]

    async def _enlisted(self, lines: list[_Line]) -> None:
        """Note lines in the batch; they run already, so this is tried until Redis is back, or the patience over."""
        noted = [BatchLine(line.number, line.call.task_id or "", line.custom_id) for line in lines]
        until_s = time.monotonic() + max(self._max_wait_s, 1.0)
        while True:
            try:
                await self._batches.enlist(self.id, noted)
                return
            except BusyError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(PAUSE_S)


async def _lines(stream: AsyncIterator[bytes], limit_bytes: int) -> AsyncIterator[bytes | ProblemError]:
    """Split a stream at its line ends, without the empty ones; of a line that is too long a problem stands instead."""
    rest, is_skipping = b"", False
    too_long = ProblemError(413, "too-large", "The line is too large", f"At most {limit_bytes} bytes are taken.")
    async for chunk in stream:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if is_skipping:
                is_skipping = False
            elif len(line) > limit_bytes:
                yield too_long
            elif line.strip():
                yield line
        if is_skipping:
            rest = b""
        elif len(rest) > limit_bytes:
            yield too_long
            rest, is_skipping = b"", True
    if rest.strip() and not is_skipping:
        yield rest
