"""The dispatcher against a broker and a clock in memory: late binding, shares, returns."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import pytest

from inference_routing.cost import CostModel
from inference_routing.lane import QueueKey
from inference_routing.picker import Picker
from inference_routing.policy import default_policy
from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.records import Claim, Claimant, Verdict
from inference_tasks.worker.demand import MISSING_S
from inference_tasks.worker.dispatcher import ANSWER_S, Dispatcher
from inference_tasks.worker.floors import FloorWatch
from inference_tasks.worker.intake import Intake, Unfit
from inference_tasks.worker.slots import Slots, Ticket

TIERS = ("realtime", "batch", "offline")
KEYS = [QueueKey(tier, "fresh", tier) for tier in TIERS]


@dataclass(eq=False)
class Message:
    """As much of a kombu message as the dispatcher looks at."""

    id: str
    queue: str
    name: str = "noop"
    acknowledged: bool = False
    returned: int = 0
    headers: dict[str, object] = field(default_factory=dict)
    body: bytes = b"[[], {}, {}]"
    content_type: str = "application/json"
    content_encoding: str = "utf-8"
    errors: list[object] = field(default_factory=list)
    properties: dict[str, object] = field(default_factory=dict)
    delivery_info: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.headers |= {"id": self.id, "task": self.name}

    @property
    def payload(self) -> object:
        return ([], {}, {})

    def ack(self) -> None:
        self.acknowledged = True


class Broker:
    """Queues in memory behind the ``Source`` port; answers come when ``step`` is called."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[Message]] = {name: deque() for name in TIERS}
        self.asked: deque[str] = deque()
        self.subscribed: set[str] = set()
        self.out = 0
        self.activity = 0
        self.on_answer = self.on_push = lambda queue, message: None

    def fill(self, queue: str, count: int, name: str = "noop") -> None:
        for _ in range(count):
            self.out += 1
            self.queues[queue].append(Message(f"{queue}-{self.out}", queue, name))

    def ask(self, queues: list[str]) -> None:
        self.asked.extend(queues)

    def subscribe(self, queues: list[str]) -> None:
        self.subscribed.update(queues)

    def unsubscribe(self, queues: list[str]) -> None:
        self.subscribed.difference_update(queues)

    def give_back(self, message: Message) -> None:
        message.returned += 1
        self.queues[message.queue].appendleft(message)

    def drain(self) -> None: ...

    def return_stale(self, now: float | None = None) -> None: ...

    def step(self) -> None:
        while self.asked:
            self.activity += 1
            queue = self.asked.popleft()
            self.on_answer(queue, self.queues[queue].popleft() if self.queues[queue] else None)
        for queue in sorted(self.subscribed):
            if self.queues[queue] and queue in self.subscribed:
                self.activity += 1
                self.on_push(queue, self.queues[queue].popleft())


class Store:
    """Claims in memory; ``verdicts`` overrides the answer for an id."""

    def __init__(self) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self.live: dict[str, int] = {}
        self.away = False
        self.token = 0

    def claim(self, claimants: list[Claimant], worker: str, lease_s: float) -> list[Claim]:
        if self.away:
            raise StateUnavailableError("gone")
        answers = []
        for claimant in claimants:
            verdict = self.verdicts.get(claimant.id, Verdict.RUN)
            self.token += 1
            if verdict is Verdict.RUN:
                self.live[claimant.id] = self.token
            answers.append(Claim(verdict, self.token, 1, None, claimant.tier, None, "other"))
        return answers

    def release(self, claims: list[tuple[str, int]]) -> int:
        for task_id, token in claims:
            assert self.live.pop(task_id) == token
        return len(claims)


class Unwatched:
    def started(self, ticket: Ticket) -> None: ...

    def finished(self, ticket: Ticket, cost_s: float) -> None: ...


