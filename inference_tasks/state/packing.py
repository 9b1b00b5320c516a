"""How values travel to the scripts and back, shared by the sync and the asyncio store.

A task's fields travel as one argument, apart by the unit separator, and a batch's answers come back as one string: a
pure-Python client spends about a microsecond on every argument and every reply, Lua a fraction of it on splitting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from inference_tasks.state.records import (
    Accounts,
    Claim,
    Claimant,
    Crash,
    DeadKind,
    Renewal,
    Run,
    RunningTask,
    State,
    TaskError,
    TaskRecord,
    Verdict,
    WorkerBeat,
)
from inference_tasks.state.script import as_text
from inference_tasks.state.switches import read_switches

__all__ = [
    "RECORD_FIELDS",
    "clean",
    "drain_rates",
    "failure_document",
    "full_counts",
    "joined",
    "listed",
    "pack_claimant",
    "summed_rates",
    "unpack_accounts",
    "unpack_beat",
    "unpack_claims",
    "unpack_crash",
    "unpack_record",
    "unpack_renewal",
    "unpack_run",
]

FIELD = "\x1f"
RECORD = "\x1e"
LISTED = "\x1d"

RECORD_FIELDS = (
    "state",
    "name",
    "tier",
    "tier_first",
    "lane",
    "generation",
    "attempts",
    "failures",
    "crashes",
    "token",
    "worker",
    "submitted_at_s",
    "started_at_s",
    "finished_at_s",
    "expires_at_s",
    "held_until_s",
    "error_type",
    "error_message",
    "hop",
    "ready_at_s",
    "due_at_s",
    "dead",
    "tenant",
    "cancel",
    "tier_wanted",
    "lifted_from",
    "lifted_by",
    "not_lifted",
)
"""The fields that ``get`` asks for, in the order in which they come back; every record has the first one."""

_BEAT_FIELDS = tuple(field.name for field in fields(WorkerBeat))
_SEPARATORS = re.compile("[\x1e\x1f]")
_VERDICTS = {str(verdict): verdict for verdict in Verdict}


def clean(text: str) -> str:
    """Return ``text`` without the two characters that separate fields."""
    return _SEPARATORS.sub(" ", text)


def joined(*fields: object) -> str:
    """Return fields as one argument."""
    # A name or id with a separator in it, which only a foreign or hostile sender makes, must not spoil a whole batch.
    return FIELD.join(clean(str(field)) for field in fields)


def failure_document(
    task_id: str, error_type: str, message: str, *, status: str = "FAILURE", module: str | None = None
) -> str:
    """Return Celery's result document of a task that ended with an error; ``announce`` in prelude.lua writes the same.

    mirrors Backend._get_result_meta and Backend.prepare_exception of Celery.
    """
    document: dict[str, object] = {
        "status": status,
        "result": {"exc_type": error_type, "exc_message": [message], "exc_module": module},
        "traceback": None,
        "children": [],
        "date_done": None,
        "task_id": task_id,
    }
    return json.dumps(document)


def pack_claimant(claimant: Claimant) -> str:
    """Return what ``claim.lua`` and ``renew.lua`` take of a message."""
    task_id, name, tier, lane, generation, submitted_at_s, expires_at_s, crash_limit, tier_first, hop, tenant = claimant
    limit = "" if crash_limit is None else crash_limit
    submitted = "" if submitted_at_s is None else submitted_at_s
    expires = "" if expires_at_s is None else expires_at_s
    first = tier_first or tier
    text = (
        f"{generation}\x1f{tier}\x1f{lane}\x1f{limit}\x1f{hop}\x1f{first}\x1f{task_id}\x1f{name}\x1f{submitted}"
        f"\x1f{expires}\x1f{tenant}"
    )
    if text.count(FIELD) == 10:
        return text
    return joined(generation, tier, lane, limit, hop, first, task_id, name, submitted, expires, tenant)


def unpack_claims(reply: object) -> list[Claim]:
    """Read the answer of ``claim.lua``."""
    head, *lines = as_text(reply).split(RECORD)
    now_text, until_text, token_text = head.split(FIELD)
    now_s, held_until_s, common_token = float(now_text), float(until_text), int(token_text)
    claims = []
    for line in lines:
        verdict, attempts, tier_first, *rest = line.split(FIELD)
        if verdict == "run":
            submitted, own_token = rest
            wait_s = max(0.0, now_s - float(submitted)) if submitted else None
            token = int(own_token) if own_token else common_token
            claims.append(Claim(Verdict.RUN, token, int(attempts), held_until_s, tier_first, wait_s))
        else:
            token_text, held, holder = rest
            until_s = float(held) if held else None
            known_token = int(token_text)
            claims.append(
                Claim(_VERDICTS[verdict], known_token, int(attempts), until_s, tier_first, None, holder or None)
            )
    return claims


def unpack_renewal(reply: object, task_ids: Sequence[str]) -> Renewal:
    """Read the answer of ``renew.lua`` to the renewal of these tasks."""
    lost, stopping, switched = as_text(reply).split(FIELD)
    found = switched.split(RECORD) if switched else []
    return Renewal(
        [task_ids[int(position) - 1] for position in lost.split(RECORD) if position],
        {task_ids[int(one.rstrip("!")) - 1]: one.endswith("!") for one in stopping.split(RECORD) if one},
        read_switches(dict(zip(found[::2], found[1::2], strict=True))),
    )


def unpack_run(reply: object) -> Run | None:
    """Read the answer of ``running.lua``; None where there is no record."""
    text = as_text(reply)
    if not text:
        return None
    should_stop, left = text.split(FIELD)
    return Run(should_stop == "1", _optional_float(left))


def unpack_crash(reply: object) -> Crash:
    """Read the answer of ``crashed.lua``."""
    crashes, over = as_text(reply).split(FIELD)
    return Crash(int(crashes), over == "1")


def _optional_float(text: str) -> float | None:
    return float(text) if text else None


def listed(text: str) -> tuple[str, ...]:
    """Read a list of ids, in their order."""
    return tuple(sorted(text.split(LISTED))) if text else ()


def unpack_record(task_id: str, line: str) -> TaskRecord | None:
    """Read one line of ``get.lua``; None where there is no record."""
    if not line:
        return None
    found: Sequence[str] = line.split(FIELD)
    error_type, error_message = found[16], found[17]
    error: TaskError | None = {"type": error_type, "message": error_message} if error_type else None
    return TaskRecord(
        id=task_id,
        state=found[0],
        name=found[1],
        tier=found[2],
        tier_first=found[3],
        lane=found[4],
        generation=int(found[5] or 0),
        attempts=int(found[6] or 0),
        failures=int(found[7] or 0),
        crashes=int(found[8] or 0),
        token=int(found[9]) if found[9] else None,
        worker=found[10] or None,
        submitted_at_s=_optional_float(found[11]),
        started_at_s=_optional_float(found[12]),
        finished_at_s=_optional_float(found[13]),
        expires_at_s=_optional_float(found[14]),
        held_until_s=_optional_float(found[15]),
        error=error,
        hop=int(found[18] or 0),
        ready_at_s=_optional_float(found[19]),
        due_at_s=_optional_float(found[20]),
        dead=found[21] or None,
        tenant=found[22] or None,
        cancel_asked=found[23] or None,
        tier_wanted=found[24] or None,
        lifted_from=found[25] or None,
        lifted_by=found[26] or None,
        not_lifted=found[27] or None,
        waits_for=listed(found[-1]),
    )


def unpack_beat(seen_at_s: object, beat: object) -> WorkerBeat:
    """Read one heartbeat of ``workers.lua``."""
    told = json.loads(as_text(beat))
    # A worker of a later version may tell more.
    found = {name: told[name] for name in _BEAT_FIELDS if name in told}
    found["tiers"] = tuple(found["tiers"])
    found["running"] = tuple(RunningTask(**one) for one in found.get("running", ()))
    waits = found.get("waits_60s", {})
    found["waits_60s"] = {tier: {int(place): n for place, n in row.items()} for tier, row in waits.items()}
    found["seen_at_s"] = float(as_text(seen_at_s))
    return WorkerBeat(**found)


_COUNTED_NAMES = ("admitted", *State, *(f"dead:{kind}" for kind in DeadKind))


REFUSED = "refused:"
"""What the counts of refused submits begin with; the reason follows."""


def full_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Return a tier's counts with every name of ``Accounts``."""
    return {str(name): counts.get(name, 0) for name in _COUNTED_NAMES}


