"""Microseconds per pick with three tiers of three lanes, and with 64 queues; by time and by count. Needs no server."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace

from inference_routing import default_policy
from inference_routing.lane import LANE_NAMES
from inference_routing.picker import Picker, QueueKey
from inference_routing.policy import Share
from inference_routing.tier import TIER_NAMES
from tests.benchmarks.harness import Report

PICKS = int(os.environ.get("BENCH_PICKS", "20000"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "7"))

# What a worker of eight slots has running while it picks.
RUNNING = 8

LAYOUTS = {
    "3 tiers": tuple(QueueKey(tier, lane, f"{tier}.{lane}") for tier in TIER_NAMES for lane in LANE_NAMES),
    "64 queues": (
        *(QueueKey(tier, lane, f"{tier}.{lane}") for tier in TIER_NAMES for lane in LANE_NAMES[1:]),
        *(QueueKey("realtime", LANE_NAMES[0], f"realtime.{number}") for number in range(56)),
        *(QueueKey(tier, LANE_NAMES[0], f"{tier}.fresh") for tier in TIER_NAMES[1:]),
    ),
}


def pick_alone_us(queues: tuple[QueueKey, ...], share: Share) -> float:
    """Return the microseconds of one pick that is made and left open, with every queue backlogged."""
    picker = Picker(replace(default_policy(), share=share), queues)
    began = time.perf_counter()
    for _ in range(PICKS):
        picker.pick(0.0, queues)
    return (time.perf_counter() - began) / PICKS * 1e6


def cycle_us(queues: tuple[QueueKey, ...], share: Share) -> float:
    """Return the microseconds of all that one task costs: picked, predicted, started, finished, ``RUNNING`` at once."""
    picker = Picker(replace(default_policy(), share=share), queues)
    running = []
    now_s = 0.0
    began = time.perf_counter()
    for number in range(PICKS):
        now_s += 0.002
        pick = picker.pick(now_s, queues)
        assert pick is not None, "every queue is offered"
        picker.predicted(pick, 0.01)
        picker.started(pick, now_s)
        running.append(pick)
        if number >= RUNNING:
            picker.finished(running[number - RUNNING], 0.016)
    return (time.perf_counter() - began) / PICKS * 1e6


def main() -> None:
    """Measure every layout and share in turn, ``ROUNDS`` times."""
    report = Report("picker")
    runs: dict[str, list[float]] = {}
    shares: tuple[Share, ...] = ("time", "count")
    for _ in range(ROUNDS):
        for layout, queues in LAYOUTS.items():
            for share in shares:
                runs.setdefault(f"{layout}, {share}: pick", []).append(pick_alone_us(queues, share))
                runs.setdefault(f"{layout}, {share}: whole task", []).append(cycle_us(queues, share))
    medians_us = {name: round(statistics.median(values), 2) for name, values in runs.items()}
    for name, value in medians_us.items():
        report.say(f"  {name}: {value} µs")
    report.figures = {"picks": PICKS, "rounds": ROUNDS, "queues": {k: len(v) for k, v in LAYOUTS.items()}} | {
        "us": medians_us
    }
    report.close()


if __name__ == "__main__":
    main()
