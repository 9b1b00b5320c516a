"""The sub-queues inside a tier, and which of them a reserved slot may serve.

Accepted work is never refused later, so it cannot come back through the bounded ``fresh`` lane:

* ``fresh``     bounded; first submits.
* ``returned``  unbounded; work that was accepted before: due retries, replays, steps published by a worker.
* ``aged``      unbounded; work promoted from the tier below, and its retries.

Inside a tier the lanes share by weight as the tiers do; the unused share of an empty lane is lent to the others. The
low weight of ``aged`` lets promoted work rise without drowning the tier that it rises into.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from inference_routing.tier import REALTIME

FRESH: Final = "fresh"
RETURNED: Final = "returned"
AGED: Final = "aged"

LANE_NAMES: Final[tuple[str, str, str]] = (FRESH, RETURNED, AGED)

DEFAULT_LANE_WEIGHTS: Final[Mapping[str, int]] = MappingProxyType({FRESH: 4, RETURNED: 4, AGED: 1})


class QueueKey(NamedTuple):
    """One queue as the picker sees it.

    Attributes:
        tier: Tier that the queue's work is charged to.
        lane: Lane of that tier; several queues may share a lane, then they take turns.
        name: Name of the queue at the broker.
    """

    tier: str
    lane: str
    name: str


def may_serve_reserved(key: QueueKey) -> bool:
    """Say whether a reserved slot may serve this queue.

    Only the ``fresh`` and ``returned`` lanes of ``realtime``: promoted batch work in ``aged`` may run long, and a
    reserve that is held by it would not be there when an online request comes.
    """
    return key.tier == REALTIME and key.lane != AGED


def reserved_queues(queues: Iterable[QueueKey]) -> tuple[QueueKey, ...]:
    """Return those of ``queues`` that a reserved slot may serve, in the given order.

    Compute it once and pass the same tuple to every `Picker.pick` for a reserved slot.
    """
    return tuple(key for key in queues if may_serve_reserved(key))