def unpack_accounts(reply: Sequence[Sequence[object]]) -> Accounts:
    """Read the answer of ``accounts.lua``."""
    counted, away = ([as_text(one) for one in found] for found in reply)
    since_s = None
    by_tier: dict[str, dict[str, int]] = {}
    refused: dict[str, dict[str, int]] = {}
    for field, value in zip(counted[::2], counted[1::2], strict=True):
        tier, _, name = field.partition(":")
        if field == "since_s":
            since_s = float(value)
        elif name.startswith(REFUSED):
            refused.setdefault(tier, {})[name.removeprefix(REFUSED)] = int(value)
        else:
            by_tier.setdefault(tier, {})[name] = int(value)
    return Accounts(
        since_s,
        {tier: full_counts(counts) for tier, counts in sorted(by_tier.items()) if any(counts.values())},
        {tier: int(number) for tier, number in zip(away[::2], away[1::2], strict=True) if int(number)},
        refused,
    )


def drain_rates(beats: Iterable[WorkerBeat]) -> dict[str, float]:
    """Return {tier: tasks per second that the workers start, or would if there were more}, where that is known.

    A worker starts a tier's tasks as fast as it has been seen to, and in what time its slots have been idle as fast as
    their mean cost allows: the rate of an idle tier says how little there was to do, not how much can be done. Without
    idle time this is the measured rate. A tier of which no task has ended lately has none.
    """
    rates: dict[str, float] = {}
    for beat in beats:
        used_s = sum(sum(row.values()) for row in beat.slot_s_60s.values())
        for tier, per_s in beat.started_per_s.items():
            starts = sum(beat.starts_60s.get(tier, {}).values())
            tier_s = sum(beat.slot_s_60s.get(tier, {}).values())
            if not (per_s > 0 and starts and tier_s > 0):
                continue
            span_s = starts / per_s
            slots = beat.slots if tier == "realtime" else beat.slots - beat.reserve
            idle_s = max(0.0, slots * span_s - used_s)
            rates[tier] = rates.get(tier, 0.0) + per_s + idle_s / span_s * starts / tier_s
    return rates


def summed_rates(beats: Iterable[WorkerBeat]) -> dict[str, float]:
    """Return {tier: starts per second} over all workers."""
    rates: dict[str, float] = {}
    for beat in beats:
        for tier, per_s in beat.started_per_s.items():
            rates[tier] = rates.get(tier, 0.0) + per_s
    return rates