class Bench:
    """A worker with a given number of slots; time moves only when told to."""

    def __init__(
        self,
        slots: int = 1,
        *,
        hold_s: float = 0.0,
        reserve: int = 0,
        share: Literal["time", "count"] = "count",
        floors: FloorWatch | None = None,
    ) -> None:
        self.now = 100.0
        self.ready = slots
        # As the ports they stand for: a message here has only what the dispatcher looks at.
        self.broker = cast(Any, Broker())
        self.store = cast(Any, Store())
        self.starts: list[str] = []
        self.running: deque[Ticket] = deque()
        self.buried: list[Unfit] = []
        self.expirations: list[str] = []
        self.crashes: list[str] = []
        self.unburials: list[str] = []
        self.parks, self.parked = False, list[str]()
        costs = CostModel()
        self.dispatcher = Dispatcher(
            source=self.broker,
            picker=Picker(replace(default_policy(), share=share), KEYS, costs),
            costs=costs,
            claims=self.store,
            slots=Slots(lambda: self.ready, reserve),
            queues=KEYS,
            tasks={"noop", "long"},
            worker="w1",
            lease_s=30,
            hold_s=hold_s,
            deliver=cast(Any, self.deliver),
            ends=cast(Any, self),
            observer=Unwatched(),
            floors=floors,
            clock=lambda: self.now,
        )

    def deliver(self, message: Message) -> None:
        self.running.append(self.dispatcher.take(message.id))
        self.starts.append(message.queue)

    def bury(self, message: Message, key: QueueKey, unfit: Unfit) -> None:
        self.buried.append(unfit)

    def revoked(self, message: Message, why: str) -> None:
        self.expirations.append(message.id)

    def crashed(self, message: Message, key: QueueKey, intake: Intake) -> None:
        self.crashes.append(intake.id)

    def unburied(self, message: Message, key: QueueKey, intake: Intake) -> None:
        self.unburials.append(intake.id)

    def met_claim(self, message: Message, key: QueueKey, claim: Claim) -> bool:
        if self.parks:
            self.parked.append(message.id)
        return self.parks

    def too_early(self, message: Message, key: QueueKey, intake: Intake) -> bool:
        return False

    def settle(self) -> None:
        """Pump until nothing changes."""
        for _ in range(500):
            before = self.broker.activity
            self.dispatcher.pump()
            self.broker.step()
            if before == self.broker.activity:
                return
        raise AssertionError("the dispatcher and the broker never come to rest")

    def run(self, seconds: float) -> None:
        """Let the longest-running task end after ``seconds``."""
        self.now += seconds
        ticket = self.running.popleft()
        self.dispatcher.free(ticket, self.now)
        self.settle()

    @property
    def inside(self) -> int:
        return self.broker.out - sum(map(len, self.broker.queues.values())) - len(self.starts)


def _backlogged(bench: Bench, name: str = "noop") -> Bench:
    for tier in TIERS:
        bench.broker.fill(tier, 400, name)
    bench.settle()
    return bench


@pytest.mark.parametrize("slots", [1, 4, 8])
@pytest.mark.parametrize("hold_s", [0.0, 0.02])
@pytest.mark.parametrize("length_s", [0.001, 0.5])
def test_backlogged_tiers_start_8_2_1_in_every_window_of_11(slots: int, hold_s: float, length_s: float) -> None:
    bench = _backlogged(Bench(slots, hold_s=hold_s))
    while len(bench.starts) < 220:
        bench.run(length_s)
    for at in range(len(bench.starts) - 11):
        assert Counter(bench.starts[at : at + 11]) == {"realtime": 8, "batch": 2, "offline": 1}, at


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("share", ["count", "time"])
def test_the_floor_is_met_in_every_window_that_is_watched(slots: int, share: Literal["time", "count"]) -> None:
    told: Counter[bool] = Counter()

    def tell(tier: str, /, *, is_met: bool) -> None:
        told[is_met] += tier == "offline"

    floors = {tier.name: float(tier.floor) for tier in default_policy().tiers}
    bench = Bench(slots, hold_s=0.02, share=share, floors=FloorWatch(floors, by_time=share == "time", tell=tell))
    for tier in TIERS:
        bench.broker.fill(tier, 3000)
    bench.settle()
    for number in range(2000):
        bench.run(0.2 if number % 7 else 1.0)
    assert told[False] == 0
    assert told[True] >= 2


@pytest.mark.parametrize("slots", [1, 4])
def test_no_message_waits_inside_the_worker_while_tasks_are_long(slots: int) -> None:
    bench = _backlogged(Bench(slots, hold_s=0.02))
    for _ in range(40):
        bench.run(0.5)
        bench.now += 0.021
        bench.dispatcher.tick()
        assert bench.inside == 0
        assert len(bench.dispatcher.slots) == slots


def test_short_tasks_find_the_next_ones_at_hand() -> None:
    bench = _backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.001)
    assert 5 <= bench.inside <= 64


