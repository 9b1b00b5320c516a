"""Status look-ups beside an empty queue and beside a long one, in turn.

Each side has a Redis of its own: what the long queue's records do to the look-ups would else be felt by both.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterable
from contextlib import closing

from inference_tasks.app import inference_of
from inference_tasks.inference_app import InferenceApp
from tests.benchmarks.harness import Bench, Report, app_for, quantile, task_of
from tests.support.servers import RedisNode

DEPTH = int(os.environ.get("BENCH_DEPTH", "100000"))
LOOKUPS = int(os.environ.get("BENCH_LOOKUPS", "4000"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "9"))
CHUNK = 10_000
# The sides take turns this often, so that whatever else the machine does meets both alike.
BLOCK = 100
EMPTY, LONG = "depth 0", f"depth {DEPTH}"


def filled(app: InferenceApp, count: int) -> list[str]:
    """Submit ``count`` tasks and return their ids."""
    ids: list[str] = []
    for start in range(0, count, CHUNK):
        batch = task_of(app, "noop").submit_many([()] * min(CHUNK, count - start))
        assert not batch.refused, batch.refused[:1]
        assert not batch.unknown, batch.unknown[:1]
        ids += [handle.id for handle in batch.accepted]
    return ids


def messages(app: InferenceApp) -> int:
    """Return how many messages wait in all queues of the app."""
    inference = inference_of(app)
    with closing(inference.depths()) as depths:
        return sum(depths.of(inference.topology).values())


def lookups(app: InferenceApp, ids: list[str], order: random.Random) -> list[float]:
    """Look up ``BLOCK`` tasks one by one; return the seconds of each."""
    taken_s = []
    for task_id in order.choices(ids, k=BLOCK):
        asked = time.perf_counter()
        record = app.status(task_id)
        taken_s.append(time.perf_counter() - asked)
        assert record.state == "pending", record
    return taken_s


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    """Fill the long queue, then look up in turn, ``ROUNDS`` times."""
    report = Report("status")
    rounds: dict[str, list[list[float]]] = {EMPTY: [], LONG: []}
    with Bench() as bench, RedisNode() as other:
        sides = {}
        for side, depth, url in ((EMPTY, 1_000, bench.redis.url()), (LONG, DEPTH, other.url())):
            environment = bench.setting(state__url=url, tiers__batch__bound=2 * DEPTH)
            app = app_for(environment)
            began = time.monotonic()
            ids = filled(app, depth)
            report.say(f"{side}: {len(ids)} submitted in {time.monotonic() - began:.1f} s")
            sides[side] = (app, ids)
        namespace = sides[EMPTY][0].settings.namespace
        bench.purge(namespace, f"{namespace}.batch")
        order = random.Random(7)
        for app, ids in sides.values():
            lookups(app, ids, order)
        for _ in range(ROUNDS):
            taken_s: dict[str, list[float]] = {EMPTY: [], LONG: []}
            for number in range(LOOKUPS // BLOCK):
                for side in (EMPTY, LONG) if number % 2 else (LONG, EMPTY):
                    taken_s[side] += lookups(*sides[side], order)
            for side, values in taken_s.items():
                rounds[side].append(values)
        ready = {side: messages(app) for side, (app, _) in sides.items()}
        for app, _ in sides.values():
            inference_of(app).publisher.close()
    p50_ms = {side: _median(quantile(one, 0.5) * 1e3 for one in each) for side, each in rounds.items()}
    p99_ms = {side: _median(quantile(one, 0.99) * 1e3 for one in each) for side, each in rounds.items()}
    per_s = {side: _median(len(one) / sum(one) for one in each) for side, each in rounds.items()}
    report.say(f"  P50 {p50_ms} ms, P99 {p99_ms} ms, {per_s} per s")
    report.figures = {
        "lookups": LOOKUPS,
        "rounds": ROUNDS,
        "ready": ready,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "per_s": per_s,
    }
    p99_ratio = p99_ms[LONG] / p99_ms[EMPTY]
    rate_ratio = per_s[LONG] / per_s[EMPTY]
    report.bar(f"P99, {LONG} / {EMPTY}", p99_ratio, "<= 1.5", ok=p99_ratio <= 1.5)
    report.bar(f"per second, {LONG} / {EMPTY}", rate_ratio, ">= 0.8", ok=rate_ratio >= 0.8)
    report.close()


if __name__ == "__main__":
    main()
