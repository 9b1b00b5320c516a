"""The tree of tiers, lanes and queues in which a picker looks for the smallest tags."""

from typing import NamedTuple

from inference_routing.floor import exact
from inference_routing.lane import QueueKey
from inference_routing.policy import Policy
from inference_routing.virtual_time import Flow, Level, strides


class TierNode:
    """A tier: its flow among the tiers, the level on which its lanes compete, and the bits of all its queues."""

    __slots__ = ("bits", "charged_units", "flow", "lanes", "level", "name")

    def __init__(self, name: str, flow: Flow, level: Level) -> None:
        self.name = name
        self.flow = flow
        self.level = level
        self.lanes: list[LaneNode] = []
        self.bits = 0
        self.charged_units = 0


class LaneNode:
    """A lane: its flow among the tier's lanes, its queues, and their tags."""

    __slots__ = ("bits", "flow", "queues", "tags")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.tags: list[float] = []
        self.queues: list[QueueNode] = []
        self.bits = 0


class QueueNode:
    """A queue: its bit in sets of queues, and the flows that are charged for it, from the tier down."""

    __slots__ = ("bit", "key", "lane", "path", "tier")

    def __init__(self, key: QueueKey, tier: TierNode, lane: LaneNode, path: tuple[Flow, ...], bit: int) -> None:
        self.key = key
        self.tier = tier
        self.lane = lane
        self.path = path
        self.bit = bit


class OfferedLane(NamedTuple):
    """What a slot may serve of a lane; ``places`` is None where that is all of it."""

    place: int
    lane: LaneNode
    places: tuple[int, ...] | None


class OfferedTier(NamedTuple):
    """What a slot may serve of a tier, and where the tier's tag lies."""

    place: int
    lane_tags: list[float]
    lanes: tuple[OfferedLane, ...]


Offer = tuple[OfferedTier, ...]
"""What a slot may serve of the whole tree, in the order that breaks ties."""


def least_queue(offered: OfferedTier) -> QueueNode:
    """Return the queue that is served when the tier is: smallest lane tag, then smallest queue tag."""
    lanes = offered.lanes
    chosen = lanes[0]
    if len(lanes) > 1:
        tags = offered.lane_tags
        least = tags[chosen.place]
        for candidate in lanes:
            if tags[candidate.place] < least:
                chosen, least = candidate, tags[candidate.place]
    lane = chosen.lane
    if chosen.places is None:
        return lane.queues[lane.tags.index(min(lane.tags))]
    if len(chosen.places) == 1:
        return lane.queues[chosen.places[0]]
    return lane.queues[min(chosen.places, key=lane.tags.__getitem__)]


def build(policy: Policy, keys: tuple[QueueKey, ...]) -> tuple[list[TierNode], list[float]]:
    """Make the tree for these queues and return its tiers with their tags; all flows are idle.

    Raises:
        ValueError: A queue has a tier or lane that the policy does not have, or the floors do not fit.
    """
    known = {tier.name for tier in policy.tiers}
    for key in keys:
        if key.tier not in known or key.lane not in policy.lane_weights:
            raise ValueError(f"expected a tier and lane of the policy, found queue {tuple(key)}")
    served = policy.serving({key.tier for key in keys})
    tier_strides = strides(served.effective_shares())
    tier_level = Level(tier_strides.values())
    tiers: list[TierNode] = []
    bit = 1
    for tier_name, tier_flow in zip(tier_strides, tier_level.flows, strict=True):
        keys_by_lane = {
            lane: keys_of_lane
            for lane in policy.lane_weights
            if (keys_of_lane := [key for key in keys if key.tier == tier_name and key.lane == lane])
        }
        lane_strides = strides({lane: exact(policy.lane_weights[lane]) for lane in keys_by_lane})
        tier = TierNode(tier_name, tier_flow, Level(lane_strides.values()))
        tiers.append(tier)
        for lane_keys, lane_flow in zip(keys_by_lane.values(), tier.level.flows, strict=True):
            lane = LaneNode(lane_flow)
            tier.lanes.append(lane)
            queue_level = Level([1] * len(lane_keys))
            lane.tags = queue_level.tags
            for key, queue_flow in zip(lane_keys, queue_level.flows, strict=True):
                # Why not always three flows: a queue alone in its lane competes with nobody.
                path = (tier_flow, lane_flow) if len(lane_keys) == 1 else (tier_flow, lane_flow, queue_flow)
                lane.queues.append(QueueNode(key, tier, lane, path, bit))
                lane.bits |= bit
                bit <<= 1
            tier.bits |= lane.bits
    return tiers, tier_level.tags


def offer_of(tiers: list[TierNode], bits: int) -> Offer:
    """Work out where to look when a slot may serve the queues of ``bits``; constant while the tree is."""
    return tuple(
        OfferedTier(
            place,
            tier.level.tags,
            tuple(_lane_part(place, lane, bits) for place, lane in enumerate(tier.lanes) if bits & lane.bits),
        )
        for place, tier in enumerate(tiers)
        if bits & tier.bits
    )


def _lane_part(place: int, lane: LaneNode, bits: int) -> OfferedLane:
    places = tuple(place for place, queue in enumerate(lane.queues) if bits & queue.bit)
    return OfferedLane(place, lane, None if len(places) == len(lane.queues) > 1 else places)
