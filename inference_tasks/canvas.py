"""Steps of a canvas that run at the tier of a later one, which asks for it with ``lifts_canvas``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from inference_routing.tier import TIER_NAMES, UnknownTierError, tier_name

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["inherited_tier"]


def inherited_tier(app: Celery, embed: object, tier: str, default_tier: str) -> str:
    """Return the tier for a step: its own, or the highest of the later steps that lift it.

    Args:
        app: of whose tasks the steps are.
        embed: what Celery puts into the step's message beside its arguments: the rest of its chain, and its chord.
        tier: the step's own.
        default_tier: of tasks without one.
    """
    if not isinstance(embed, Mapping) or not (embed.get("chain") or embed.get("chord")):
        return tier
    later = [*_steps(embed.get("chain")), *_steps(embed.get("chord"))]
    tiers = [found for step in later if (found := _lifting_tier(app, step, default_tier)) is not None]
    return min([tier, *tiers], key=TIER_NAMES.index)


def _steps(found: object) -> Iterator[Mapping[str, object]]:
    """Walk through signatures, as Celery writes them: tasks, and groups, chains and chords of them."""
    if isinstance(found, list | tuple):
        for one in found:
            yield from _steps(one)
    elif isinstance(found, Mapping):
        yield found
        kwargs, options = found.get("kwargs"), found.get("options")
        if isinstance(kwargs, Mapping) and found.get("subtask_type"):
            for part in ("tasks", "header", "body"):
                yield from _steps(kwargs.get(part))
        if isinstance(options, Mapping):
            for part in ("chain", "chord"):
                yield from _steps(options.get(part))


def _lifting_tier(app: Celery, step: Mapping[str, object], default_tier: str) -> str | None:
    task = app.tasks.get(str(step.get("task")))
    if not getattr(task, "lifts_canvas", False):
        return None
    options = step.get("options")
    asked = options.get("tier") if isinstance(options, Mapping) else None
    try:
        return tier_name(str(asked or getattr(task, "tier", None) or default_tier))
    except UnknownTierError:
        # It is refused when its own turn comes.
        return None
