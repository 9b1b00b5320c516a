"""Shares achieved by real workers while all tiers are backlogged, from their own logs of the hand-overs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.benchmarks.harness import Bench, Report, Start, app_for, starts, task_of, wait_until

TIERS = ("realtime", "batch", "offline")
PROMISED = {"realtime": 8 / 11, "batch": 2 / 11, "offline": 1 / 11}
POOLS = (("prefork", 1), ("prefork", 4), ("prefork", 8), ("threads", 1), ("threads", 4), ("threads", 8), ("solo", 1))
STARTS = int(os.environ.get("BENCH_STARTS_WANTED", "1100"))
EQUAL_S = 0.005
LENGTHS_S = {"realtime": 0.005, "batch": 0.015, "offline": 0.1}
SLOTS_OF_THE_NEW = 8


class Run(NamedTuple):
    """One scenario: how many tasks of which length each tier holds, and the settings."""

    backlog: dict[str, int]
    lengths_s: dict[str, float]
    settings: dict[str, object]
    pool: str = "prefork"
    slots: int = 1
    workers: int = 1
    name: str = "sleep"


def run(
    bench: Bench, scenario: Run, *, until: Callable[[list[Start]], bool], timeout_s: float = 90
) -> list[list[Start]]:
    """Fill the queues, then start the workers; return each worker's hand-overs while every tier was backlogged."""
    environment = bench.setting(tiers__realtime__bound=100_000, **scenario.settings)
    app = app_for(environment)
    for tier, count in scenario.backlog.items():
        task = "sleep" if tier == "realtime" else scenario.name
        answer = task_of(app, task).submit_many([(scenario.lengths_s[tier],)] * count, tier=tier)
        assert len(answer.accepted) == count, answer
    with bench.workers(environment, scenario.workers, "-P", scenario.pool, "-c", str(scenario.slots)):
        wait_until(lambda: until(_flat(starts(environment))), timeout_s, f"{scenario}")
    return [_backlogged(log, scenario) for log in starts(environment).values()]


def _flat(logs: dict[str, list[Start]]) -> list[Start]:
    return [start for log in logs.values() for start in log]


