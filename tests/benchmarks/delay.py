"""Delays kept by the broker: by how much they are off, in a steady stream and in a burst, and what they cost a worker.

Steady: parks at a fixed rate, delays of 1, 5 and 30 s in turn; an error runs from when a task was to start to its
start in a worker with free slots. Burst: as many parks as the broker takes, all with one delay; what is measured is
when they arrive in their queue, since a worker would need longer than they do. Memory: the resident set of a worker's
main process with nothing parked and with many tasks parked for an hour, ours and stock Celery's ``countdown``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psutil
from celery import Celery
from kombu import Connection

from inference_tasks.app import inference_of
from inference_tasks.inference_app import InferenceApp
from tests.benchmarks.harness import Bench, Report, app_for, quantile, wait_until
from tests.benchmarks.retrying import late
from tests.benchmarks.stock import make_stock

RUN_S = float(os.environ.get("BENCH_RUN_S", "15"))
RATE_PER_S = float(os.environ.get("BENCH_RATE", "200"))
DELAYS_S = (1, 5, 30)
BURST = int(os.environ.get("BENCH_BURST", "10000"))
BURST_DELAY_S = 20
PARKED = int(os.environ.get("BENCH_PARKED", "20000"))
SENDERS = 8
LIMIT_S = 1.0
OURS = "tests.benchmarks.retrying:app"
THEIRS = "tests.benchmarks.retrying:stock"

Send = Callable[[int, float], object]
"""Send a task with a delay, due at a time."""


def our_app(environment: dict[str, str]) -> InferenceApp:
    """Return our app in this process, with the task."""
    app = app_for(environment)
    app.inference(tier="batch", name="late")(late)
    return app


def sender(app: Celery) -> Send:
    """Return what sends one task of an app."""
    return lambda delay_s, due_at_s: app.tasks["late"].apply_async((due_at_s,), countdown=delay_s)


def steady(bench: Bench, report: Report) -> dict[str, object]:
    """Errors of delays at a fixed rate of parks."""
    environment = bench.setting()
    app = our_app(environment)
    send = sender(app)
    sent: dict[int, list[Any]] = {delay_s: [] for delay_s in DELAYS_S}
    send(1, time.time())  # declares the queues, before the clock runs
    with bench.workers(environment, 1, "-P", "threads", "-c", "8", app=OURS):
        began_s = time.time()

        def park(number: int) -> None:
            delay_s = DELAYS_S[number % len(DELAYS_S)]
            due_s = time.time() + delay_s
            sent[delay_s].append(send(delay_s, due_s))

        # In threads: one caller after the other would wait for each confirm, and the rate would be the broker's.
        with ThreadPoolExecutor(SENDERS) as senders:
            for number in range(int(RUN_S * RATE_PER_S)):
                time.sleep(max(0.0, began_s + number / RATE_PER_S - time.time()))
                senders.submit(park, number)
        took_s = time.time() - began_s
        last = [results[-1] for results in sent.values()]
        wait_until(lambda: all(result.ready() for result in last), 90, "the last ones have run")
        time.sleep(1)
        errors = {
            delay_s: [value for result in results if isinstance(value := result.result, float)]
            for delay_s, results in sent.items()
        }
    inference_of(app).publisher.close()
    figures: dict[str, object] = {"parks_per_s": round(sum(map(len, sent.values())) / took_s, 1)}
    for delay_s, found in errors.items():
        p50_s, p99_s, least_s = quantile(found, 0.5), quantile(found, 0.99), min(found)
        figures[f"{delay_s} s"] = {
            "sent": len(sent[delay_s]),
            "run": len(found),
            "p50_s": round(p50_s, 4),
            "p99_s": round(p99_s, 4),
            "earliest_s": round(least_s, 4),
        }
        report.bar(f"delay of {delay_s} s: earliest start, s", least_s, ">= 0", ok=least_s >= 0)
        report.bar(f"delay of {delay_s} s: P99 error, s", p99_s, f"<= {LIMIT_S}", ok=p99_s <= LIMIT_S)
    return figures


def burst(bench: Bench, report: Report) -> dict[str, object]:
    """Lateness of many that are due at about the same time."""
    environment = bench.setting()
    app = our_app(environment)
    send = sender(app)
    inference = inference_of(app)
    inference.declare_topology()
    queue = inference.topology.queue("batch", "returned").name
    began_s = time.time()
    with ThreadPoolExecutor(SENDERS) as senders:
        list(senders.map(lambda _: send(BURST_DELAY_S, time.time() + BURST_DELAY_S), range(BURST)))
    took_s = time.time() - began_s
    errors: list[float] = []

    def arrived(message: Any) -> None:
        errors.append(time.time() - datetime.fromisoformat(message.headers["eta"]).timestamp())

    with Connection(environment["INFERENCE_BROKER__URL"]) as connection:
        channel: Any = connection.default_channel
        channel.basic_consume(queue, no_ack=True, callback=arrived)
        end = time.monotonic() + BURST_DELAY_S + 120
        while len(errors) < BURST and time.monotonic() < end:
            connection.drain_events(timeout=60)
    inference.publisher.close()
    report.bar(f"burst of {BURST}: earliest arrival, s", min(errors), ">= 0", ok=min(errors) >= 0)
    return {
        "parks": BURST,
        "parks_per_s": round(BURST / took_s, 1),
        "arrived": len(errors),
        "p50_s": round(quantile(errors, 0.5), 3),
        "p99_s": round(quantile(errors, 0.99), 3),
        "latest_s": round(max(errors), 3),
    }


def memory(bench: Bench, report: Report) -> dict[str, object]:
    """Resident memory of a worker's main process with nothing and with much parked."""
    figures: dict[str, object] = {}
    for side, measure in (("ours", _ours), ("stock countdown", _theirs)):
        with measure(bench) as (app, worker_pid, environment):
            send = sender(app)
            send(0, time.time())
            time.sleep(2)
            before = psutil.Process(worker_pid).memory_info().rss
            with ThreadPoolExecutor(SENDERS) as senders:
                list(senders.map(lambda _, send=send: send(3600, 0.0), range(PARKED)))
            _wait_settled(lambda: _unacked(bench, environment))
            after = psutil.Process(worker_pid).memory_info().rss
            unacked = _unacked(bench, environment)
        grown = (after - before) / PARKED
        figures[side] = {
            "rss_mib_with_0": round(before / 2**20, 1),
            f"rss_mib_with_{PARKED}": round(after / 2**20, 1),
            "bytes_per_parked_task": round(grown),
            "unacknowledged": unacked,
        }
        if side == "ours":
            report.bar("worker memory for each parked task, bytes", grown, "<= 1024", ok=grown <= 1024)
            report.bar("parked tasks that a worker holds", unacked, "= 0", ok=unacked == 0)
    return figures


