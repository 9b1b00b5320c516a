"""One run of the demo: the same schedule through the tiers and through one queue, on one worker after the other."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from inference_routing.tier import BATCH
from inference_tasks.demo.figures import Figures, TierFigures, quantile
from inference_tasks.demo.programs import Program
from inference_tasks.demo.recording import VARIABLE, Recording, Run
from inference_tasks.demo.schedule import Schedule
from inference_tasks.demo.side import Call, Side
from inference_tasks.errors import DeploymentError

__all__ = ["Look", "Outcome", "Runner"]

READY = " ready."
READY_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.1
SHORTEST_TRIAL_S = 1.5
TRIAL_TIMEOUT_S = 60.0
QUICK = 0.3
SHORTEST_INTERVAL_S = 0.001


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a run in the middle of it."""

    side: Side
    elapsed_s: float
    run_s: float
    tiers: dict[str, TierFigures]
    depths: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one side made of the schedule.

    Attributes:
        content_types: {content type: files}, the most frequent first.
    """

    side: Side
    tiers: dict[str, TierFigures]
    content_types: dict[str, int]


class Runner:
    """Starts workers, feeds them and watches them."""

    def __init__(self, directory: Path, files: Sequence[Path], promised: dict[str, float], slots: int) -> None:
        """Prepare; nothing is started yet.

        Args:
            directory: for recordings and the workers' logs.
            files: what is classified, over and over.
            promised: {tier: share while all have work}.
            slots: tasks at a time.
        """
        self._directory = directory
        self._paths = itertools.cycle([str(path) for path in files])
        self._promised = promised
        self._slots = slots
        self._numbers = itertools.count()

    @contextmanager
    def worker(self, side: Side) -> Iterator[tuple[Program, Recording]]:
        """Run the worker of one side; its model is loaded by the time it is yielded."""
        recording = Recording(self._directory / f"{side.name}.jsonl")
        program = Program(
            side.worker(self._slots),
            log=self._directory / f"{side.name}.log",
            environment={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                VARIABLE: str(recording.path),
                # The model's runtime leaves a file of its own there.
                "TMPDIR": str(self._directory),
            },
        )
        try:
            program.wait_for(READY, READY_TIMEOUT_S)
            yield program, recording
        finally:
            program.stop()

    def capacity_per_s(self, side: Side, program: Program, recording: Recording) -> float:
        """Measure how many files a second the worker classifies while it has nothing else to do.

        From the shorter of the intervals between starts: a machine that is busy with other things stalls it now and
        then, and a load that is too small would show nothing.
        """
        count = 16 * self._slots
        # The first ones find the files and the processor cold.
        self._trial(side, program, recording, count)
        while True:
            runs = self._trial(side, program, recording, count)
            starts_s = sorted(run.started_at_s for run in runs)
            if starts_s[-1] - starts_s[0] >= SHORTEST_TRIAL_S:
                typical_s = quantile((later - one for one, later in itertools.pairwise(starts_s)), QUICK)
                return 1 / max(cast(float, typical_s), SHORTEST_INTERVAL_S)
            count *= 2

    def _trial(self, side: Side, program: Program, recording: Recording, count: int) -> list[Run]:
        side.send(BATCH, self._calls(BATCH, count))
        runs: list[Run] = []
        end_s = time.monotonic() + TRIAL_TIMEOUT_S
        while len(runs) < count:
            program.check()
            if time.monotonic() > end_s:
                raise DeploymentError(f"The worker has run {len(runs)} of {count} tasks in {TRIAL_TIMEOUT_S:g} s.")
            time.sleep(LOOK_EVERY_S / 10)
            runs += [row for row in recording.new() if isinstance(row, Run)]
        return runs

    def run(
        self, side: Side, program: Program, recording: Recording, schedule: Schedule, show: Callable[[Look], object]
    ) -> Outcome:
        """Send the schedule, whatever the worker makes of it, and return what it made of it.

        Args:
            show: is given what is seen, several times a second.
        """
        recording.new()
        figures = Figures(self._promised)
        started_at_s = time.time()
        feeder = _Feeder(side, schedule, figures, self._calls, started_at_s)
        feeder.start()
        try:
            while (elapsed_s := time.time() - started_at_s) < schedule.run_s:
                program.check()
                feeder.check()
                figures.add(recording.new())
                show(Look(side, elapsed_s, schedule.run_s, figures.tiers(time.time()), side.depths()))
                time.sleep(max(0.0, min(LOOK_EVERY_S, started_at_s + schedule.run_s - time.time())))
        finally:
            feeder.stop()
        feeder.check()
        end_at_s = started_at_s + schedule.run_s
        figures.add(recording.new(), until_s=end_at_s)
        return Outcome(side, figures.tiers(end_at_s), dict(figures.content_types.most_common()))

    def _calls(self, tier: str, count: int) -> list[Call]:
        return [(next(self._paths), tier, next(self._numbers)) for _ in range(count)]


class _Feeder(threading.Thread):
    """Submits what is due when it is due; an open loop, so a slow answer delays no request's clock."""

    def __init__(
        self,
        side: Side,
        schedule: Schedule,
        figures: Figures,
        calls: Callable[[str, int], list[Call]],
        started_at_s: float,
    ) -> None:
        super().__init__(name="demo-feeder", daemon=True)
        self._side = side
        self._schedule = schedule
        self._figures = figures
        self._calls = calls
        self._started_at_s = started_at_s
        self._stopped = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            for arrival in self._schedule.arrivals():
                due_at_s = self._started_at_s + arrival.offset_s
                if self._stopped.wait(max(0.0, due_at_s - time.time())):
                    return
                calls = self._calls(arrival.tier, arrival.calls)
                self._figures.submitted([number for _, _, number in calls], arrival.tier, due_at_s)
                self._figures.refused(self._side.send(arrival.tier, calls))
        except Exception as error:
            self._error = error

    def check(self) -> None:
        """Raise what stopped the feeder, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped.set()
        self.join()
