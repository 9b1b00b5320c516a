"""What a worker takes from the broker, and how: asked for message by message, or pushed while it is idle."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from inference_routing.cost import COLD_START_S
from inference_routing.lane import FRESH, QueueKey, may_serve_reserved, reserved_queues
from inference_routing.tier import REALTIME
from inference_tasks.observe.events import emit

if TYPE_CHECKING:
    from inference_routing.picker import Pick, Picker
    from inference_tasks.worker.floors import FloorWatch
    from inference_tasks.worker.slots import Slots
    from inference_tasks.worker.source import Source

__all__ = ["Demand", "Wish"]

#: Part of ``hold_s`` that is filled with picks; the rest is for hiccups and for what the broker sends ahead.
PICKED_PART = 0.5
#: Asking for less than this part of the window waits for more to ask for.
FEW = 3
#: Most messages asked for or held at once, however short the tasks are.
MAX_WINDOW = 64
#: Seconds for which a queue found empty is not asked again, while others hold something: the fresh lane of realtime,
#: those of the other tiers, and the lanes of work that was accepted long ago.
RECHECK_REALTIME_S, RECHECK_FRESH_S, RECHECK_OTHER_S = 0.005, 0.05, 0.1
#: When a queue was found empty that nobody has looked at yet.
NEVER_S = float("-inf")
#: A push sooner than this after its subscription says that the queue has a backlog.
BACKLOG_PUSH_S = 0.005
#: Messages that need not run, taken in a row from one tier before the next tier is tried.
MAX_DISCARDS = 64
#: Idle seconds after which every lane is subscribed, and the longest time between two looks at one.
LANES_S = 0.25
#: A queue whose channel was lost (missing, or its consumer timed out) is left alone this long.
MISSING_S = 1.0
#: Weight of the newest cost in the mean that the window is computed from.
SMOOTHING = 0.1


class Wish(NamedTuple):
    """A queue to ask for one message, as picked; without a pick, to look at whether it is still empty."""

    key: QueueKey
    pick: Pick | None


class Demand:
    """How many messages there is room for, which queues to ask, and what is known to be empty.

    A queue is *empty* from the moment it was found so, until a message came from it. While some queue is believed to
    hold something, the picker says which to ask, and empty ones are looked at again now and then. When none is, exactly
    those that the free slots may serve are subscribed, one message each.
    """

    def __init__(
        self,
        source: Source,
        picker: Picker,
        slots: Slots,
        queues: Collection[QueueKey],
        *,
        hold_s: float,
        clock: Callable[[], float],
        floors: FloorWatch | None = None,
    ) -> None:
        self.source = source
        self.hold_s = hold_s
        self._picker = picker
        self._slots = slots
        self._clock = clock
        self._floors = floors
        self._keys = {key.name: key for key in queues}
        self._all = tuple(queues)
        self._reserved = reserved_queues(queues)
        self._off: set[QueueKey] = set()
        self._empty: dict[QueueKey, float] = {}
        self._looking: set[QueueKey] = set()
        self._subscribed: dict[str, float] = {}
        self._discarded_in_a_row = 0
        self._skip_tier: str | None = None
        self._idle_since_s: float | None = None
        self._mean_s = COLD_START_S
        self._apart_s = 0.0
        self._started_at_s = 0.0
        self.forget_all()

    @property
    def is_subscribed(self) -> bool:
        return bool(self._subscribed)

    def key(self, queue: str) -> QueueKey:
        return self._keys[queue]

    def observe(self, cost_s: float, tier: str) -> None:
        """A task has kept its slot this long."""
        if self._floors is not None:
            self._floors.ended(tier, cost_s, self._slots.ready)
        self._mean_s += SMOOTHING * (cost_s - self._mean_s)

    def started(self, now: float, tier: str, *, had_more: bool) -> None:
        """A task takes a slot at this moment; ``had_more`` if others are held, so that nothing was waited for."""
        if self._floors is not None:
            self._floors.started(tier, has_work=self._has_work, has_lower=self._slots.free_lower > 0)
        # Waiting for the broker is no reason to ask for less: without others held the limit fades.
        apart_s = min(now - self._started_at_s, 1.0) if had_more else 0.0
        self._apart_s += SMOOTHING * (apart_s - self._apart_s)
        self._started_at_s = now

    def _has_work(self, tier: str) -> bool:
        return any(key.tier == tier and key not in self._empty for key in self._all)

    def discarded(self, tier: str) -> None:
        """A message needed no run."""
        if self._floors is not None:
            self._floors.interrupted(tier)
        self._discarded_in_a_row += 1
        if self._discarded_in_a_row % MAX_DISCARDS == 0:
            self._skip_tier = tier

    def kept(self) -> None:
        """A message does need its run."""
        self._discarded_in_a_row = 0

    def overdue(self, count: int) -> None:
        """Messages had to go back, having waited too long: half as many are held next."""
        emit("task.returned", count=count)
        self._apart_s = max(self._apart_s, 2 * self.hold_s / max(1, count))

    # -- what is empty -------------------------------------------------------------------------------------------------

    def looked(self, key: QueueKey, *, found: bool) -> None:
        """A queue believed to be empty has told whether it is."""
        if found:
            self.filled(key)
        else:
            self._looking.discard(key)
            if key in self._empty:  # else it is not served any more, or it was found filled in another way
                self._empty[key] = max(self._clock(), self._empty[key])

    def found_empty(self, key: QueueKey, pick: Pick | None) -> None:
        """A queue that was asked had nothing; ``pick`` is None where that was taken back meanwhile."""
        emit("queue.asked", tier=key.tier, lane=key.lane, outcome="empty")
        if self._floors is not None and not any(
            one.tier == key.tier and one != key and one not in self._empty for one in self._all
        ):
            self._floors.interrupted(key.tier)
        if pick is not None:
            self._picker.found_empty(pick)
        if key not in self._off:
            # One that is missing is left alone for longer.
            self._empty[key] = max(self._clock(), self._empty.get(key, NEVER_S))

    def found(self, key: QueueKey) -> None:
        """A queue that was asked had a message."""
        emit("queue.asked", tier=key.tier, lane=key.lane, outcome="message")
        self.filled(key)

    def _pick_of(self, key: QueueKey) -> Pick:
        pick = self._picker.pick(self._clock(), (key,))
        assert pick is not None  # a queue that is offered counts as ready
        return pick

    def emptied(self, key: QueueKey, at_s: float) -> None:
        if key not in self._off:
            self._empty[key] = at_s
        self._picker.mark_empty(key)

    def filled(self, key: QueueKey) -> None:
        self._looking.discard(key)
        if key not in self._off and self._empty.pop(key, None) is not None:
            self._picker.mark_ready(key)

    def missing(self, queue: str) -> None:
        """The queue cannot be read for now."""
        self._subscribed.pop(queue, None)
        self._looking.discard(self._keys[queue])
        self.emptied(self._keys[queue], self._clock() + MISSING_S)

    def forget_all(self) -> None:
        """A new connection: nothing is known of any queue. The fresh lanes are taken to hold something."""
        self._subscribed.clear()
        self._looking.clear()
        for key in self._all:
            if key.lane == FRESH:
                self.filled(key)
            else:
                self.emptied(key, NEVER_S)

    # -- how many, and which -------------------------------------------------------------------------------------------

    def _window(self, now: float) -> int:
        """How many messages may be inside the worker: free slots, and starts predicted within ``hold_s``."""
        free = self._slots.free
        if not self.hold_s:
            return free
        each_s = max(self._mean_s, 1e-4)
        ahead_s = self.hold_s * PICKED_PART
        starts = free * int(ahead_s / each_s)
        for ticket in self._slots:
            elapsed = now - ticket.started_s
            left = ticket.predicted_s - elapsed
            if left < 0:
                left = elapsed  # overdue: as much again, not any moment now
            if left <= self.hold_s:
                starts += 1 + max(0, int((ahead_s - left) / each_s))
        # Where the worker itself cannot keep up with its slots, what it really starts per second is the limit.
        return min(MAX_WINDOW, free + min(starts, int(ahead_s / max(self._apart_s, 1e-4))))

    def wanted(self, inside: int, inside_lower: int, asked: int, now: float) -> list[Wish]:
        """Return what to ask for now, in order; subscribes instead where there is nothing to ask for.

        Args:
            inside: messages in the worker that have not started, and those asked for.
            inside_lower: those of them that a reserved slot may not run.
            asked: how many of them are asked for.
            now: the worker's clock.
        """
        free = self._slots.free
        window = self._window(now)
        want = window - inside
        if want <= 0 or (want < window // FEW and free <= inside):
            return []
        if self._subscribed:
            self.subscribe(inside, now)
            return []
        # Messages that need not run take no slot: after some of them in a row more are fetched at once.
        want = min(MAX_WINDOW, want + self._discarded_in_a_row)
        lower = want if not self._slots.reserve else self._lower_room(window, inside_lower)
        wishes = self._wishes(want, lower, now)
        if wishes:
            self._idle_since_s = None
        elif free > inside and not asked:
            self.subscribe(inside, now)
        return wishes

    def _wishes(self, want: int, lower: int, now: float) -> list[Wish]:
        """First looks at queues that may no longer be empty, then picks among those believed to hold something.

        A look is no pick: were the picker asked, each look in vain would shift the order of what is picked meanwhile.
        With no queue believed to hold anything there is nothing to ask: it is pushed instead.
        """
        skip, self._skip_tier = self._skip_tier, None
        among = self._all if lower > 0 else self._reserved
        filled = [key for key in among if key not in self._empty and key.tier != skip]
        if not filled and skip is not None:
            filled = [key for key in among if key not in self._empty]
        wishes: list[Wish] = []
        for key, found_s in self._empty.items():
            if len(wishes) == want or (lower <= 0 and not may_serve_reserved(key)) or key in self._looking:
                continue
            if found_s == NEVER_S or (filled and now - found_s >= _recheck_s(key)):
                wishes.append(Wish(key, None))
                self._looking.add(key)
                lower -= not may_serve_reserved(key)
        while len(wishes) < want and filled:
            pick = self._picker.pick(now, filled)
            if pick is None:
                break
            wishes.append(Wish(pick.key, pick))
            if not may_serve_reserved(pick.key):
                lower -= 1
                if lower == 0:
                    filled = [key for key in filled if may_serve_reserved(key)]
        return wishes

    def _lower_room(self, window: int, inside: int) -> int:
        ready = self._slots.ready or 1
        ahead = max(0, window - self._slots.free) * max(0, ready - self._slots.reserve) // ready
        return self._slots.free_lower + ahead - inside

    # -- pushes --------------------------------------------------------------------------------------------------------

    def pushed(self, queue: str, inside: int, *, may_take: bool) -> Pick | None:
        """A message was pushed: its pick, or None if it comes too late and must go back."""
        key, now = self._keys[queue], self._clock()
        since = self._subscribed.pop(queue, None)
        if since is not None:
            self.source.unsubscribe([queue])
        if key in self._off:
            return None
        room = (self._slots.free if may_serve_reserved(key) else self._slots.free_lower) - inside
        self._picker.mark_ready(key)
        if room <= 0 or not may_take:
            self.filled(key)
            return None
        pick = self._pick_of(key)
        if room == 1 or since is None or now - since < BACKLOG_PUSH_S:
            # No room for more, or more is waiting than pushes one by one can bring in the right shares.
            self.unsubscribe()
            self.filled(key)
            self._idle_since_s = None
        else:
            self.emptied(key, now)
        return pick

    def subscribe(self, inside: int, now: float) -> None:
        """Nothing to fetch: have it pushed, from exactly the queues that the free slots may serve.

        The lanes beside ``fresh`` are left out at first, unless nobody has looked for ``LANES_S``: on a quorum queue a
        subscription is an entry in its log, and a busy worker comes and goes many times a second.
        """
        if self._idle_since_s is None:
            self._idle_since_s = now
        idle = now - self._idle_since_s >= LANES_S
        lower = self._slots.free_lower > inside
        wanted = {
            key.name
            for key in (self._all if lower else self._reserved)
            if self._empty.get(key, now) <= now  # else it is missing, and left alone for a while
            and (idle or key.lane == FRESH or now - self._empty.get(key, 0.0) >= LANES_S)
        }
        stale = [name for name in self._subscribed if name not in wanted and self._keys[name].lane == FRESH]
        if stale:
            self._forget(stale, now)
            self.source.unsubscribe(stale)
        new = [name for name in wanted if name not in self._subscribed]
        if new:
            self._subscribed.update((name, now) for name in new)
            self.source.subscribe(new)

    def _forget(self, names: Collection[str], now: float) -> None:
        for name in names:
            del self._subscribed[name]
            self.emptied(self._keys[name], now)

    def unsubscribe(self) -> None:
        if self._subscribed:
            names = list(self._subscribed)
            self._forget(names, self._clock())
            self.source.unsubscribe(names)

    def serve(self, queue: str, *, on: bool) -> QueueKey | None:
        """Start or stop serving one queue; returns its key if that changed anything.

        One that is not served is idle to the picker: it earns no credit meanwhile, and lends its share.
        """
        key = self._keys.get(queue)
        if key is None or (key not in self._off) == on:
            return None
        if on:
            self._off.discard(key)
            self.emptied(key, NEVER_S)
        else:
            self._off.add(key)
            self._empty.pop(key, None)
            self._looking.discard(key)
            self._picker.mark_empty(key)
        self._all = tuple(one for one in self._keys.values() if one not in self._off)
        self._reserved = reserved_queues(self._all)
        if self._subscribed.pop(queue, None) is not None:
            self.source.unsubscribe([queue])
        return key


def _recheck_s(key: QueueKey) -> float:
    if key.lane != FRESH:
        return RECHECK_OTHER_S
    return RECHECK_REALTIME_S if key.tier == REALTIME else RECHECK_FRESH_S