@contextmanager
def _ours(bench: Bench) -> Iterator[tuple[Celery, int, dict[str, str]]]:
    environment = bench.setting()
    app = our_app(environment)
    with bench.workers(environment, 1, "-P", "prefork", "-c", "1", app=OURS) as (worker,):
        yield app, worker.pid, environment
    inference_of(app).publisher.close()


@contextmanager
def _theirs(bench: Bench) -> Iterator[tuple[Celery, int, dict[str, str]]]:
    setting = bench.setting()
    environment = {
        "STOCK_BROKER": setting["INFERENCE_BROKER__URL"],
        "STOCK_STATE": bench.redis.url(1),
        "INFERENCE_NAMESPACE": setting["INFERENCE_NAMESPACE"],
    }
    os.environ.update(environment)
    app = make_stock()
    app.task(name="late", shared=False)(late)
    with bench.workers(environment, 1, "-P", "prefork", "-c", "1", app=THEIRS) as (worker,):
        yield app, worker.pid, environment
    app.close()


def _wait_settled(count: Callable[[], int]) -> None:
    """Wait until nothing has changed for a while: stock Celery takes in delayed messages one by one."""
    known, since = -1, time.monotonic()
    end = since + 240
    while time.monotonic() < min(end, since + 10):
        found = count()
        if found != known:
            known, since = found, time.monotonic()
        time.sleep(1)


def _unacked(bench: Bench, environment: dict[str, str]) -> int:
    vhost = environment["INFERENCE_NAMESPACE"]
    listed = bench.rabbitmq.ctl("list_queues", "--vhost", vhost, "name", "messages_unacknowledged", "--silent")
    rows = [line.split("\t") for line in listed.splitlines()]
    # What a delay queue shows as unacknowledged is on its way to the next one, inside the broker.
    return sum(int(row[1]) for row in rows if row[-1].isdigit() and "_celery_delayed_" not in row[0])


def main() -> None:
    """Run all parts."""
    report = Report("delay")
    with Bench() as bench:
        for part in (steady, burst, memory):
            report.say(part.__name__)
            report.figures[part.__name__] = part(bench, report)
            report.say(f"  {report.figures[part.__name__]}")
    report.close()


if __name__ == "__main__":
    main()
