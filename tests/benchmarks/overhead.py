"""What status, claims and deduplication cost a task, beside plain Celery with its Redis result backend.

Round trips are counted by the server's own account of its commands: what a script does inside counts for nothing, and a
transaction for one. Microseconds are those of the single calls, in turn with a bare PING and with Celery's own write of
a result, and of whole submits on both sides. A task with deduplication has a round trip more, after its submit: nobody
waits for the note that its message is stored, and those of many submits at once go together.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis
from kombu import Connection

from inference_tasks.app import inference_of
from inference_tasks.inference_app import InferenceApp
from inference_tasks.state.records import Claimant, NewTask, ShareKey
from tests.benchmarks.harness import Bench, Report, app_for, task_of, wait_until
from tests.benchmarks.stock import make_stock

TASKS = int(os.environ.get("BENCH_TASKS", "500"))
CALLS = int(os.environ.get("BENCH_CALLS", "2000"))
SLOT = ("-P", "prefork", "-c", "1")
LEASE_S = 30.0
# What every client says once per connection, and the lookup of a script.
GREETINGS = frozenset({"CLIENT", "HELLO", "AUTH", "SELECT", "SCRIPT", "INFO", "ECHO", "READONLY"})


@contextmanager
def counted(url: str) -> Iterator[Counter[str]]:
    """Count the round trips that the server sees meanwhile, by command."""
    trips: Counter[str] = Counter()
    end = uuid.uuid4().hex
    inside: set[str] = set()
    with redis.Redis.from_url(url) as client, client.monitor() as monitor:

        def listen() -> None:
            for seen in monitor.listen():
                name = seen["command"].split(" ", 1)[0].upper()
                if end in seen["command"]:
                    return
                who = f"{seen['client_address']}:{seen['client_port']}"
                if seen["client_type"] == "lua" or name in GREETINGS:
                    continue
                if name == "MULTI":
                    inside.add(who)
                elif name == "EXEC" or who not in inside:
                    inside.discard(who)
                    trips[name] += 1

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        yield trips
        client.echo(end)
        listener.join(10)


def drained(url: str, queues: list[str]) -> None:
    """Wait until the queues are empty; asks the broker alone."""
    with Connection(url) as connection:
        channel: Any = connection.default_channel
        wait_until(
            lambda: not any(channel.queue_declare(queue, passive=True).message_count for queue in queues),
            120,
            "the queues are empty",
        )


def trips_of(
    bench: Bench,
    url: str,
    submit: Callable[[int], object],
    environment: Mapping[str, str],
    app: str,
    queue: str,
    vhost: str,
) -> dict[str, float]:
    """Return round trips per task of the submit and of the worker; the client has submitted before."""
    with counted(url) as submitting:
        for number in range(TASKS):
            submit(number)
    with counted(url) as working, bench.workers(environment, 1, *SLOT, app=app):
        drained(vhost, [queue])
    return {
        "submit": round(sum(submitting.values()) / TASKS, 3),
        "worker": round(sum(working.values()) / TASKS, 3),
        "scripts_of_worker": round(working["EVALSHA"] / TASKS, 3),
    }


def median_us(calls: Mapping[str, Callable[[int], object]], count: int = CALLS) -> dict[str, float]:
    """Make the calls in turn; return the median of each, in microseconds."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(count):
        for name, call in calls.items():
            began = time.perf_counter()
            call(number)
            taken[name].append((time.perf_counter() - began) * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in taken.items()}


