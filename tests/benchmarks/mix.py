"""How long realtime waits beside backlogs of longer tasks: alone, in one FIFO queue, on stock Celery, and on ours.

Every side has four workers of one slot and gets the same arrivals: realtime at 40/s of 20 ms from an open loop (sent
when they are due, whatever became of those before), beside tasks of 200 ms (batch) and 500 ms (offline) that last for
the whole run. A wait runs from the time a task was due to be sent to its start. What has not started when the run is
over counts with the time it has waited by then, so its side's quantiles are least values; ``started`` says how many.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from celery import Celery

from inference_tasks.app import inference_of
from tests.benchmarks.harness import Bench, Report, app_for, quantile, task_of
from tests.benchmarks.stock import make_stock

RUN_S = float(os.environ.get("BENCH_RUN_S", "8"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
RATE_PER_S = 40.0
WORKERS = 4
LEAD_S = 2.0
GRACE_S = 2.0
SENDERS = 8
REALTIME_S, BATCH_S, OFFLINE_S = 0.02, 0.2, 0.5
LIMIT_S = 0.2

Send = Callable[[str, float, float], str]
"""Send a task of a tier, of a length, due at a time; return its id."""


class Waits(NamedTuple):
    """What one run on one side gave. Seconds, and counts."""

    p50_s: float
    p99_s: float
    sent: int
    started: int
    latest_send_s: float


def backlog(seed: int) -> list[tuple[str, float]]:
    """Return more than four workers can do in a run, of either kind alone, as (tier, length) in a mixed order."""
    whole_s = LEAD_S + RUN_S + GRACE_S
    tasks = [("batch", BATCH_S)] * int(WORKERS * whole_s / BATCH_S)
    tasks += [("offline", OFFLINE_S)] * int(WORKERS * whole_s / OFFLINE_S)
    random.Random(seed).shuffle(tasks)
    return tasks


def arrivals_s(seed: int) -> list[float]:
    """Return when realtime tasks are due, in seconds from the start: a Poisson process."""
    order = random.Random(seed)
    times = [order.expovariate(RATE_PER_S)]
    while times[-1] < RUN_S:
        times.append(times[-1] + order.expovariate(RATE_PER_S))
    return times[:-1]


def drive(app: Celery, send: Send, seed: int, lead_s: float) -> Waits:
    """Send the realtime tasks when they are due, and return how long they waited."""
    time.sleep(lead_s)
    began_s = time.time()
    lateness_s: list[float] = []

    def send_one(due_s: float) -> tuple[str, float]:
        lateness_s.append(time.time() - due_s)
        return send("realtime", REALTIME_S, due_s), due_s

    # In threads: a send that takes long must not hold up those after it.
    with ThreadPoolExecutor(SENDERS) as senders:
        sending = []
        for after_s in arrivals_s(seed):
            time.sleep(max(0.0, began_s + after_s - time.time()))
            sending.append(senders.submit(send_one, began_s + after_s))
        due_at_s = dict(one.result() for one in sending)
    time.sleep(max(0.0, began_s + RUN_S + GRACE_S - time.time()))
    ended_s = time.time()
    waits: list[float] = []
    started = 0
    for task_id, due_s in due_at_s.items():
        wait_s = app.AsyncResult(task_id).result
        if isinstance(wait_s, float):
            started += 1
            waits.append(wait_s)
        else:
            waits.append(ended_s - due_s)
    return Waits(quantile(waits, 0.5), quantile(waits, 0.99), len(waits), started, max(lateness_s))


def ours(bench: Bench, seed: int, *, with_backlog: bool = True, reserved: int = 0) -> Waits:
    """Run our side; ``reserved`` of the workers serve realtime only."""
    environment = bench.setting()
    app = app_for(environment)
    sleep = task_of(app, "sleep")

    def send(tier: str, length_s: float, due_s: float) -> str:
        return sleep.options(tier=tier).submit(length_s, due_s).id

    send("realtime", 0.0, 0.0)  # declares the queues, before the clock runs
    if with_backlog:
        waiting = backlog(seed)
        for tier in ("batch", "offline"):
            sleep.submit_many([(length_s, 0.0) for each, length_s in waiting if each == tier], tier=tier)
    with ExitStack() as stack:
        stack.callback(inference_of(app).publisher.close)
        stack.enter_context(bench.workers(environment, WORKERS - reserved, "-P", "prefork", "-c", "1"))
        if reserved:
            only = environment | {"INFERENCE_WORKER__TIERS": "realtime"}
            stack.enter_context(bench.workers(only, reserved, "-P", "prefork", "-c", "1", name="r"))
        return drive(app, send, seed, LEAD_S if with_backlog else 0.5)


@contextmanager
def stock_side(bench: Bench, queues: str) -> Iterator[tuple[Celery, dict[str, str]]]:
    """Make a stock app on a vhost of its own."""
    environment = {
        "STOCK_BROKER": bench.setting()["INFERENCE_BROKER__URL"],
        "STOCK_STATE": bench.redis.url(1),
        "STOCK_QUEUE_TYPE": "quorum",
        "STOCK_QUEUES": queues,
    }
    os.environ.update(environment)
    app = make_stock()
    try:
        yield app, environment
    finally:
        app.close()


def theirs(bench: Bench, seed: int, *, queues: str) -> Waits:
    """Run stock Celery with a queue for each tier, or one for all."""
    names = queues.split()
    with stock_side(bench, queues) as (app, environment):

        def send(tier: str, length_s: float, due_s: float) -> str:
            sent = app.tasks["sleep"].apply_async((length_s, due_s), queue=tier if tier in names else names[0])
            return str(sent.id)

        for tier, length_s in backlog(seed):
            send(tier, length_s, 0.0)
        with bench.workers(environment, WORKERS, "-P", "prefork", "-c", "1", app="tests.benchmarks.stock:app"):
            return drive(app, send, seed, LEAD_S)


def main() -> None:
    """Run all sides in turn, ``ROUNDS`` times."""
    report = Report("mix")
    reserved = f"ours, 1 of {WORKERS} workers reserved"
    runs: dict[str, list[Waits]] = {}
    with Bench() as bench:
        sides: dict[str, Callable[[int], Waits]] = {
            "alone": lambda seed: ours(bench, seed, with_backlog=False),
            "one FIFO queue": lambda seed: theirs(bench, seed, queues="all"),
            "stock, three queues": lambda seed: theirs(bench, seed, queues="realtime batch offline"),
            "ours": lambda seed: ours(bench, seed),
            reserved: lambda seed: ours(bench, seed, reserved=1),
        }
        for number in range(ROUNDS):
            for side, run in sides.items():
                waits = run(number + 1)
                report.say(f"  {side}: {waits}")
                runs.setdefault(side, []).append(waits)
    figures = {
        side: {
            "p50_s": round(statistics.median(run.p50_s for run in rounds), 4),
            "p99_s": round(statistics.median(run.p99_s for run in rounds), 4),
            "sent": sum(run.sent for run in rounds),
            "started": sum(run.started for run in rounds),
            "latest_send_s": round(max(run.latest_send_s for run in rounds), 4),
        }
        for side, rounds in runs.items()
    }
    report.figures = {"run_s": RUN_S, "rounds": ROUNDS, "realtime_wait": figures}
    value = float(figures[reserved]["p99_s"])
    report.bar(f"{reserved}: P99 wait of realtime, s", value, f"<= {LIMIT_S}", ok=value <= LIMIT_S)
    report.close()


if __name__ == "__main__":
    main()
