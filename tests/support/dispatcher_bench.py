"""The dispatcher against a broker, a state store and a clock in memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from inference_routing.cost import CostModel
from inference_routing.lane import QueueKey
from inference_routing.picker import Picker
from inference_routing.policy import default_policy
from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.records import Claim, Claimant, Verdict
from inference_tasks.worker.dispatcher import Dispatcher
from inference_tasks.worker.floors import FloorWatch
from inference_tasks.worker.intake import Intake, Unfit
from inference_tasks.worker.slots import Slots, Ticket

__all__ = ["KEYS", "TIERS", "Bench", "Broker", "Message", "backlogged"]

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
        self.looked: deque[str] = deque()
        self.asks: list[str] = []
        self.looks: list[str] = []
        self.on_answer = self.on_look = self.on_push = lambda queue, found: None

    def fill(self, queue: str, count: int, name: str = "noop") -> None:
        for _ in range(count):
            self.out += 1
            self.queues[queue].append(Message(f"{queue}-{self.out}", queue, name))

    def look(self, queues: list[str]) -> None:
        self.looked.extend(queues)
        self.looks.extend(queues)

    def ask(self, queues: list[str]) -> None:
        self.asked.extend(queues)
        self.asks.extend(queues)

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
        while self.looked:
            self.activity += 1
            queue = self.looked.popleft()
            self.on_look(queue, bool(self.queues[queue]))
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


def backlogged(bench: Bench, name: str = "noop") -> Bench:
    """Fill every tier with 400 messages, and let the worker begin."""
    for tier in TIERS:
        bench.broker.fill(tier, 400, name)
    bench.settle()
    return bench