def _backlogged(log: list[Start], scenario: Run) -> list[Start]:
    """Cut off what was started once a tier had fewer tasks left than the worker may hold."""
    left = {tier: count // scenario.workers - 64 for tier, count in scenario.backlog.items()}
    for place, start in enumerate(log):
        left[start.tier] -= 1
        if left[start.tier] < 0:
            return log[:place]
    return log


def windows_off(log: Sequence[Start]) -> int:
    """Return how many windows of 11 starts do not hold exactly 8, 2 and 1."""
    expected = Counter({"realtime": 8, "batch": 2, "offline": 1})
    tiers = [start.tier for start in log]
    return sum(Counter(tiers[at : at + 11]) != expected for at in range(len(tiers) - 10))


def shares(log: Sequence[Start], amount: Callable[[Start], float]) -> dict[str, float]:
    """Return {tier: part of the whole}."""
    sums = {tier: sum(amount(start) for start in log if start.tier == tier) for tier in TIERS}
    total = sum(sums.values()) or 1.0
    return {tier: round(part / total, 4) for tier, part in sums.items()}


def off_by(found: dict[str, float]) -> float:
    """Return the largest distance from the promised shares, in points of 100."""
    return max(abs(found[tier] - PROMISED[tier]) for tier in TIERS) * 100


def equal_lengths(bench: Bench, report: Report) -> dict[str, object]:
    """Tasks of one length, on every pool: exact by count, within a point by time."""
    figures: dict[str, object] = {}
    backlog = {"realtime": STARTS * 8 // 11 + 150, "batch": STARTS * 2 // 11 + 110, "offline": STARTS // 11 + 100}
    lengths = dict.fromkeys(TIERS, EQUAL_S)
    for pool, slots in POOLS:
        for share in ("count", "time"):
            scenario = Run(backlog, lengths, {"worker__share": share}, pool, slots)
            (log,) = run(bench, scenario, until=lambda log: len(log) >= STARTS + 20)
            log = log[:STARTS]
            found = shares(log, lambda start: 1.0)
            name = f"{pool} {slots} {share}"
            figures[name] = {"starts": len(log), "shares": found, "windows_off": windows_off(log)}
            if share == "count":
                off = windows_off(log)
                report.bar(f"{name}: windows of 11 without 8/2/1, of {len(log) - 10}", off, "= 0", ok=off == 0)
            else:
                report.bar(f"{name}: points off the shares", off_by(found), "<= 1", ok=off_by(found) <= 1)
    return figures


def unequal_lengths(bench: Bench, report: Report) -> dict[str, object]:
    """Tasks of 5, 15 and 100 ms on four workers: slot time by the weights."""
    scenario = Run({"realtime": 9000, "batch": 1200, "offline": 260}, LENGTHS_S, {"worker__share": "time"}, workers=4)
    logs = run(bench, scenario, until=lambda log: len(log) >= 5000)
    log = [start for one in logs for start in one if start.cost_s == start.cost_s]
    found = shares(log, lambda start: start.cost_s)
    report.bar("5/15/100 ms: points of slot time off the shares", off_by(found), "<= 2", ok=off_by(found) <= 2)
    return {"starts": len(log), "slot_time": found, "starts_share": shares(log, lambda start: 1.0)}


def floor(bench: Bench, report: Report) -> dict[str, object]:
    """Weights 100:2:1 with a floor of .05: offline at least 5 in every 100 starts."""
    settings: dict[str, object] = {"worker__share": "count", "tiers__offline__floor": 0.05}
    settings |= {"tiers__realtime__weight": 100, "tiers__batch__weight": 2, "tiers__offline__weight": 1}
    scenario = Run({"realtime": 1500, "batch": 200, "offline": 250}, dict.fromkeys(TIERS, EQUAL_S), settings, slots=4)
    (log,) = run(bench, scenario, until=lambda log: len(log) >= STARTS)
    tiers = [start.tier for start in log]
    least = min(tiers[at : at + 100].count("offline") for at in range(len(tiers) - 99))
    report.bar("floor .05 beside 100:2:1: least offline starts in 100", least, ">= 5", ok=least >= 5)
    return {"starts": len(log), "shares": shares(log, lambda start: 1.0), "least": least}


def new_kind(bench: Bench, report: Report) -> dict[str, object]:
    """A kind of task that takes 60 times what its tier took so far: it must never hold every slot."""
    settings: dict[str, object] = {"worker__share": "time"}
    environment = bench.setting(tiers__realtime__bound=100_000, **settings)
    app = app_for(environment)
    short_s = 0.02
    task_of(app, "sleep").submit_many([(short_s,)] * 3000, tier="realtime")
    task_of(app, "sleep").submit_many([(short_s,)] * 60, tier="batch")
    task_of(app, "strange").submit_many([(short_s * 60,)] * 60, tier="batch")
    with bench.workers(environment, 1, "-P", "threads", "-c", str(SLOTS_OF_THE_NEW)):
        wait_until(lambda: len(_flat(starts(environment))) >= 2200, 60, "new kind")
    log = _flat(starts(environment))
    long = [start for start in log if start.cost_s > short_s * 30]
    most = max((sum(one.at_s <= start.at_s < one.at_s + one.cost_s for one in long) for start in long), default=0)
    limit = SLOTS_OF_THE_NEW - 1
    report.bar("new kind of 60x: most slots at once", most, f"<= {limit}", ok=0 < most <= limit)
    gaps = [after.at_s - before.at_s for before, after in zip(_realtime(log), _realtime(log)[1:], strict=False)]
    return {"long_tasks": len(long), "most_slots": most, "longest_realtime_gap_s": round(max(gaps, default=0.0), 3)}


def _realtime(log: Sequence[Start]) -> list[Start]:
    return [start for start in log if start.tier == "realtime"]


def main() -> None:
    """Run all scenarios."""
    report = Report("share")
    with Bench() as bench:
        for part in (equal_lengths, unequal_lengths, floor, new_kind):
            report.say(part.__name__)
            report.figures[part.__name__] = part(bench, report)
    report.close()


if __name__ == "__main__":
    main()
