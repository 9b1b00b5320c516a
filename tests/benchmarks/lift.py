"""A realtime task that waits for an offline task behind many others: how long until both are done, with and without
inheritance; what the lift costs, and what keeping messages costs every other submit.
"""

from __future__ import annotations

import os
import time
from typing import Any

import redis

from inference_tasks.app import Inference, inference_of
from inference_tasks.inference_app import InferenceApp
from inference_tasks.state import keys
from tests.benchmarks.harness import Bench, Report, app_for, task_of, wait_until

DEPTH = int(os.environ.get("BENCH_DEPTH", "100000"))
COMPARED = int(os.environ.get("BENCH_COMPARED", "5000"))
#: Without inheritance the crowd is served first: so many are measured, and the rest is worked out.
SERVED = int(os.environ.get("BENCH_SERVED", "3000"))
LIMIT_S = 10.0


class Trips:
    """Counts the round trips to Redis and to the broker that a lift makes."""

    def __init__(self, inference: Inference) -> None:
        self.count = 0
        client: Any = inference.store._client
        publisher: Any = inference.publisher
        execute, send_many = client.execute_command, publisher.send_many

        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            return execute(*args, **options)

        def sent(*args: Any, **options: Any) -> Any:
            self.count += 1
            return send_many(*args, **options)

        client.execute_command, publisher.send_many = counted, sent


def crowd(app: InferenceApp, count: int) -> float:
    """Submit so many offline tasks; return microseconds for each."""
    noop = task_of(app, "noop").options(tier="offline")
    began = time.perf_counter()
    for start in range(0, count, 10_000):
        report = noop.submit_many([()] * min(10_000, count - start))
        assert report.is_complete, (report.refused + report.unknown)[:1]
    return (time.perf_counter() - began) / count * 1e6


def pair(app: InferenceApp) -> tuple[Any, Any]:
    """Submit an offline task, and a realtime one that waits for it."""
    need = task_of(app, "noop").options(tier="offline").submit()
    return need, task_of(app, "noop").options(tier="realtime", depends_on=[need]).submit()


def scenario(bench: Bench, report: Report, *, is_lifted: bool) -> dict[str, float]:
    """Fill the queue, submit the pair behind it, then start a worker."""
    environment = bench.setting(
        tiers__offline__bound=2 * DEPTH, state__lift_body_bytes=8192 if is_lifted else 0, worker__slots=2
    )
    app = app_for(environment)
    inference = inference_of(app)
    figures = {"submit_us": round(crowd(app, DEPTH), 1)}
    trips = Trips(inference)
    need, dependent = pair(app)
    if is_lifted:
        before = trips.count
        began = time.perf_counter()
        inference.lifts.lift([task_of(app, "noop").options(tier="offline").submit().id], "realtime", dependent.id)
        # Less the submit of that task, which is no part of it: it does not go through the store of this process.
        figures |= {"lift_round_trips": trips.count - before, "lift_ms": round((time.perf_counter() - began) * 1e3, 2)}
        assert need.status().lifted_by == dependent.id
    with bench.workers(environment, 1, "--pool", "threads"):
        began = time.monotonic()
        if is_lifted:
            dependent.result(timeout_s=LIMIT_S * 6)
            figures["both_done_s"] = round(time.monotonic() - began, 3)
        else:
            # The whole crowd comes first; its rate says how long that takes.
            served = inference.store.accounts().by_tier["offline"]["success"]
            wait_until(
                lambda: inference.store.accounts().by_tier["offline"]["success"] >= served + SERVED, 600, "the crowd"
            )
            rate = (inference.store.accounts().by_tier["offline"]["success"] - served) / (time.monotonic() - began)
            figures |= {"crowd_per_s": round(rate, 1), "both_done_s": round(DEPTH / rate, 1)}
            assert dependent.status().state == "waiting"
    report.say(f"  {'with' if is_lifted else 'without'} inheritance: {figures}")
    inference.publisher.close()
    return figures


def kept(bench: Bench) -> dict[str, object]:
    """What keeping the message costs a submit in time and memory; both sides in turn."""
    sides = {}
    for limit in (0, 8192):
        app = app_for(bench.setting(state__lift_body_bytes=limit, tiers__offline__bound=10 * COMPARED))
        crowd(app, 500)
        sides[limit] = app
    us: dict[int, list[float]] = {limit: [] for limit in sides}
    for turn in range(6):
        for limit, app in sides.items() if turn % 2 else reversed(sides.items()):
            us[limit].append(crowd(app, COMPARED))
    waiting = task_of(sides[8192], "noop").options(tier="offline").submit()
    prefix = inference_of(sides[8192]).store.prefix
    with redis.Redis.from_url(bench.redis.url()) as client:
        size = client.memory_usage(keys.message(prefix, waiting.id))
    for app in sides.values():
        inference_of(app).publisher.close()
    return {
        "submit_us": {limit: round(min(found), 1) for limit, found in us.items()},
        "redis_bytes_of_a_small_message": size,
    }


def main() -> None:
    """Compare."""
    report = Report("lift")
    with Bench() as bench:
        report.say(f"depth {DEPTH}")
        cost = kept(bench)
        report.say(f"  a message kept: {cost}")
        lifted = scenario(bench, report, is_lifted=True)
        left = scenario(bench, report, is_lifted=False)
    report.figures = {"depth": DEPTH, "with": lifted, "without": left, "kept": cost}
    report.bar(
        "seconds until both are done, with inheritance",
        lifted["both_done_s"],
        f"<= {LIMIT_S}",
        ok=lifted["both_done_s"] <= LIMIT_S,
    )
    report.bar("round trips of a lift", lifted["lift_round_trips"], "<= 3", ok=lifted["lift_round_trips"] <= 3)
    report.close()


if __name__ == "__main__":
    main()
