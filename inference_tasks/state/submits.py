"""How submits travel to the scripts that take work in, and back; see ``packing``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from inference_tasks.state import keys
from inference_tasks.state.packing import FIELD, RECORD, joined
from inference_tasks.state.records import (
    CONFLICT,
    DEPENDENCY_CYCLE,
    DEPENDENCY_FAILED,
    DEPENDENCY_UNKNOWN,
    LATE,
    NewTask,
    State,
    SubmitAnswer,
)
from inference_tasks.state.script import as_text

__all__ = ["brought_together", "pack_bounds", "pack_submit", "parted", "unpack_submit"]


def pack_submit(prefix: str, tasks: Iterable[NewTask], *, script: str = "submit") -> tuple[list[str], list[str]]:
    """Return the records' keys, and what ``submit.lua``, or what else ``parted`` names, takes of each task."""
    names: list[str] = []
    args: list[str] = []
    for task in tasks:
        task_id, name, tier, tier_first, lane, generation, nonce = task[:7]
        submitted_at_s, expires_at_s, _, hop, due_at_s, tenant, max_ahead, shared, depends_on, message = task[7:]
        names.append(keys.task(prefix, task_id))
        expires = "" if expires_at_s is None else _from_now(expires_at_s, submitted_at_s)
        due = "" if due_at_s is None else _from_now(due_at_s, submitted_at_s)
        refusable = 1 if task.may_be_refused else 0
        ahead = "" if max_ahead is None else max_ahead
        text = (
            f"{name}\x1f{tier}\x1f{tier_first}\x1f{lane}\x1f{generation}\x1f{nonce}\x1f{expires}\x1f{due}\x1f{hop}"
            f"\x1f{refusable}\x1f{tenant}\x1f{ahead}\x1f{message}"
        )
        if text.count(FIELD) != 12:
            fields = (
                name,
                tier,
                tier_first,
                lane,
                generation,
                nonce,
                expires,
                due,
                hop,
                refusable,
                tenant,
                ahead,
                message,
            )
            text = joined(*fields)
        args.append(text)
        if script == "depend":
            args.append(FIELD.join(depends_on))
        elif script == "submit_shared":
            args.append(str(len(shared)))
            for key in shared:
                args += (keys.shared(prefix, key.digest), str(max(1, math.ceil(key.window_s))), repr(key.reuse_s))
                args.append(key.print)
    return names, args


def parted(tasks: Sequence[NewTask]) -> dict[str, list[NewTask]]:
    """Return the tasks by the script that takes them in, so that what few of them need costs the others nothing."""
    found: dict[str, list[NewTask]] = {}
    for task in tasks:
        found.setdefault(_script_for(task), []).append(task)
    return found


def brought_together(tasks: Iterable[NewTask], answers: Mapping[str, Iterable[SubmitAnswer]]) -> list[SubmitAnswer]:
    """Return the answers to the tasks that ``parted`` has parted, in the order of all."""
    following = {script: iter(found) for script, found in answers.items()}
    return [next(following[_script_for(task)]) for task in tasks]


def _script_for(task: NewTask) -> str:
    if task.depends_on:
        return "depend"
    return "submit_shared" if task.shared else "submit"


def _from_now(at_s: float, from_s: float | None) -> str:
    """Only a distance travels where both ends are known: the client's clock may be wrong."""
    return repr(at_s) if from_s is None else f"+{at_s - from_s:.6f}"


def pack_bounds(bounds: Mapping[str, int]) -> str:
    """Return the tiers' bounds as ``submit.lua`` takes them."""
    return FIELD.join(f"{tier}{FIELD}{bound}" for tier, bound in bounds.items())


def unpack_submit(reply: object) -> list[SubmitAnswer]:
    """Read the answer of ``submit.lua`` or ``submit_shared.lua``."""
    created = SubmitAnswer(True, State.PENDING)
    return [created if state == "+pending" else _answer(state) for state in as_text(reply).split(RECORD)]


_BLOCKED = {"unknown": DEPENDENCY_UNKNOWN, "failed": DEPENDENCY_FAILED, "cycle": DEPENDENCY_CYCLE}


def _answer(text: str) -> SubmitAnswer:
    if text == "+waiting":
        return SubmitAnswer(True, State.WAITING)
    why, _, rest = text.partition(FIELD)
    if rest and why in _BLOCKED:
        need, _, its_state = rest.partition(FIELD)
        return SubmitAnswer(False, _BLOCKED[why], dependency=need, dependency_state=its_state)
    if text.startswith("late:"):
        return SubmitAnswer(False, LATE, ahead=int(float(text[5:])))
    if text.startswith("conflict"):
        return SubmitAnswer(False, CONFLICT, shares=text.partition(FIELD)[2])
    if text.startswith("="):
        state, task_id, is_unsure, lift = text[1:].split(FIELD)
        return SubmitAnswer(False, state, shares=task_id, is_unsure=is_unsure == "1", lift=lift)
    return SubmitAnswer(False, text)
