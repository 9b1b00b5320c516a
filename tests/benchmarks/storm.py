"""How long realtime waits while very many batch tasks fail at once and are tried again, beside how long it does alone.

Four workers of one slot; realtime at 40/s of 20 ms from an open loop, as in ``mix``. The storm: tasks that fail as soon
as they start, all there before the clock runs, each tried again a second later until its attempts are exhausted.

Both rounds of a pair have the same slots, none reserved, and the same arrivals of realtime. Nothing that runs is
interrupted, so realtime waits for what is left of a run that holds its slot: ``held_p50_s`` and ``held_p99_s`` say how
long the failing runs hold theirs. Much of that is the broker's confirm for the parked copy, and the processor's queue
where two cores carry four workers, the broker and Redis.
"""

from __future__ import annotations

import math
import os
import statistics
from contextlib import ExitStack

from inference_tasks.app import inference_of
from inference_tasks.state.records import State
from tests.benchmarks.harness import Bench, Report, app_for, quantile, starts, task_of
from tests.benchmarks.mix import WORKERS, Waits, drive
from tests.benchmarks.retrying import ATTEMPTS, storm

STORM = int(os.environ.get("BENCH_STORM", "10000"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
RATIO, ABSOLUTE_S = 1.5, 0.05


def run(bench: Bench, seed: int, size: int) -> tuple[Waits, dict[str, float]]:
    """Run one round; return the waits of realtime, and what the storm was like, with its tasks by state at the end."""
    environment = bench.setting()
    app = app_for(environment)
    app.inference(tier="batch", name="storm", max_attempts=ATTEMPTS, backoff_s=1)(storm)
    sleep = task_of(app, "sleep")

    def send(tier: str, length_s: float, due_s: float) -> str:
        return sleep.options(tier=tier).submit(length_s, due_s).id

    send("realtime", 0.0, 0.0)  # declares the queues, before the clock runs
    failing = [one.id for one in task_of(app, "storm").submit_many([()] * size).accepted] if size else []
    with ExitStack() as stack:
        stack.callback(inference_of(app).publisher.close)
        stack.enter_context(
            bench.workers(environment, WORKERS, "-P", "prefork", "-c", "1", app="tests.benchmarks.retrying:app")
        )
        waits = drive(app, send, seed, 0.5)
        records = inference_of(app).store.get_many(failing)
    states = {state: sum(record is not None and record.state == state for record in records) for state in State}
    attempts = sum(record.attempts for record in records if record is not None)
    runs = [one for log in starts(environment).values() for one in log if one.tier == "batch"]
    held_s = [one.cost_s for one in runs if not math.isnan(one.cost_s)]
    seen: dict[str, float] = {str(state): count for state, count in states.items() if count}
    if held_s:
        seen |= {f"held_p{percent}_s": round(quantile(held_s, percent / 100), 4) for percent in (50, 99)}
    return waits, seen | {"attempts": attempts}


def main() -> None:
    """Run both in turn, ``ROUNDS`` times."""
    report = Report("storm")
    sides: dict[str, list[tuple[Waits, dict[str, float]]]] = {"alone": [], "beside the storm": []}
    with Bench() as bench:
        for number in range(ROUNDS):
            for side, size in (("alone", 0), ("beside the storm", STORM)):
                found = run(bench, number + 1, size)
                report.say(f"  {side}: {found}")
                sides[side].append(found)
    figures = {
        side: {
            "p50_s": round(statistics.median(waits.p50_s for waits, _ in rounds), 4),
            "p99_s": round(statistics.median(waits.p99_s for waits, _ in rounds), 4),
            "sent": sum(waits.sent for waits, _ in rounds),
            "started": sum(waits.started for waits, _ in rounds),
            "storm": [states for _, states in rounds],
        }
        for side, rounds in sides.items()
    }
    report.figures = {"storm": STORM, "rounds": ROUNDS, "realtime_wait": figures}
    alone_s, beside_s = (
        statistics.median(waits.p99_s for waits, _ in sides[side]) for side in ("alone", "beside the storm")
    )
    limit_s = max(RATIO * alone_s, alone_s + ABSOLUTE_S)
    what = f"P99 wait of realtime beside {STORM} retrying tasks, s (alone {alone_s:.4f})"
    report.bar(what, beside_s, f"<= {limit_s:.4f}", ok=beside_s <= limit_s)
    report.close()


if __name__ == "__main__":
    main()
