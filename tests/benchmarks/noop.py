"""No-op tasks per second: ours beside stock Celery, in turn, on the same servers.

Both sides acknowledge late, keep results in Redis and send the same events; stock Celery has the same three queues.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

from celery import Celery
from kombu import Exchange, Queue

from tests.benchmarks.harness import Bench, Report, Start, app_for, starts, task_of

TASKS = int(os.environ.get("BENCH_TASKS", "3000"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
TIERS = ("realtime", "batch", "offline")
POOLS = [
    (pool, slots) for pool, slots in (("prefork", 2), ("threads", 4)) if pool in os.environ.get("BENCH_POOLS", pool)
]


def stock_app() -> Celery:
    """Return a plain Celery app with three queues, set up by the environment."""
    app = Celery("stock")
    exchange = Exchange("stock", type="direct")
    arguments = {"x-queue-type": os.environ.get("BENCH_QUEUE_TYPE", "classic")}
    app.conf.update(
        broker_url=os.environ.get("BENCH_BROKER"),
        result_backend=os.environ.get("BENCH_STATE"),
        task_queues=[Queue(name, exchange, routing_key=name, queue_arguments=arguments) for name in TIERS],
        task_default_queue="batch",
        task_default_exchange="stock",
        task_default_routing_key="batch",
        task_acks_late=True,
        worker_prefetch_multiplier=int(os.environ.get("BENCH_MULTIPLIER", "1")),
        worker_send_task_events=True,
        broker_connection_retry_on_startup=True,
        control_queue_exclusive=False,
        control_queue_durable=True,
        broker_native_delayed_delivery_queue_type="classic",
    )

    @app.task(name="noop", shared=False)
    def noop() -> None:
        """Do nothing."""

    return app


stock = stock_app()


def ours(bench: Bench, pool: str, slots: int, queue_type: str, hold_s: float | None) -> float:
    """Return tasks per second; nothing is logged meanwhile."""
    return _run(bench, pool, slots, queue_type, hold_s, is_logged=False)[0]


def longest(bench: Bench, pool: str, slots: int, queue_type: str) -> tuple[float, float]:
    """Return the longest hold, and the longest time that a task kept its slot, in seconds."""
    logged = [start for log in _run(bench, pool, slots, queue_type, None, is_logged=True)[1].values() for start in log]
    return max(start.held_s for start in logged), max(start.cost_s for start in logged if start.cost_s > 0)


def _run(
    bench: Bench, pool: str, slots: int, queue_type: str, hold_s: float | None, *, is_logged: bool
) -> tuple[float, dict[str, list[Start]]]:
    extra: dict[str, object] = {} if hold_s is None else {"worker__hold_s": hold_s}
    environment = bench.setting(broker__queue_type=queue_type, tiers__realtime__bound=100_000, **extra)
    app = app_for(environment)
    for tier in TIERS:
        task_of(app, "noop").submit_many([()] * (TASKS // 3), tier=tier)
    namespace = environment["INFERENCE_NAMESPACE"]
    seen = environment if is_logged else {key: text for key, text in environment.items() if key != "BENCH_STARTS"}
    with bench.workers(seen, 1, "-P", pool, "-c", str(slots)):
        rate = _rate(bench, namespace, [f"{namespace}.{tier}" for tier in TIERS])
    return rate, starts(environment)


def theirs(bench: Bench, pool: str, slots: int, queue_type: str, multiplier: int) -> float:
    """Return tasks per second of stock Celery."""
    environment = bench.setting()
    vhost = environment["INFERENCE_NAMESPACE"]
    mine = {
        "BENCH_BROKER": environment["INFERENCE_BROKER__URL"],
        "BENCH_STATE": bench.redis.url(1),
        "BENCH_QUEUE_TYPE": queue_type,
        "BENCH_MULTIPLIER": str(multiplier),
    }
    os.environ.update(mine)
    app = stock_app()
    with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
        for queue in app.amqp.queues.values():
            queue(connection.default_channel).declare()
        for number in range(TASKS):
            app.tasks["noop"].apply_async(producer=producer, queue=TIERS[number % 3])
    options = ("-P", pool, "-c", str(slots))
    with bench.workers(mine, 1, *options, app="tests.benchmarks.noop:stock") as (worker,):
        rate = _rate(bench, vhost, list(TIERS))
        worker.kill()  # its warm stop may take half a minute, and nothing is measured any more
        return rate


def _rate(bench: Bench, vhost: str, queues: list[str]) -> float:
    """Measure how fast the queues empty, between 90 % and 15 % left."""
    from kombu import Connection

    with Connection(bench.rabbitmq.url(vhost)) as connection:
        channel: Any = connection.default_channel

        def left() -> int:
            return sum(int(channel.queue_declare(queue, passive=True).message_count) for queue in queues)

        deadline = time.monotonic() + 120
        while (first := left()) > TASKS * 0.9 and time.monotonic() < deadline:
            time.sleep(0.02)
        began = time.monotonic()
        while (last := left()) > TASKS * 0.15 and time.monotonic() < deadline:
            time.sleep(0.02)
        return (first - last) / (time.monotonic() - began)


def main() -> None:
    """Run every combination ``ROUNDS`` times, sides in turn."""
    report = Report("noop")
    figures: dict[str, Mapping[str, object]] = {}
    with Bench() as bench:
        for pool, slots in POOLS:
            for queue_type in ("classic", "quorum"):
                name = f"{pool} {slots} {queue_type}"
                report.say(name)
                runs: dict[str, list[float]] = {}
                for _ in range(ROUNDS):
                    for multiplier in (1, 4):
                        rate = theirs(bench, pool, slots, queue_type, multiplier)
                        runs.setdefault(f"stock x{multiplier}", []).append(rate)
                    for label, hold_s in (("hold default", None), ("hold 0", 0.0)):
                        runs.setdefault(label, []).append(ours(bench, pool, slots, queue_type, hold_s))
                medians = {side: round(statistics.median(rates), 1) for side, rates in runs.items()}
                held_s, task_s = longest(bench, pool, slots, queue_type)
                report.say(f"  {medians}, longest hold {held_s * 1e3:.1f} ms")
                figures[name] = {**medians, "longest_hold_s": round(held_s, 4), "longest_task_s": round(task_s, 4)}
                for multiplier in (1, 4):
                    ratio = medians["hold default"] / medians[f"stock x{multiplier}"]
                    report.bar(f"{name}: ours / stock x{multiplier}", ratio, ">= 1.0", ok=ratio >= 1.0)
                limit_s = 0.02 + task_s
                report.bar(f"{name}: longest hold, s", held_s, f"<= {limit_s:.4f}", ok=held_s <= limit_s)
    report.figures = {"tasks": TASKS, "rounds": ROUNDS, "tasks_per_s": figures}
    report.close()


if __name__ == "__main__":
    main()
