"""What it costs to move a task one tier up, behind a short queue and behind a long one, in turn.

The oldest tasks of each queue are submitted as any other; what waits behind them is published bare and listed in bulk,
because only its number matters.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import redis

from inference_tasks.app import Inference, inference_of
from inference_tasks.broker.dial import dial
from inference_tasks.broker.messages import Outgoing, Properties
from inference_tasks.broker.wire import CHANNEL_NUMBER, encode
from inference_tasks.maintenance.pull import Pull
from inference_tasks.maintenance.sweep import Sweep
from inference_tasks.state import keys
from tests.benchmarks.harness import Bench, Report, app_for, task_of, wait_until

SHORT = int(os.environ.get("BENCH_SHORT", "10000"))
DEPTH = int(os.environ.get("BENCH_DEPTH", "1000000"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
PROMOTED = int(os.environ.get("BENCH_PROMOTED", "1000"))
QUEUE_TYPE = os.environ.get("BENCH_QUEUE_TYPE", "classic")
CHUNK = 10_000
BURST = 500
AGE_S = 3600.0


@dataclass
class Side:
    """One queue of a certain depth, and the sweeps over it."""

    depth: int
    inference: Inference
    sweep: Sweep
    pull: Pull
    namespace: str


def filled(bench: Bench, depth: int) -> Side:
    """Return a queue ``offline`` with ``depth`` messages, the first of them old enough to move."""
    environment = bench.setting(
        broker__queue_type=QUEUE_TYPE, tiers__offline__bound=2 * depth, aging__ready_max=PROMOTED
    )
    app = app_for(environment)
    inference = inference_of(app)
    old = task_of(app, "noop").options(tier="offline").submit_many([()] * (PROMOTED * (ROUNDS + 1)))
    assert not old.refused, old.refused[:1]
    ids = [handle.id for handle in old.accepted]
    queue = inference.topology.queue("offline").name
    index = keys.ready(inference.store.prefix, queue)
    with redis.Redis.from_url(str(inference.settings.state.url)) as client:
        now_s = time.time()
        with client.pipeline(transaction=False) as pipe:
            for position, task_id in enumerate(ids):
                since_s = now_s - AGE_S + position * 1e-3
                pipe.zadd(index, {task_id: since_s})
                pipe.hset(keys.task(inference.store.prefix, task_id), "ready_at_s", repr(since_s))
            pipe.execute()
        for start in range(len(ids), depth, CHUNK):
            names = [f"filler-{number}" for number in range(start, min(start + CHUNK, depth))]
            client.zadd(index, dict.fromkeys(names, now_s))
    publish_bare(inference, queue, depth - len(ids))
    with closing(inference.depths()) as depths:
        wait_until(lambda: depths.of_queues([queue])[queue] == depth, 300, f"{depth} messages wait")
    pull = Pull(str(inference.settings.broker.url), connect_timeout_s=3.0)
    return Side(depth, inference, Sweep(inference, pull), pull, environment["INFERENCE_NAMESPACE"])


def publish_bare(inference: Inference, queue: str, count: int) -> None:
    """Write the same message so many times, as fast as the socket takes it; without confirms."""
    ours = {"v": 1, "tier": "offline", "submitted_at_s": time.time()}
    headers = {"id": "filler", "task": "noop", "inference": ours}
    properties = Properties(headers=headers, message_id="filler")
    one = encode(Outgoing(b"[[], {}, null]", inference.settings.namespace, queue, properties, mandatory=False))
    frames = one.head + one.tail
    with dial(str(inference.settings.broker.url), 3.0) as connection:
        channel: Any = connection.channel()
        assert channel.channel_id == CHANNEL_NUMBER
        for start in range(0, count, BURST):
            connection.connection.transport.write(frames * min(BURST, count - start))
            # The answer comes after everything before it has been read: more than the broker takes would end the
            # connection, because py-amqp lets unread bytes wait for a second only.
            channel.queue_declare(queue, passive=True)


def main() -> None:
    """Fill both queues, then promote from them in turn, ``ROUNDS`` times."""
    report = Report("aging")
    seconds: dict[int, list[float]] = {}
    round_trips: dict[int, list[float]] = {}
    returned: dict[int, int] = {}
    with Bench() as bench:
        sides = []
        for depth in (SHORT, DEPTH):
            began = time.monotonic()
            sides.append(filled(bench, depth))
            report.say(f"depth {depth}: filled in {time.monotonic() - began:.1f} s")
        for number in range(ROUNDS + 1):
            for side in sides if number % 2 else reversed(sides):
                began = time.perf_counter()
                swept = side.sweep.run()
                took_s = time.perf_counter() - began
                assert swept.promoted == PROMOTED, swept
                bench.purge(side.namespace, side.inference.topology.queue("batch", "aged").name)
                if number:  # the first round also opens the connections
                    seconds.setdefault(side.depth, []).append(took_s / PROMOTED)
                    round_trips.setdefault(side.depth, []).append(swept.round_trips / PROMOTED)
                    returned[side.depth] = returned.get(side.depth, 0) + swept.returned
        ready = {}
        for side in sides:
            with closing(side.inference.depths()) as depths:
                ready[side.depth] = depths.of(side.inference.topology)[side.inference.topology.queue("offline").name]
            side.pull.close()
            side.inference.publisher.close()
    ms = {depth: round(statistics.median(each) * 1e3, 4) for depth, each in seconds.items()}
    trips = {depth: round(statistics.median(each), 4) for depth, each in round_trips.items()}
    report.say(f"  ms for each promoted task {ms}, round trips to the broker {trips}, left {ready}")
    report.figures = {
        "queue_type": QUEUE_TYPE,
        "promoted_each_round": PROMOTED,
        "rounds": ROUNDS,
        "ms_per_task": ms,
        "round_trips_per_task": trips,
        "returned": returned,
        "left": ready,
    }
    ratio = ms[DEPTH] / ms[SHORT]
    report.bar(f"seconds per promoted task, depth {DEPTH} / {SHORT}", ratio, "<= 1.5", ok=ratio <= 1.5)
    trip_ratio = trips[DEPTH] / trips[SHORT]
    report.bar(f"round trips per promoted task, depth {DEPTH} / {SHORT}", trip_ratio, "<= 1.1", ok=trip_ratio <= 1.1)
    untouched = sum(returned.values())
    report.bar("messages that were taken and put back", untouched, "0", ok=untouched == 0)
    report.close()


if __name__ == "__main__":
    main()
