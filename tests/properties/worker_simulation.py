"""A worker of several slots whose tasks take as long as they are told, driven by events instead of a clock."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush

from inference_routing.lane import LANE_NAMES, QueueKey, reserved_queues
from inference_routing.picker import Picker
from inference_routing.policy import Policy, default_policy
from inference_routing.tier import TIER_NAMES

QUEUES = tuple(QueueKey(tier, lane, f"test.{tier}.{lane}") for tier in TIER_NAMES for lane in LANE_NAMES)
FRESH_QUEUES = tuple(key for key in QUEUES if key.lane == "fresh")


def counting_policy() -> Policy:
    policy = default_policy()
    return Policy(policy.tiers, share="count")


def start_order(picker: Picker, starts: int, among: Collection[QueueKey] = FRESH_QUEUES) -> list[QueueKey]:
    """Pick, start and finish that many tasks one after the other; everything offered is backlogged."""
    order = []
    for _ in range(starts):
        pick = picker.pick(0.0, among)
        assert pick is not None
        picker.finished(pick, 1.0)
        order.append(pick.key)
    return order


@dataclass
class Run:
    """What happened: tasks as (tier, start, end) in the order of their starts."""

    tasks: list[tuple[str, float, float]] = field(default_factory=list)

    def slot_s(self, from_s: float, to_s: float) -> dict[str, float]:
        """Slot seconds of each tier between two times."""
        total = dict.fromkeys(TIER_NAMES, 0.0)
        for tier, start_s, end_s in self.tasks:
            total[tier] += max(0.0, min(end_s, to_s) - max(start_s, from_s))
        return total

    def most_at_once(self, tiers: Collection[str]) -> int:
        """Greatest number of slots that the tiers held at one time."""
        edges = sorted(edge for tier, start, end in self.tasks if tier in tiers for edge in ((start, 1), (end, -1)))
        held = most = 0
        for _, step in edges:
            held += step
            most = max(most, held)
        return most


def simulate(
    picker: Picker,
    *,
    slots: int,
    until_s: float,
    cost_s: Callable[[str, float], float],
    predicted_s: Callable[[str, float], float] | None = None,
    is_backlogged: Callable[[str, float], bool] = lambda tier, now_s: True,
    reserve: int = 0,
) -> Run:
    """Keep every slot busy with the fresh queues' work until ``until_s``.

    Args:
        picker: The picker under test.
        slots: Slots of the worker.
        until_s: No task starts after this.
        cost_s: Length of a task of the tier that starts at the time.
        predicted_s: What the worker expects it to be; by default its length.
        is_backlogged: Whether the tier has work at the time.
        reserve: How many slots serve realtime only.
    """
    run = Run()
    ends: list[tuple[float, int]] = []
    running = {}
    free = list(range(slots))
    now_s = 0.0
    while now_s < until_s:
        for key in FRESH_QUEUES:
            if not is_backlogged(key.tier, now_s):
                picker.mark_empty(key)
        ready = tuple(key for key in FRESH_QUEUES if is_backlogged(key.tier, now_s))
        for slot in sorted(free, reverse=True):
            pick = picker.pick(now_s, reserved_queues(ready) if slot < reserve else ready)
            if pick is None:
                continue
            free.remove(slot)
            length_s = cost_s(pick.key.tier, now_s)
            picker.predicted(pick, (predicted_s or cost_s)(pick.key.tier, now_s))
            picker.started(pick, now_s)
            running[slot] = (pick, now_s, length_s)
            run.tasks.append((pick.key.tier, now_s, now_s + length_s))
            heappush(ends, (now_s + length_s, slot))
        if not ends:
            now_s += 0.001
            continue
        now_s, slot = heappop(ends)
        pick, _, length_s = running.pop(slot)
        picker.finished(pick, length_s)
        free.append(slot)
    return run
