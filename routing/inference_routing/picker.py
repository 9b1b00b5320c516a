"""Which queue a free slot serves next.

One picker belongs to one worker, and the simulator drives the same class. It is told the time and what was measured; it
reads no clock, does no IO and starts no thread. It is not thread-safe: its owner calls it from one thread.
"""

from collections.abc import Collection, Iterable
from math import inf
from typing import Final

from inference_routing.cost import CostModel
from inference_routing.hierarchy import Offer, OfferedTier, QueueNode, build, least_queue, offer_of
from inference_routing.lane import QueueKey
from inference_routing.policy import Policy

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
# Why bounded: callers that pass a new collection each time must not fill the memory.
_KEPT_OFFERS: Final = 256


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

    def __init__(self, number: int, queue: QueueNode, reason: str) -> None:
        self.id = number
        self.key = queue.key
        self.reason = reason
        self._queue: QueueNode | None = queue
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
    * A tier that was idle gets no credit for it, but goes first in a tie with lower ones: its first start may come one
      window early. An idle tier's share is lent to the others by their shares.
    * ``found_empty`` leaves the state as if the pick had not been made, except that the queue is idle.

    Not promised: shares across several workers, shares while a tier is kept from slots by a reserve (it is owed what it
    misses and gets it from the slots that may serve it), preemption.

    Cost: `pick` about 3 µs for 3 tiers of 3 lanes and 4 µs with 64 queues in a lane, plus 1 µs for each running task
    that has outrun its prediction; the others about 1 µs. All arithmetic is in whole numbers (starts, or nanoseconds of
    slot time), so that a charge can be taken back without a trace.
    """

    def __init__(self, policy: Policy, queues: Iterable[QueueKey], costs: CostModel | None = None) -> None:
        """Make a picker for the queues that the worker serves at all.

        A worker that does not serve some tier leaves its queues out here. A queue competes from the first time that it
        is offered to `pick`.

        Args:
            policy: Weights, floors, and what they divide.
            queues: In any order; ties are broken in the order of the policy's tiers and lanes.
            costs: What is charged before the kind of the message is known comes from here. The caller feeds it. Without
                one the picker keeps its own and learns the mean of each tier from `finished`.

        Raises:
            ValueError: No queue, a queue twice, or one whose tier or lane the policy does not have.
        """
        keys = tuple(queues)
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"expected one or more different queues, found {list(map(tuple, keys))}")
        self.policy = policy
        self._is_by_time = policy.share == "time"
        self._costs = CostModel() if costs is None else costs
        self._is_learning = costs is None
        self._tiers, self._tier_tags = build(policy, keys)
        self._queue_by_key = {queue.key: queue for tier in self._tiers for lane in tier.lanes for queue in lane.queues}
        self._bits_by_key = {key: queue.bit for key, queue in self._queue_by_key.items()}
        self._ready = 0
        self._epoch = 0
        self._picks = 0
        self._running: dict[int, Pick] = {}
        self._due_at_s = inf
        self._offer_by_bits: dict[int, Offer] = {}
        self._kept: dict[int, tuple[Collection[QueueKey], int]] = {}

    def pick(self, now_s: float, among: Collection[QueueKey]) -> Pick | None:
        """Decide which queue the free slot serves and charge it tentatively.

        Args:
            now_s: The caller's monotonic clock; the same clock as for `started`.
            among: Queues that this slot may serve and that are not known to be empty. An idle queue that is offered
                counts as ready again and re-enters at the current virtual time. Leaving a queue out does not make it
                idle: only `found_empty` and `mark_empty` do. A tuple or frozenset that is passed again is not read
                again.

        Returns:
            An open pick, or None if ``among`` is empty.

        Raises:
            ValueError: ``among`` holds a queue that the picker was not made for.
        """
        if now_s >= self._due_at_s:
            self._charge_overdue(now_s)
        kept = self._kept.get(id(among))
        bits = kept[1] if kept is not None else self._bits(among)
        if bits & ~self._ready:
            self._set_ready(bits & ~self._ready)
        offer = self._offer_by_bits.get(bits)
        if offer is None:
            offer = self._offer(bits)
        tags = self._tier_tags
        least = inf
        chosen: OfferedTier | None = None
        for offered in offer:
            if tags[offered.place] < least:
                chosen, least = offered, tags[offered.place]
        if chosen is None:
            return None
        queue = least_queue(chosen)
        self._picks += 1
        pick = Pick(self._picks, queue, ALONE if len(offer) == 1 else LEAST_SERVED)
        self._recharge(pick, queue, _units(self._costs.tier_mean_s(queue.key.tier)) if self._is_by_time else 1)
        return pick

    def found_empty(self, pick: Pick) -> None:
        """Take the pick back whole: its queue had nothing, and is idle until it is marked ready or offered."""
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
            self._recharge(pick, queue, _units(cost_s))
            if self._is_learning:
                self._costs.observe("", queue.key.tier, cost_s)

    def mark_empty(self, key: QueueKey) -> None:
        """Say that the queue is known to be empty: it is idle until it is marked ready or offered."""
        self._set_idle(self._queue(key))

    def mark_ready(self, key: QueueKey) -> None:
        """Say that the queue may have work: it re-enters at the current virtual time. No effect if it is ready."""
        bit = self._queue(key).bit
        if not self._ready & bit:
            self._set_ready(bit)

    def is_ready(self, key: QueueKey) -> bool:
        """Say whether the queue was offered or marked ready, and not found empty since."""
        return bool(self._ready & self._queue(key).bit)

    def shares(self) -> dict[str, float]:
        """Return ``{tier: ratio}`` of all that was ever charged, open picks included; zeros before the first pick."""
        total = sum(tier.charged_units for tier in self._tiers)
        return {tier.name: tier.charged_units / total if total else 0.0 for tier in self._tiers}

    def _recharge(self, pick: Pick, queue: QueueNode, units: int) -> None:
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

    def _begin(self, pick: Pick, queue: QueueNode) -> None:
        pick._epoch = self._epoch
        for flow in queue.path:
            flow.unstarted -= pick._units

    def _open(self, pick: Pick) -> QueueNode:
        if pick._queue is None:
            raise ClosedPickError(f"expected an open pick, found {pick!r}")
        return pick._queue

    def _close(self, pick: Pick) -> QueueNode:
        queue = self._open(pick)
        pick._queue = None
        self._running.pop(pick.id, None)
        return queue

    def _queue(self, key: QueueKey) -> QueueNode:
        queue = self._queue_by_key.get(key)
        if queue is None:
            raise ValueError(f"expected a queue that the picker was made for, found {tuple(key)}")
        return queue

    def _set_ready(self, bits: int) -> None:
        self._ready |= bits
        self._epoch += 1
        for queue in self._queue_by_key.values():
            if queue.bit & bits:
                for flow in queue.path:
                    if not flow.active:
                        flow.enter(self._epoch)

    def _set_idle(self, queue: QueueNode) -> None:
        self._ready &= ~queue.bit
        for flow, bits in zip(queue.path, (queue.tier.bits, queue.lane.bits, queue.bit), strict=False):
            if flow.active and not bits & self._ready:
                flow.leave()

    def _bits(self, among: Collection[QueueKey]) -> int:
        bits = 0
        try:
            for key in among:
                bits |= self._bits_by_key[key]
        except KeyError as error:
            raise ValueError(f"expected queues that the picker was made for, found {tuple(error.args[0])}") from None
        if isinstance(among, (tuple, frozenset)) and len(among) > 1:
            if len(self._kept) >= _KEPT_OFFERS:
                self._kept.clear()
            # Invariant: the key is the identity of `among`, so `among` is kept alive with it.
            self._kept[id(among)] = among, bits
        return bits

    def _offer(self, bits: int) -> Offer:
        if len(self._offer_by_bits) >= _KEPT_OFFERS:
            self._offer_by_bits.clear()
        offer = self._offer_by_bits[bits] = offer_of(self._tiers, bits)
        return offer


def _units(cost_s: float) -> int:
    units = int(cost_s * _UNITS_PER_S)
    return units if units > _LEAST_UNITS else _LEAST_UNITS