def single_calls(app: InferenceApp, stock: Any) -> dict[str, float]:
    """Return the microseconds of what a task asks of Redis, call by call."""
    store, run = inference_of(app).store, uuid.uuid4().hex
    client = stock.backend.client
    blank = NewTask("", "noop", "batch", "batch", "fresh", 0, "n", time.time())
    meta = b'{"status":"SUCCESS","result":null,"traceback":null,"children":[],"date_done":null,"task_id":"x"}'
    tokens: dict[int, int] = {}

    def claim(number: int) -> None:
        (answer,) = store.claim([Claimant(f"{run}-{number}", "noop", "batch", "fresh")], "bench", LEASE_S)
        tokens[number] = answer.token

    return median_us(
        {
            "ping": lambda _: client.ping(),
            "celery result": lambda number: stock.backend.store_result(f"{run}-{number}", None, "SUCCESS"),
            "submit": lambda number: store.submit([blank._replace(id=f"{run}-{number}")]),
            "submit with dedup": lambda number: store.submit(
                [blank._replace(id=f"{run}-s{number}", shared=(ShareKey(f"{run}{number}", 60.0),))]
            ),
            "join by dedup": lambda number: store.submit(
                [blank._replace(id=f"{run}-j{number}", shared=(ShareKey(f"{run}{number}", 60.0),))]
            ),
            "claim": claim,
            "end": lambda number: store.write(
                f"{run}-{number}", tokens[number], 0, "success", None, meta, 3600, name="noop", tier="batch"
            ),
        }
    )


def main() -> None:
    """Count the round trips of both sides, then time the calls."""
    report = Report("overhead")
    with Bench() as bench:
        environment = bench.setting(worker__hold_s=0.0)
        namespace, vhost = environment["INFERENCE_NAMESPACE"], environment["INFERENCE_BROKER__URL"]
        seen = {key: text for key, text in environment.items() if key != "BENCH_STARTS"}
        app = app_for(seen)
        mine = {
            "STOCK_BROKER": vhost,
            "STOCK_STATE": bench.redis.url(1),
            "STOCK_CONFIRMS": "1",
            "STOCK_QUEUES": "stock",
        }
        os.environ.update(mine)
        stock = make_stock()
        noop, equal = task_of(app, "noop"), task_of(app, "equal")
        numbers = itertools.count(0.5)  # equal to none before
        sides: dict[str, Callable[[int], object]] = {
            "celery": lambda _: stock.tasks["noop"].apply_async(),
            "ours": lambda _: noop.submit(),
            "ours with dedup": lambda _: equal.submit(0.0, next(numbers)),
        }
        for submit in sides.values():
            submit(-1)  # connects, and declares the queues
        trips: dict[str, dict[str, float]] = {}
        for name, submit in sides.items():
            report.say(name)
            theirs = name == "celery"
            trips[name] = trips_of(
                bench,
                bench.redis.url(),
                submit,
                mine if theirs else seen,
                "tests.benchmarks.stock:app" if theirs else "tests.benchmarks.tasks:app",
                "stock" if theirs else f"{namespace}.batch",
                vhost,
            )
            report.say(f"  {trips[name]}")
        calls_us = single_calls(app, stock)
        submits_us = median_us(sides, TASKS)
        inference_of(app).publisher.close()
        stock.close()
    added = {
        "status": round(calls_us["submit"] + calls_us["end"] - calls_us["celery result"], 1),
        "claim": calls_us["claim"],
        "dedup": round(calls_us["submit with dedup"] - calls_us["submit"], 1),
    }
    report.say(f"  calls {calls_us} µs, whole submits {submits_us} µs, added {added} µs")
    report.figures = {
        "tasks": TASKS,
        "round_trips_per_task": trips,
        "call_us": calls_us,
        "submit_us": submits_us,
        "added_us_per_task": added,
    }
    for side, most in (("ours", 1.05), ("ours with dedup", 2.05)):
        found = trips[side]
        # The rest of a worker's round trips are its heartbeats, and those of its start.
        report.bar(f"{side}: round trips of a submit", found["submit"], f"<= {most}", ok=found["submit"] <= most)
        report.bar(f"{side}: round trips of the worker", found["worker"], "<= 2.1", ok=found["worker"] <= 2.1)
    report.close()


if __name__ == "__main__":
    main()
