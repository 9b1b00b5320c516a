"""Status look-ups beside an empty queue and beside a long one, in turn.

Each side has a Redis of its own: what the long queue's records do to the look-ups would else be felt by both.
"""

from __future__ import annotations

import os
import random
import statistics
import time

from inference_tasks.app import InferenceApp, inference_of
from tests.benchmarks.harness import Bench, Report, app_for, quantile
from tests.support.servers import RedisNode

DEPTH = int(os.environ.get("BENCH_DEPTH", "100000"))
LOOKUPS = int(os.environ.get("BENCH_LOOKUPS", "4000"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "9"))
CHUNK = 10_000
EMPTY, LONG = "depth 0", f"depth {DEPTH}"


def filled(app: InferenceApp, count: int) -> list[str]:
    """Submit ``count`` tasks and return their ids."""
    ids: list[str] = []
    for start in range(0, count, CHUNK):
        batch = app.tasks["noop"].submit_many([()] * min(CHUNK, count - start))
        assert not batch.refused, batch.refused[:1]
        assert not batch.unknown, batch.unknown[:1]
        ids += [handle.id for handle in batch.accepted]
    return ids


def purge(app: InferenceApp) -> None:
    """Empty the queue; the records stay."""
    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge(f"{app.settings.namespace}.batch")


def messages(app: InferenceApp) -> int:
    """Return how many messages wait in all queues of the app."""
    inference = inference_of(app)
    with inference.depths() as depths:
        return sum(depths.of(inference.topology).values())


def lookups(app: InferenceApp, ids: list[str], order: random.Random) -> tuple[float, float, float]:
    """Look up ``LOOKUPS`` tasks one by one; return P50 and P99 in milliseconds, and look-ups per second."""
    chosen = [order.choice(ids) for _ in range(LOOKUPS)]
    taken_s = []
    began = time.perf_counter()
    for task_id in chosen:
        asked = time.perf_counter()
        record = app.status(task_id)
        taken_s.append(time.perf_counter() - asked)
        assert record.state == "pending", record
    whole_s = time.perf_counter() - began
    return quantile(taken_s, 0.5) * 1e3, quantile(taken_s, 0.99) * 1e3, LOOKUPS / whole_s


def main() -> None:
    """Fill the long queue, then look up in turn, ``ROUNDS`` times."""
    report = Report("status")
    runs: dict[str, list[tuple[float, float, float]]] = {EMPTY: [], LONG: []}
    with Bench() as bench, RedisNode() as other:
        sides = {}
        for side, depth, url in ((EMPTY, 1_000, bench.redis.url()), (LONG, DEPTH, other.url())):
            environment = bench.setting(state__url=url, tiers__batch__bound=2 * DEPTH)
            app = app_for(environment)
            began = time.monotonic()
            ids = filled(app, depth)
            report.say(f"{side}: {len(ids)} submitted in {time.monotonic() - began:.1f} s")
            sides[side] = (app, ids)
        purge(sides[EMPTY][0])
        order = random.Random(7)
        for side, (app, ids) in sides.items():
            lookups(app, ids, order)
            report.say(f"{side}: warm")
        for number in range(ROUNDS):
            for side in (EMPTY, LONG) if number % 2 else (LONG, EMPTY):
                runs[side].append(lookups(*sides[side], order))
        ready = {side: messages(app) for side, (app, _) in sides.items()}
    p50_ms, p99_ms, per_s = (
        {side: round(statistics.median(run[what] for run in rounds), 3) for side, rounds in runs.items()}
        for what in range(3)
    )
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
