"""The words in which it is told why a task is where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference_tasks.state.scenes import NEEDS_SHOWN

if TYPE_CHECKING:
    from inference_tasks.observe.why import Why
    from inference_tasks.state.scenes import Scene

__all__ = ["sentence", "span"]

_NEEDS_NAMED = 3


def span(seconds: float) -> str:
    """Return a duration as people say it."""
    amount = max(0.0, seconds)
    if amount < 1:
        return "less than a second"
    if amount < 100:
        return f"{amount:.0f} s"
    if amount < 100 * 60:
        return f"{amount / 60:.0f} min"
    if amount < 48 * 3600:
        return f"{amount / 3600:.1f} h"
    return f"{amount / 86400:.1f} days"


def sentence(found: Why, scene: Scene) -> str:
    """Return what is the matter with a task; ``found`` lacks only this."""
    told = {
        "running": _running,
        "lost": _lost,
        "dependencies": _dependencies,
        "retrying": _parked,
        "delayed": _parked,
        "paused": _paused,
        "fetched": _fetched,
        "no worker": _unserved,
        "workers paused": _unserved,
        "queued": _queued,
    }
    return told.get(found.reason, _ended)(found, scene)


def _ended(found: Why, scene: Scene) -> str:
    when = "" if found.finished_at_s is None else f" {span(scene.at_s - found.finished_at_s)} ago"
    error = f"{found.error['type']}: {found.error['message']}" if found.error else ""
    match found.reason:
        case "success":
            return f"It succeeded{when}, at attempt {found.attempts}."
        case "cancelled":
            return f"It was cancelled{when}."
        case "expired":
            return f"It was not started: its deadline had passed when its turn came{when}."
        case "dropped":
            return f"It was dropped{when}{f' ({error})' if error else ''}; it will not run."
        case "dead":
            letter = found.dead_letter or {}
            what = (
                "It can be replayed." if letter.get("is_replayable") else "It can never run, so it cannot be replayed."
            )
            why = f" with {error}" if error else ""
            return f"It failed{when}{why}, and lies in the dead letters ({letter.get('reason')}). {what}"
        case _:
            return f"It failed{when}, at attempt {found.attempts}{f': {error}' if error else ''}."


def _running(found: Why, scene: Scene) -> str:
    since = "" if found.started_at_s is None else f" for {span(scene.at_s - found.started_at_s)}"
    asked = scene.record.cancel_asked
    stop = " It was asked to stop." if asked == "stop" else " It is to be terminated." if asked else ""
    attempt = f", attempt {found.attempts}" if found.attempts > 1 else ""
    return f"It is running{since}{attempt}.{stop}"


def _lost(found: Why, scene: Scene) -> str:
    return (
        "It was running, but its worker has been silent for longer than its claim holds; it starts again when the "
        "broker hands its message to another worker."
    )


def _dependencies(found: Why, scene: Scene) -> str:
    needs = list(found.waits_for)
    named = ", ".join(f"{one} ({found.waits_for[one] or 'unknown'})" for one in needs[:_NEEDS_NAMED])
    more = len(needs) - _NEEDS_NAMED
    others = "" if more <= 0 else f" and {more} more"
    what = "1 task" if len(needs) == 1 else f"{len(needs)} tasks"
    if not needs:
        return "All that it waited for has succeeded; it is on its way into its queue."
    beside = "" if len(needs) <= NEEDS_SHOWN else f" (the states of {NEEDS_SHOWN} are told)"
    return f"It waits for {what} to succeed first{beside}: {named}{others}."


def _parked(found: Why, scene: Scene) -> str:
    left = span((found.due_at_s or scene.at_s) - scene.at_s)
    if found.reason == "delayed":
        return f"It was submitted with a delay: it comes into {found.tier} in {left}."
    error = f" after {found.error['type']}: {found.error['message']}" if found.error else ""
    return f"It is to be tried again in {left}, attempt {found.attempts + 1}{error}."


def _place(found: Why) -> str:
    if found.position is None:
        return f"It waits in {found.tier}"
    of = max(found.queue_waiting or 0, found.position)
    return f"It waits in {found.tier} ({found.lane}), number {found.position} of {of}"


def _paused(found: Why, scene: Scene) -> str:
    switch = scene.switches.stopped(found.tier, found.lane)
    assert switch is not None  # the reason says so
    because = f": {switch.because}" if switch.because else ""
    return (
        f"{_place(found)}, but {switch.name} was paused {span(scene.at_s - switch.at_s)} ago{because}. "
        "It starts when an operator resumes it."
    )


def _fetched(found: Why, scene: Scene) -> str:
    return f"It is about to start, or on its way into a queue of {found.tier}: no queue lists it at this moment."


def _unserved(found: Why, scene: Scene) -> str:
    if found.reason == "workers paused":
        return f"{_place(found)}, but every worker that serves {found.tier} is paused or draining."
    if found.workers:
        return f"{_place(found)}, but every slot of the workers that serve {found.tier} is reserved for realtime."
    return f"{_place(found)}, but no live worker serves {found.tier}.{_rise(found, scene)}"


def _queued(found: Why, scene: Scene) -> str:
    parts = [f"{_place(found)}."]
    others = {tier: number for tier, number in found.ahead_by_tier.items() if tier != found.tier and number}
    if others:
        beside = " and ".join(f"{number} in {tier}" for tier, number in others.items())
        share = f", of which {found.tier} gets {found.share:.0%}" if found.share else ""
        parts.append(f"Besides, {beside} wait for the same slots{share}.")
    if found.expected_start_at_s is None:
        workers = "the worker that serves it has" if found.workers == 1 else "the workers that serve it have"
        parts.append(f"When it starts cannot be told: {workers} ended no task of its tier in the last minute.")
    else:
        left_s = found.expected_start_at_s - scene.at_s
        rate = _rate(found.starts_per_s or 0.0)
        parts.append(f"The workers start {rate} of {found.tier}, so it should start in {span(left_s)}.")
    if found.expires_at_s is not None and (
        found.expected_start_at_s is None or found.expires_at_s < found.expected_start_at_s
    ):
        parts.append(f"It is not started later than in {span(found.expires_at_s - scene.at_s)}: that is its deadline.")
    return " ".join(parts) + _rise(found, scene)


def _rate(per_s: float) -> str:
    return f"{per_s:.3g} a second" if per_s >= 1 else f"{per_s * 60:.3g} a minute"


def _rise(found: Why, scene: Scene) -> str:
    if found.promotion_at_s is None:
        return ""
    left_s = found.promotion_at_s - scene.at_s
    if left_s <= 0:
        return f" It has waited long enough to move up to {found.promotion_to}."
    return f" If it still waits in {span(left_s)}, it moves up to {found.promotion_to}."
