"""Which queue a free slot serves next.

One picker belongs to one worker, and the simulator drives the same class. It is told the time and what was measured; it
reads no clock, does no IO and starts no thread. It is not thread-safe: its owner calls it from one thread.
"""

from collections.abc import Collection, Iterable
from math import inf
from typing import Final, NamedTuple

from inference_routing.cost import COLD_START_S, MovingMean
from inference_routing.floor import exact
from inference_routing.lane import QueueKey
from inference_routing.policy import Policy
from inference_routing.virtual_time import Flow, Level, strides

__all__ = ["ALONE", "LEAST_SERVED", "ClosedPickError", "Pick", "Picker", "QueueKey"]

LEAST_SERVED: Final = "least-served"
"""Reason: of the tiers that had work for the slot, this one is furthest behind its share."""

ALONE: Final = "alone"
"""Reason: no other tier had work for the slot."""

_UNITS_PER_S: Final = 1_000_000_000
# Why at least this much: a tier whose tasks measure 0 s would never lose its turn.
_LEAST_UNITS: Final = 1_000
# Invariant: later than every epoch, so a pick that has not started is charged and refunded as work of now.
_UNSTARTED: Final = 1 << 62
_KEPT_OFFERS: Final = 64


class ClosedPickError(ValueError):
    """A pick was settled twice: a bug of the caller, and the second charge would be wrong."""


class Pick:
    """The decision which queue a free slot serves; open until it is settled with the picker that made it.

    Attributes:
        id: Number of this pick, counted from 1 by its picker.
        key: The queue to take one message from.
        reason: `LEAST_SERVED` or `ALONE`.
    """

    __slots__ = ("_due_at_s", "_epoch", "_queue", "_started_at_s", "_units", "id", "key", "reason")

    def __init__(self, number: int, queue: "_Queue", reason: str) -> None:
        self.id = number
        self.key = queue.key
        self.reason = reason
        self._queue: _Queue | None = queue
        self._units = 0
        self._epoch = _UNSTARTED
        self._started_at_s = 0.0
        self._due_at_s = inf

    def __repr__(self) -> str:
        state = "closed" if self._queue is None else "fetching" if self._epoch == _UNSTARTED else "running"
        return f"Pick(id={self.id}, key={tuple(self.key)}, reason={self.reason!r}, {state})"


