"""Which tier, and so which queue, a task goes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from inference_routing.tier import UnknownTierError as CoreUnknownTierError
from inference_routing.tier import tier_name
from inference_tasks.errors import UnknownTierError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["HEADER", "Choice", "TierRouter", "choose", "full_tier_name", "running_tenant"]

HEADER = "inference"
"""The one message header of ours."""


class Choice(NamedTuple):
    """The tier of one submit.

    Attributes:
        tier: where it goes.
        asked: the tier that somebody asked for at this call or at the submit that started the canvas, else None. It
            travels in the header, so that later steps of the canvas follow it.
        by_worker: whether a running task publishes it; then it is admitted work and goes to the ``returned`` lane.
    """

    tier: str
    asked: str | None
    by_worker: bool

    @property
    def lane(self) -> str:
        """The lane for this submit."""
        return "returned" if self.by_worker else "fresh"


def full_tier_name(text: str) -> str:
    """Resolve a tier's name or alias.

    Raises:
        UnknownTierError: there is no such tier; the message names the nearest one.
    """
    try:
        return tier_name(text)
    except CoreUnknownTierError as error:
        raise UnknownTierError(text) from error


def choose(app: Celery, at_call: object, of_task: str | None, default: str) -> Choice:
    """Choose the tier: asked for at the call > at the submit that started the canvas > of the task > the default."""
    running = app.current_worker_task
    asked = full_tier_name(at_call) if isinstance(at_call, str) else None
    by_worker = False
    if running is not None and not running.request.is_eager:
        by_worker = True
        ours = (running.request.headers or {}).get(HEADER)
        inherited = ours.get("asked") if isinstance(ours, Mapping) else None
        if asked is None and isinstance(inherited, str):
            asked = full_tier_name(inherited)
    return Choice(asked or of_task or default, asked, by_worker)


def running_tenant(app: Celery) -> str | None:
    """Return for whom the task is that runs here; what it submits is for the same, unless it says otherwise."""
    running = app.current_worker_task
    ours = (running.request.headers or {}).get(HEADER) if running is not None else None
    tenant = ours.get("tenant") if isinstance(ours, Mapping) else None
    return tenant if isinstance(tenant, str) and tenant else None


class TierRouter:
    """Celery's ``task_routes`` entry that leads every task without a route of its own to its tier's queue."""

    def __init__(self, app: Celery, default_tier: str, queue_by_lane: Mapping[tuple[str, str], str]) -> None:
        self._app = app
        self._default_tier = default_tier
        self._queue_by_lane = queue_by_lane

    def __call__(
        self,
        name: str,
        args: object = None,
        kwargs: object = None,
        options: Mapping[str, object] | None = None,
        task: object = None,
        **_: object,
    ) -> dict[str, object] | None:
        """Return the queue for one call, in the form Celery's router wants, or None if the call names its own."""
        options = options or {}
        if options.get("queue") or options.get("exchange") or options.get("routing_key"):
            return None
        choice = choose(self._app, options.get("tier"), getattr(task, "tier", None), self._default_tier)
        return {"queue": self._queue_by_lane[choice.tier, choice.lane]}
