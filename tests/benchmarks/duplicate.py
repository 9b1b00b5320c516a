"""Equal submits at once, again and again: how often each task runs, how many messages that takes, and how long.

The submits of a round come from the threads of two clients, which publish over a connection each and know nothing of
each other. Every other round's task lasts longer than its submits take; the others end at once, and their result is
reused.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from inference_tasks import TaskHandle
from inference_tasks.app import inference_of
from tests.benchmarks.harness import Bench, Report, app_for, quantile, starts, task_of, wait_until
from tests.support.brokers import depths

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "200"))
EQUAL = int(os.environ.get("BENCH_EQUAL", "50"))
CLIENTS, WORKERS = 2, 2
SHORT_S, LONG_S = 0.0, 0.3


def at_once(
    threads: ThreadPoolExecutor, submits: Sequence[Callable[[], TaskHandle[object]]]
) -> list[tuple[str, float]]:
    """Call all at once; return id and seconds of each."""
    barrier = threading.Barrier(len(submits))

    def one(submit: Callable[[], TaskHandle[object]]) -> tuple[str, float]:
        barrier.wait(60)
        began_s = time.monotonic()
        return submit().id, time.monotonic() - began_s

    return list(threads.map(one, submits))


def main() -> None:
    """Run all rounds, wait until nothing waits any more, and count."""
    report = Report("duplicate")
    with Bench() as bench:
        environment = bench.setting()
        apps = [app_for(environment) for _ in range(CLIENTS)]
        sleeps = [task_of(app, "equal") for app in apps]
        for sleep in sleeps:
            sleep.options(dedup=False).submit(0.0, -1.0)  # connects
        ids: list[set[str]] = []
        took_s: list[float] = []
        store = inference_of(apps[0]).store
        with bench.workers(environment, WORKERS, "-P", "prefork", "-c", "2"), ThreadPoolExecutor(EQUAL) as threads:
            for number in range(ROUNDS):
                length_s = LONG_S if number % 2 else SHORT_S
                submits = [
                    partial(sleep.submit, length_s, float(number)) for sleep in sleeps for _ in range(EQUAL // CLIENTS)
                ]
                found = at_once(threads, submits)
                ids.append({task_id for task_id, _ in found})
                took_s += [seconds for _, seconds in found]
            everything = [task_id for known in ids for task_id in known]
            wait_until(
                lambda: all(record and record.is_finished for record in store.get_many(everything)), 120, "all ends"
            )
            wait_until(lambda: not sum(depths(apps[0]).values()), 60, "nothing waits")
        runs = Counter(start.task_id for log in starts(environment).values() for start in log)
        for app in apps:
            inference_of(app).publisher.close()
    run_once = sum(len(known) == 1 and sum(runs[one] for one in known) == 1 for known in ids)
    report.figures = {
        "rounds": ROUNDS,
        "equal": EQUAL,
        "clients": CLIENTS,
        "tasks": len(everything),
        "runs": sum(runs[one] for one in everything),
        "submit_ms": {
            "p50": round(1000 * statistics.median(took_s), 2),
            "p99": round(1000 * quantile(took_s, 0.99), 2),
        },
    }
    report.bar(f"rounds of {EQUAL} equal submits with exactly one run", run_once, f"== {ROUNDS}", ok=run_once == ROUNDS)
    report.close()


if __name__ == "__main__":
    main()