class Picker:
    """Shares the slots of one worker between tiers, inside a tier between lanes, inside a lane between queues.

    Algorithm: hierarchical start-time fair queueing (Goyal, Vin and Cheng, 1996) with tags that advance by strides
    (stride scheduling, Waldspurger and Weihl, 1995); see `inference_routing.virtual_time`. A pick charges its queue at
    once with what the tier's tasks cost on average; `predicted`, `started` and `finished` correct the charge as more is
    known, `found_empty` and `refund` take it back whole. While a task runs it is charged the greater of prediction and
    elapsed time at every pick: otherwise one kind that runs 60 times longer than predicted would take every slot before
    its first correction.

    Promised, for a worker that serves all tiers, while they are backlogged:

    * ``share="count"``: the picks whose messages start hold exactly each tier's share in every window of the sum of the
      shares (8 + 2 + 1 = 11), in the order of picking, with any number of picks open. A pick that is taken back *after*
      others were made is made good at once, so windows across it differ by at most the number of picks made meanwhile.
    * ``share="time"``: slot seconds converge to the shares, whatever the costs and however many slots; at any time a
      tier is off by no more than what is running.
    * A tier that was idle gets no credit for it. An idle tier's share is lent to the others by their shares.
    * ``found_empty`` leaves the state as if the pick had not been made, except that the queue is idle.

    Not promised: shares across several workers, shares while a tier is kept from slots by a reserve (it is owed what it
    misses and gets it from the slots that may serve it), preemption.

    Cost: `pick` about 3 µs for 3 tiers of 3 lanes and 4 µs with 64 queues in a lane, plus 1 µs for each running task
    that has outrun its prediction; the others about 1 µs. All arithmetic is in whole numbers (starts, or nanoseconds of
    slot time), so that a charge can be taken back without a trace.
    """

    def __init__(self, policy: Policy, queues: Iterable[QueueKey]) -> None:
        """Make a picker for the queues that the worker serves at all; every queue is taken to be ready.

        A worker that does not serve some tier leaves its queues out here. A queue that is never offered to `pick` does
        not compete until it is.

        Raises:
            ValueError: No queue, a queue twice, or one whose tier or lane the policy does not have.
        """
        keys = tuple(queues)
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"expected one or more different queues, found {list(map(tuple, keys))}")
        self.policy = policy
        self._is_by_time = policy.share == "time"
        self._tiers = _build(policy, keys)
        self._queue_by_key = {queue.key: queue for tier in self._tiers for lane in tier.lanes for queue in lane.queues}
        self._tier_tags = self._tiers[0].level.tags
        self._ready = (1 << len(keys)) - 1
        self._offered = 0
        self._epoch = 0
        self._picks = 0
        self._running: dict[int, Pick] = {}
        self._due_at_s = inf
        self._offers: dict[int, tuple[Collection[QueueKey], _Offer]] = {}

    def pick(self, now_s: float, among: Collection[QueueKey]) -> Pick | None:
        """Decide which queue the free slot serves and charge it tentatively.

        Args:
            now_s: The caller's monotonic clock; the same clock as for `started`.
            among: Queues that this slot may serve. Those known to be empty may be left in; leaving a queue out does not
                make it idle. Pass the same tuple or frozenset each time: what was worked out for it is kept.

        Returns:
            An open pick, or None if no queue of ``among`` is ready.

        Raises:
            ValueError: ``among`` holds a queue that the picker was not made for.
        """
        if now_s >= self._due_at_s:
            self._charge_overdue(now_s)
        kept = self._offers.get(id(among))
        offer = kept[1] if kept is not None else self._offer(among)
        ready = self._ready
        tags = self._tier_tags
        least = inf
        reason = LEAST_SERVED
        chosen: _OfferedTier | None = None
        for offered in offer:
            if offered.bits & ready:
                if chosen is None:
                    reason = ALONE
                    chosen, least = offered, tags[offered.place]
                else:
                    reason = LEAST_SERVED
                    if tags[offered.place] < least:
                        chosen, least = offered, tags[offered.place]
        if chosen is None:
            return None
        queue = _least_queue(chosen, ready)
        self._picks += 1
        pick = Pick(self._picks, queue, reason)
        self._recharge(pick, queue, queue.tier.tentative_units)
        return pick

    def found_empty(self, pick: Pick) -> None:
        """Take the pick back whole: its queue had nothing, and is idle until `mark_ready`."""
        queue = self._close(pick)
        self._recharge(pick, queue, 0)
        self._set_idle(queue)

    def refund(self, pick: Pick) -> None:
        """Take the pick back whole: its message was discarded or returned without a start. The queue stays ready."""
        self._recharge(pick, self._close(pick), 0)

    def predicted(self, pick: Pick, cost_s: float) -> None:
        """Charge what the message's kind is expected to cost.

        Changes nothing under ``count``, or once the task has started.
        """
        queue = self._open(pick)
        if self._is_by_time and pick._epoch == _UNSTARTED:
            self._recharge(pick, queue, _units(cost_s))

    def started(self, pick: Pick, now_s: float) -> None:
        """Say that the task has its slot: from now on it is charged max(predicted, elapsed) at every pick."""
        queue = self._open(pick)
        if pick._epoch != _UNSTARTED:
            return
        self._begin(pick, queue)
        if self._is_by_time:
            pick._started_at_s = now_s
            pick._due_at_s = due_at_s = now_s + pick._units / _UNITS_PER_S
            self._running[pick.id] = pick
            if due_at_s < self._due_at_s:
                self._due_at_s = due_at_s

    def finished(self, pick: Pick, cost_s: float) -> None:
        """Say that the slot is free again, and charge what was measured. Under ``count`` the charge stays one start."""
        queue = self._close(pick)
        if pick._epoch == _UNSTARTED:
            self._begin(pick, queue)
        if self._is_by_time:
            units = _units(cost_s)
            self._recharge(pick, queue, units)
            queue.tier.learn(units)

    def mark_empty(self, key: QueueKey) -> None:
        """Say that the queue is known to be empty; an idle queue is never picked."""
        self._set_idle(self._queue(key))

    def mark_ready(self, key: QueueKey) -> None:
        """Say that the queue may have work: it re-enters at the current virtual time. No effect if it is ready."""
        queue = self._queue(key)
        if not self._ready & queue.bit:
            self._ready |= queue.bit
            if self._offered & queue.bit:
                self._activate(queue)

    def is_ready(self, key: QueueKey) -> bool:
        """Say whether the queue counts as ready."""
        return bool(self._ready & self._queue(key).bit)

    def shares(self) -> dict[str, float]:
        """Return ``{tier: ratio}`` of all that was ever charged, open picks included; zeros before the first pick."""
        total = sum(tier.charged_units for tier in self._tiers)
        return {tier.name: tier.charged_units / total if total else 0.0 for tier in self._tiers}

    def _recharge(self, pick: Pick, queue: "_Queue", units: int) -> None:
        change = units - pick._units
        if change:
            pick._units = units
            epoch = pick._epoch
            queue.tier.charged_units += change
            for flow in queue.path:
                if epoch == _UNSTARTED:
                    flow.unstarted += change
                flow.charge(change, epoch)

    def _charge_overdue(self, now_s: float) -> None:
        next_due_at_s = inf
        for pick in self._running.values():
            due_at_s = pick._due_at_s
            if due_at_s <= now_s and pick._queue is not None:
                self._recharge(pick, pick._queue, max(pick._units, int((now_s - pick._started_at_s) * _UNITS_PER_S)))
                pick._due_at_s = due_at_s = now_s
            if due_at_s < next_due_at_s:
                next_due_at_s = due_at_s
        self._due_at_s = next_due_at_s

    def _begin(self, pick: Pick, queue: "_Queue") -> None:
        pick._epoch = self._epoch
        for flow in queue.path:
            flow.unstarted -= pick._units

    def _open(self, pick: Pick) -> "_Queue":
        if pick._queue is None:
            raise ClosedPickError(f"expected an open pick, found {pick!r}")
        return pick._queue

    def _close(self, pick: Pick) -> "_Queue":
        queue = self._open(pick)
        pick._queue = None
        self._running.pop(pick.id, None)
        return queue

    def _queue(self, key: QueueKey) -> "_Queue":
        queue = self._queue_by_key.get(key)
        if queue is None:
            raise ValueError(f"expected a queue that the picker was made for, found {tuple(key)}")
        return queue

    def _activate(self, queue: "_Queue") -> None:
        self._epoch += 1
        for flow in queue.path:
            if not flow.active:
                flow.enter(self._epoch)

    def _set_idle(self, queue: "_Queue") -> None:
        self._ready &= ~queue.bit
        active = self._ready & self._offered
        if queue.flow is not None and queue.flow.active:
            queue.flow.leave()
        if queue.lane.flow.active and not active & queue.lane.bits:
            queue.lane.flow.leave()
        if queue.tier.flow.active and not active & queue.tier.bits:
            queue.tier.flow.leave()

    def _offer(self, among: Collection[QueueKey]) -> "_Offer":
        queues = [self._queue(key) for key in among]
        for queue in queues:
            if not self._offered & queue.bit:
                self._offered |= queue.bit
                if self._ready & queue.bit:
                    self._activate(queue)
        offer = _work_out(self._tiers, sum({queue.bit for queue in queues}))
        if isinstance(among, (tuple, frozenset)):
            if len(self._offers) >= _KEPT_OFFERS:
                self._offers.clear()
            # Invariant: the key is the identity of `among`, so `among` is kept alive with it.
            self._offers[id(among)] = among, offer
        return offer


