"""Why a task is where it is: one sentence for people, the same as data, from one look at Redis.

What waits is told from the indices that Redis keeps, so the figures are those of the moment; when a task will start is
an estimate from the rate at which the workers start tasks of its tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from inference_routing.aging import rises
from inference_routing.lane import AGED, LANE_NAMES
from inference_routing.tier import REALTIME
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.errors import TaskNotFoundError
from inference_tasks.observe import wording
from inference_tasks.state.packing import drain_rates
from inference_tasks.state.records import State, TaskError, WorkerBeat

if TYPE_CHECKING:
    from inference_routing.policy import Policy
    from inference_tasks.app import Inference
    from inference_tasks.state.scenes import Scene

__all__ = ["Surroundings", "Why", "expected_wait_s", "explain", "surroundings_of", "why"]


@dataclass(frozen=True, slots=True)
class Why:
    """Why a task is where it is. Moments are unix seconds by the Redis server's clock.

    Attributes:
        reason: ``queued``, ``fetched`` (listed in no queue: a worker has it at hand, or it is on its way to another
            queue), ``paused``, ``no worker``, ``workers paused``, ``running``, ``lost`` (its worker is silent),
            ``retrying``, ``delayed``, ``dependencies``, ``dead``, or an end state.
        sentence: for people.
        at_s: the moment of this look.
        position: its place in its queue, from 1.
        queue_waiting: how many wait in that queue.
        ahead_by_tier: {tier: tasks that wait there, of its own queue only those before it}. Tiers are served side by
            side by their shares: these are the tasks that compete, not all of them come first.
        share: of the slots that its tier gets while all tiers have work, 0 to 1.
        starts_per_s: how fast the workers start tasks of its tier, or would.
        expected_start_at_s: an estimate; None if it cannot be told.
        promotion_at_s: when it moves into the tier ``promotion_to``, if it waits until then; may have passed.
        due_at_s: when the broker lets a parked one go.
        waits_for: {id of a task that must succeed first: its state}.
        workers: live workers that serve its tier; ``slots`` those of them that may run it.
        worker: that runs it, or ran it last.
        switch: what an operator has switched off, so that it does not start.
        dead_letter: where its message lies, and how it came there.
    """

    id: str
    task: str
    state: str
    reason: str
    sentence: str
    at_s: float
    tier: str
    tier_first: str
    lane: str
    queue: str | None = None
    position: int | None = None
    queue_waiting: int | None = None
    ahead_by_tier: Mapping[str, int] = field(default_factory=dict)
    share: float | None = None
    starts_per_s: float | None = None
    expected_start_at_s: float | None = None
    promotion_at_s: float | None = None
    promotion_to: str | None = None
    due_at_s: float | None = None
    expires_at_s: float | None = None
    waits_for: Mapping[str, str] = field(default_factory=dict)
    workers: int = 0
    slots: int = 0
    attempts: int = 0
    worker: str | None = None
    started_at_s: float | None = None
    finished_at_s: float | None = None
    error: TaskError | None = None
    switch: Mapping[str, object] | None = None
    dead_letter: Mapping[str, object] | None = None

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is the same for every task of an app: its queues, {(tier, lane): queue}, and its tiers."""

    queue_by_lane: Mapping[tuple[str, str], str]
    policy: Policy
    has_promotions: bool = True

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues, in a fixed order."""
        return tuple(self.queue_by_lane.values())


def surroundings_of(inference: Inference) -> Surroundings:
    """Return those of an app; the embedded broker moves nothing up."""
    has_promotions = not is_embedded(inference.settings.broker.url)
    return Surroundings(inference.queue_by_lane, inference.policy, has_promotions)


def why(inference: Inference, task_id: str) -> Why:
    """Explain where a task is, by one round trip.

    Raises:
        TaskNotFoundError: it was never accepted, or finished too long ago.
        StateUnavailableError: Redis does not answer.
    """
    around = surroundings_of(inference)
    scene = inference.store.scene(task_id, around.queues)
    if scene is None:
        raise TaskNotFoundError(task_id)
    return explain(scene, around)


def explain(scene: Scene, around: Surroundings) -> Why:
    """Explain what was seen."""
    record = scene.record
    found = Why(
        id=record.id,
        task=record.name,
        state=record.state,
        reason=record.state,
        sentence="",
        at_s=scene.at_s,
        tier=record.tier,
        tier_first=record.tier_first,
        lane=record.lane,
        due_at_s=record.due_at_s,
        expires_at_s=record.expires_at_s,
        attempts=record.attempts,
        worker=record.worker,
        started_at_s=record.started_at_s,
        finished_at_s=record.finished_at_s,
        error=record.error,
    )
    if record.is_finished:
        found = _ended(found, scene)
    elif record.state == State.PROCESSING:
        is_held = record.held_until_s is not None and record.held_until_s > scene.at_s
        found = replace(found, reason="running" if is_held else "lost")
    elif record.state == State.WAITING:
        found = replace(found, reason="dependencies", waits_for={**dict.fromkeys(record.waits_for, ""), **scene.needs})
    elif record.due_at_s is not None and record.due_at_s > scene.at_s:
        found = _served(replace(found, reason="retrying" if record.attempts else "delayed"), scene)
    else:
        found = _queued(found, scene, around)
    return replace(found, sentence=wording.sentence(found, scene))


def _ended(found: Why, scene: Scene) -> Why:
    if found.state != State.FAILED or scene.letter is None:
        return found
    letter = {name: getattr(scene.letter, name) for name in ("reason", "detail", "is_replayable", "dead_at_s")}
    return replace(found, reason="dead", dead_letter=letter)


def _served(found: Why, scene: Scene) -> Why:
    serving = [beat for beat in scene.workers if found.tier in beat.tiers]
    return replace(found, workers=len(serving), slots=sum(_slots(beat, found) for beat in serving))


def _slots(beat: WorkerBeat, found: Why) -> int:
    is_reserved_for = found.tier == REALTIME and found.lane != AGED
    return max(0, beat.slots - (0 if is_reserved_for else beat.reserve))


def _queued(found: Why, scene: Scene, around: Surroundings) -> Why:
    queue = around.queue_by_lane.get((found.tier, found.lane))
    own = scene.places.get(queue or "")
    ahead = own.ahead if own else None
    found = replace(
        _served(found, scene),
        queue=queue,
        position=None if ahead is None else ahead + 1,
        queue_waiting=own.waiting if own else None,
        ahead_by_tier=_ahead(found, scene, around, ahead),
        share=float(around.policy.effective_shares().get(found.tier, 0)),
    )
    found = _promoted(found, scene, around)
    switch = scene.switches.stopped(found.tier, found.lane)
    if switch is not None:
        return replace(found, reason="paused", switch=switch.as_dict())
    if ahead is None:
        return replace(found, reason="fetched")
    if not found.slots:
        return replace(found, reason="no worker")
    able = [beat for beat in scene.workers if found.tier in beat.tiers and not _is_off(beat, scene)]
    if not sum(_slots(beat, found) for beat in able):
        return replace(found, reason="workers paused")
    rate = drain_rates(able).get(found.tier)
    if not rate:
        return replace(found, reason="queued")
    waiting = {
        lane: scene.places[name].waiting
        for (tier, lane), name in around.queue_by_lane.items()
        if tier == found.tier and name in scene.places and not scene.switches.stopped(tier, lane)
    }
    wait_s = expected_wait_s(found.lane, ahead, waiting, around.policy.lane_weights, rate)
    return replace(
        found, reason="queued", starts_per_s=round(rate, 4), expected_start_at_s=round(scene.at_s + wait_s, 3)
    )


def _is_off(beat: WorkerBeat, scene: Scene) -> bool:
    return beat.state != "running" or scene.switches.worker(beat.node) is not None


def _ahead(found: Why, scene: Scene, around: Surroundings, ahead: int | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (tier, lane), queue in around.queue_by_lane.items():
        place = scene.places.get(queue)
        if place is not None:
            is_own = (tier, lane) == (found.tier, found.lane) and ahead is not None
            counts[tier] = counts.get(tier, 0) + (ahead or 0 if is_own else place.waiting)
    return counts


def _promoted(found: Why, scene: Scene, around: Surroundings) -> Why:
    """Tell when it would rise, unless something keeps it from that."""
    rise = next((one for one in rises(around.policy) if one.tier == found.tier), None)
    since_s = scene.record.ready_at_s
    if rise is None or since_s is None or not around.has_promotions:
        return found
    if scene.switches.stopped(found.tier, found.lane) or scene.switches.of(rise.above, AGED):
        return found
    return replace(found, promotion_at_s=since_s + rise.after_s, promotion_to=rise.above)


def expected_wait_s(
    lane: str, ahead: int, waiting: Mapping[str, int], weights: Mapping[str, int | float], per_s: float
) -> float:
    """Return in how many seconds a task starts that has ``ahead`` tasks before it in its lane.

    The lanes of a tier share its starts by weight, as long as something waits in them; what an empty one leaves goes to
    the others. Tasks that come later are left out.

    Args:
        lane: of the task.
        ahead: tasks before it in its queue.
        waiting: {lane of the tier: tasks that wait in it}.
        weights: {lane: weight}.
        per_s: starts per second of the whole tier.
    """
    left = {one: float(waiting.get(one, 0)) for one in LANE_NAMES if one != lane}
    own, wait_s = float(ahead), 0.0
    while own > 1e-9:
        active = [one for one, number in left.items() if number > 1e-9]
        total = sum(weights[one] for one in (lane, *active))
        step_s = own * total / (per_s * weights[lane])
        for one in active:
            step_s = min(step_s, left[one] * total / (per_s * weights[one]))
        own -= step_s * per_s * weights[lane] / total
        for one in active:
            left[one] -= step_s * per_s * weights[one] / total
        wait_s += step_s
    return wait_s
