"""Decides which work runs next: no IO, no clock, no environment; time and measurements are arguments."""

from inference_routing.admission import Admission, Admitted, Rejected, retry_after_s
from inference_routing.backoff import Backoff
from inference_routing.cost import CostModel
from inference_routing.floor import effective_shares
from inference_routing.lane import AGED, FRESH, LANE_NAMES, RETURNED, QueueKey, may_serve_reserved, reserved_queues
from inference_routing.picker import ClosedPickError, Pick, Picker
from inference_routing.policy import Policy, default_policy
from inference_routing.tier import BATCH, OFFLINE, REALTIME, TIER_NAMES, Tier, UnknownTierError, tier_name
from inference_routing.topology import (
    BindingSpec,
    Difference,
    ExchangeSpec,
    PolicySpec,
    QueueSpec,
    Topology,
    build_topology,
    differences,
)

# Grouped by the question they answer, not by the alphabet.
__all__ = [  # noqa: RUF022
    # Which classes of service there are.
    "REALTIME", "BATCH", "OFFLINE", "TIER_NAMES", "Tier", "tier_name", "UnknownTierError",
    # Which sub-queues a tier has.
    "FRESH", "RETURNED", "AGED", "LANE_NAMES", "QueueKey", "may_serve_reserved", "reserved_queues",
    # What is shared, and how.
    "Policy", "default_policy", "effective_shares", "CostModel",
    # Which queue a free slot serves.
    "Picker", "Pick", "ClosedPickError",
    # What a submit is answered.
    "Admission", "Admitted", "Rejected", "retry_after_s",
    # When a failed task is tried again.
    "Backoff",
    # What the broker holds.
    "Topology", "ExchangeSpec", "QueueSpec", "BindingSpec", "PolicySpec", "Difference", "build_topology", "differences",
]  # fmt: skip
