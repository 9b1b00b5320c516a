"""What watching costs: no-op tasks per second with all off, with metrics and events, and with tracing on top.

One worker takes turns between the sides every tenth of a second, forth and back, so that whatever else the machine
does meets all of them alike; it is scraped each second throughout. Of each round the ratio to its own "off" is taken,
and the middle of these. "control" is "off" once more: what it seems to lose is the error of the measurement, and on a
machine with other work only the time that the events themselves take says something. Spans are made and ended, and go
nowhere.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from math import exp, log
from pathlib import Path
from random import Random

from celery.signals import worker_ready
from opentelemetry.sdk.trace import TracerProvider

from inference_tasks.observe.events import subscribe, unsubscribe
from inference_tasks.observe.exposition import Address, MetricsServer
from inference_tasks.observe.metrics import Recorder
from inference_tasks.observe.tracing import stop_tracing, trace_tasks
from inference_tasks.signals import slot_freed
from tests.benchmarks.harness import Bench, Report, app_for, task_of, wait_until
from tests.benchmarks.tasks import app
from tests.support.servers import free_ports

__all__ = ["app"]

SLICE_S = 0.1
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "120"))
TIERS = ("realtime", "batch", "offline")
# Tracing happens where a task runs: it can be switched on and off in one process only, so with threads.
SIDES = {"prefork": ("off", "metrics", "control"), "threads": ("off", "metrics", "traced", "control")}
SLOTS = {"prefork": 2, "threads": 4}
LIMIT = 0.03
TASKS_PER_S = 2500  # more than any side does

_recorder = Recorder()
_provider = TracerProvider()


def _turn(side: str) -> None:
    """Have this process watch as one side does."""
    if side in ("off", "control"):
        unsubscribe(_recorder)
    else:
        subscribe(_recorder)
    if side == "traced":
        trace_tasks(_provider)
    else:
        stop_tracing()


def _take_turns(file: Path, sides: tuple[str, ...]) -> None:
    ended = 0

    def count(**_: object) -> None:
        nonlocal ended
        ended += 1

    slot_freed.connect(count, weak=False)
    with file.open("w", buffering=1) as lines:
        for side in cycle((*sides, *reversed(sides))):
            _turn(side)
            before, began_s, cpu_s = ended, time.monotonic(), time.process_time()
            time.sleep(SLICE_S)
            took_s = time.monotonic() - began_s
            lines.write(f"{side} {ended - before} {took_s} {time.process_time() - cpu_s}\t\n")


if "BENCH_SLICES" in os.environ:
    _server = MetricsServer(
        Address("127.0.0.1", int(os.environ["BENCH_METRICS_PORT"])), _recorder, lambda: None
    ).start()

    @worker_ready.connect(weak=False)
    def _begin(**_: object) -> None:
        arguments = (Path(os.environ["BENCH_SLICES"]), tuple(os.environ["BENCH_SIDES"].split()))
        threading.Thread(target=_take_turns, args=arguments, daemon=True).start()


def slices(file: Path) -> list[tuple[str, int, float, float]]:
    """Return what has been measured: side, tasks, seconds, CPU seconds of the main process."""
    rows = [row.split() for row in file.read_text().splitlines() if row.endswith("\t")] if file.exists() else []
    return [(side, int(tasks), float(took), float(cpu)) for side, tasks, took, cpu in rows]


@contextmanager
def scraped(port: int) -> Iterator[None]:
    """Ask for the metrics each second."""
    done = threading.Event()

    def ask() -> None:
        while not done.wait(1.0):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                answer.read()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run(bench: Bench, pool: str) -> dict[str, list[tuple[int, float, float]]]:
    """Return the slices of each side, (tasks, seconds, CPU seconds); the first and the last round are left out."""
    sides = SIDES[pool]
    environment = bench.setting(broker__queue_type="classic", tiers__realtime__bound=1_000_000)
    client = app_for(environment)
    count = int(TASKS_PER_S * SLICE_S * len(sides) * ROUNDS / 3)
    for tier in TIERS:
        task_of(client, "noop").submit_many([()] * count, tier=tier)
    (port,) = free_ports(1)
    file = bench.directory / f"slices-{pool}"
    seen = {key: text for key, text in environment.items() if key != "BENCH_STARTS"}
    seen |= {"BENCH_SLICES": str(file), "BENCH_SIDES": " ".join(sides), "BENCH_METRICS_PORT": str(port)}
    wanted = len(sides) * (ROUNDS + 2)
    options = ("-P", pool, "-c", str(SLOTS[pool]))
    with bench.workers(seen, 1, *options, app="tests.benchmarks.observe:app") as (worker,), scraped(port):
        wait_until(lambda: len(slices(file)) >= wanted, 60 + 3 * wanted * SLICE_S, "all turns have been taken")
        worker.kill()  # what is left in the queues is of no interest
    found: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for side, tasks, took_s, cpu_s in slices(file)[len(sides) : len(sides) * (ROUNDS + 1)]:
        found[side].append((tasks, took_s, cpu_s))
    return found


def loss(off: list[float], on: list[float]) -> tuple[float, float, float]:
    """Return the part of the tasks per second that is lost, and the ends of its 90 % interval."""
    # A turn in which the machine did nothing for us says nothing.
    ratios = [log(one / other) for one, other in zip(on, off, strict=True) if one and other]
    random = Random(1)
    drawn = sorted(1 - exp(_middle(random.choices(ratios, k=len(ratios)))) for _ in range(1000))
    return 1 - exp(_middle(ratios)), drawn[50], drawn[-51]


def _middle(values: list[float]) -> float:
    """Return the mean without the lowest and the highest quarter."""
    rest = sorted(values)[len(values) // 4 : -(len(values) // 4) or None]
    return statistics.fmean(rest)


def emitted(turn: Callable[[], None]) -> float:
    """Return the microseconds that the events of one task take, of all metrics that are made of them."""
    from inference_tasks.observe.events import emit

    turn()
    count, least_s = 2_000, float("inf")
    for place in range(20 * count):
        if place % count == 0:
            began_s = time.perf_counter()
        emit("queue.asked", tier="batch", lane="fresh", outcome="message")
        emit("task.claimed", tier="batch", verdict="run")
        emit("task.started", task="t", tier="batch", tier_first="batch", lane="fresh", wait_s=0.1, held_s=0.0)
        emit("task.ended", task="t", tier="batch", tier_first="batch", outcome="success", slot_s=0.01)
        if place % count == count - 1:
            least_s = min(least_s, time.perf_counter() - began_s)
    unsubscribe(_recorder)
    return 1e6 * least_s / count


def main() -> None:
    """Run both pools and hold the losses against the bar."""
    report = Report("observe")
    events_us = emitted(lambda: subscribe(_recorder))
    figures: dict[str, object] = {
        "events of a task, µs": {
            "nobody listens": round(emitted(lambda: None), 2),
            "metrics": round(events_us, 2),
        }
    }
    report.say(f"{figures}")
    with Bench() as bench:
        for pool in SIDES:
            found = run(bench, pool)
            told: dict[str, object] = {}
            rates = {side: [tasks / took_s for tasks, took_s, _ in rows] for side, rows in found.items()}
            for side, rows in found.items():
                tasks = sum(row[0] for row in rows)
                told[side] = {
                    "tasks_per_s": round(statistics.median(rates[side]), 1),
                    "cpu_us_per_task": round(1e6 * sum(row[2] for row in rows) / tasks, 1),
                }
            report.say(f"{pool} {SLOTS[pool]}: {told}")
            for side in SIDES[pool][1:]:
                lost, low, high = loss(rates["off"], rates[side])
                told[f"{side}: lost"] = {"part": round(lost, 4), "90 %": [round(low, 4), round(high, 4)]}
                if side == "control":
                    continue
                report.bar(f"{pool}: part of the tasks/s lost, {side}", lost, f"<= {LIMIT}", ok=lost <= LIMIT)
            off_us = 1e6 * sum(row[2] for row in found["off"]) / sum(row[0] for row in found["off"])
            part = events_us / off_us
            report.bar(
                f"{pool}: CPU time of the events / of the main process, for a task",
                part,
                f"<= {LIMIT}",
                ok=part <= LIMIT,
            )
            figures[f"{pool} {SLOTS[pool]}"] = told
    report.figures = {"rounds": ROUNDS, "slice_s": SLICE_S, **figures}
    report.close()


if __name__ == "__main__":
    main()