class _Tier:
    """A tier's flow, its lanes, and what its tasks cost on average."""

    __slots__ = ("_mean", "bits", "charged_units", "flow", "lanes", "level", "name", "tentative_units")

    def __init__(self, name: str, flow: Flow, level: Level, is_by_time: bool) -> None:
        self.name = name
        self.flow = flow
        self.level = level
        self.lanes: list[_Lane] = []
        self.bits = 0
        self.charged_units = 0
        self.tentative_units = _units(COLD_START_S) if is_by_time else 1
        self._mean = MovingMean()

    def learn(self, units: int) -> None:
        self._mean.add(units)
        self.tentative_units = max(int(self._mean.value), _LEAST_UNITS)


class _Lane:
    __slots__ = ("bits", "flow", "level", "name", "queues", "tags")

    def __init__(self, name: str, flow: Flow, level: Level) -> None:
        self.name = name
        self.flow = flow
        self.level = level
        self.tags: list[float] = []
        self.queues: list[_Queue] = []
        self.bits = 0


class _Queue:
    __slots__ = ("bit", "flow", "key", "lane", "path", "tier")

    def __init__(self, key: QueueKey, tier: _Tier, lane: _Lane, flow: Flow | None, bit: int) -> None:
        self.key = key
        self.tier = tier
        self.lane = lane
        self.flow = flow
        self.path = (tier.flow, lane.flow) if flow is None else (tier.flow, lane.flow, flow)
        self.bit = bit