def test_what_has_waited_longer_than_hold_goes_back_with_its_claim() -> None:
    bench = _backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.001)
    held = bench.inside
    assert held > 0
    bench.now += 0.03
    bench.dispatcher.tick()
    assert bench.inside == 0
    assert len(bench.store.live) == len(bench.starts)
    assert sum(message.returned for queue in bench.broker.queues.values() for message in queue) >= held


def test_an_idle_worker_is_pushed_to_and_says_no_once_its_slots_are_full() -> None:
    bench = Bench(2)
    bench.settle()
    assert bench.broker.subscribed == set(TIERS)
    bench.now += 1
    bench.broker.fill("batch", 1)
    bench.settle()
    assert bench.starts == ["batch"]
    assert bench.broker.subscribed == set(TIERS)
    bench.now += 1
    bench.broker.fill("offline", 1)
    bench.settle()
    assert bench.starts == ["batch", "offline"]
    assert bench.broker.subscribed == set()


def test_a_push_that_comes_after_the_last_slot_was_taken_goes_back() -> None:
    bench = Bench(1)
    bench.settle()
    bench.now += 1
    bench.broker.fill("batch", 1)
    bench.settle()
    late: Any = Message("late", "offline")
    bench.dispatcher._on_push("offline", late)
    bench.settle()
    assert late.returned == 1
    assert bench.starts == ["batch"]


def test_lower_tiers_never_take_a_reserved_slot() -> None:
    bench = Bench(4, reserve=1)
    bench.broker.fill("batch", 50)
    bench.broker.fill("offline", 50)
    bench.settle()
    assert len(bench.dispatcher.slots) == 3
    assert bench.broker.subscribed == {"realtime"}
    bench.now += 1
    bench.broker.fill("realtime", 3)
    bench.settle()
    assert bench.starts.count("realtime") == 1
    for _ in range(8):
        bench.run(0.5)
        assert sum(not ticket.reserved for ticket in bench.dispatcher.slots) <= 3


def test_without_state_everything_goes_back_and_nothing_starts_until_it_is_there() -> None:
    bench = Bench(2)
    bench.store.away = True
    bench.broker.fill("batch", 5)
    bench.settle()
    assert bench.starts == []
    assert len(bench.broker.queues["batch"]) == 5
    assert not bench.broker.subscribed
    bench.store.away = False
    bench.dispatcher.state_lost = False
    bench.settle()
    assert bench.starts == ["batch", "batch"]


def test_an_unknown_task_is_buried_and_the_slot_goes_on() -> None:
    bench = Bench(1)
    bench.broker.fill("batch", 1, name="nobody knows")
    bench.broker.fill("batch", 1)
    bench.settle()
    assert [unfit.reason for unfit in bench.buried] == ["unknown task"]
    assert bench.starts == ["batch"]


def test_a_broker_that_does_not_answer_ends_the_connection() -> None:
    bench = Bench(1)
    bench.dispatcher.pump()
    bench.now += ANSWER_S + 1
    with pytest.raises(TimeoutError):
        bench.dispatcher.tick()


def test_close_returns_what_is_held_and_takes_nothing_new() -> None:
    bench = _backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.001)
    bench.dispatcher.close()
    bench.broker.step()
    assert bench.inside == 0
    before = len(bench.starts)
    bench.run(0.001)
    assert len(bench.starts) == before


def test_a_lost_connection_keeps_what_runs_and_forgets_the_rest() -> None:
    bench = _backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.001)
    bench.dispatcher.connection_lost()
    assert len(bench.dispatcher.slots) == 2
    assert {ticket.intake.id for ticket in bench.dispatcher.slots} <= set(bench.store.live)
    bench.broker.asked.clear()
    bench.dispatcher.attach(bench.broker)
    before = len(bench.starts)
    bench.run(0.001)
    assert len(bench.starts) > before


def test_a_missing_queue_is_left_alone_for_a_while() -> None:
    bench = Bench(1)
    bench.settle()
    bench.broker.subscribed.discard("batch")  # its channel is gone
    bench.dispatcher.queue_lost("batch")
    bench.settle()
    assert bench.broker.subscribed == {"realtime", "offline"}
    bench.now += MISSING_S + 0.1
    bench.dispatcher.tick()
    assert bench.broker.subscribed == set(TIERS)