class _OfferedLane(NamedTuple):
    bits: int
    place: int
    lane: _Lane


class _OfferedTier(NamedTuple):
    bits: int
    place: int
    lane_tags: list[float]
    lanes: tuple[_OfferedLane, ...]


_Offer = tuple[_OfferedTier, ...]


def _least_queue(offered: _OfferedTier, ready: int) -> _Queue:
    tags = offered.lane_tags
    least = inf
    chosen: _OfferedLane | None = None
    for candidate in offered.lanes:
        if candidate.bits & ready and tags[candidate.place] < least:
            chosen, least = candidate, tags[candidate.place]
    assert chosen is not None
    lane = chosen.lane
    queues = lane.queues
    if len(queues) == 1:
        return queues[0]
    bits = chosen.bits & ready
    queue_tags = lane.tags
    if bits == lane.bits & ready:
        return queues[queue_tags.index(min(queue_tags))]
    return min((queue for queue in queues if queue.bit & bits), key=lambda queue: queue_tags[queues.index(queue)])


def _build(policy: Policy, keys: tuple[QueueKey, ...]) -> list[_Tier]:
    known = {tier.name for tier in policy.tiers}
    for key in keys:
        if key.tier not in known or key.lane not in policy.lane_weights:
            raise ValueError(f"expected a tier and lane of the policy, found queue {tuple(key)}")
    served = policy.serving({key.tier for key in keys})
    tier_strides = strides(served.effective_shares())
    tier_level = Level(list(tier_strides.values()))
    tiers: list[_Tier] = []
    bit = 1
    for tier_name, tier_flow in zip(tier_strides, tier_level.flows, strict=True):
        tier = _Tier(tier_name, tier_flow, tier_level, policy.share == "time")
        tiers.append(tier)
        keys_by_lane = {
            lane: keys_of_lane
            for lane in policy.lane_weights
            if (keys_of_lane := [key for key in keys if key.tier == tier_name and key.lane == lane])
        }
        lane_strides = strides({lane: exact(policy.lane_weights[lane]) for lane in keys_by_lane})
        lane_level = Level(list(lane_strides.values()))
        for (lane_name, lane_keys), lane_flow in zip(keys_by_lane.items(), lane_level.flows, strict=True):
            lane = _Lane(lane_name, lane_flow, lane_level)
            tier.lanes.append(lane)
            queue_flows: list[Flow | None] = [None]
            if len(lane_keys) > 1:
                queue_level = Level([1] * len(lane_keys))
                queue_flows = list(queue_level.flows)
                lane.tags = queue_level.tags
            for key, queue_flow in zip(lane_keys, queue_flows, strict=True):
                lane.queues.append(_Queue(key, tier, lane, queue_flow, bit))
                lane.bits |= bit
                bit <<= 1
            tier.bits |= lane.bits
    return tiers


def _work_out(tiers: list[_Tier], bits: int) -> _Offer:
    return tuple(
        _OfferedTier(
            bits & tier.bits,
            tier_index,
            tier.lanes[0].level.tags,
            tuple(
                _OfferedLane(bits & lane.bits, lane_index, lane)
                for lane_index, lane in enumerate(tier.lanes)
                if bits & lane.bits
            ),
        )
        for tier_index, tier in enumerate(tiers)
        if bits & tier.bits
    )


def _units(cost_s: float) -> int:
    units = int(cost_s * _UNITS_PER_S)
    return units if units > _LEAST_UNITS else _LEAST_UNITS
