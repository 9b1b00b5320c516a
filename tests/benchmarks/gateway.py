"""The gateway under load: accepted, waited for, and refused; beside a plain FastAPI app on stock Celery, in turn.

All run on this machine, the clients too. Each client sends its next request once the last one is answered, so with many
clients the times are mostly those of standing in line: they say how long a client waits when the gateway is given more
than it can do. No-op tasks; for those that are waited for, each side has one worker of its own kind.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from celery import Celery
from kombu.exceptions import OperationalError

from inference_tasks.app import inference_of
from tests.benchmarks.harness import APP, Bench, Report, app_for, task_of
from tests.benchmarks.load import Load, offer, request_of
from tests.benchmarks.stock import make_stock
from tests.support.gateway import GatewayProcess
from tests.support.processes import LoggedProcess, environment

SECONDS = float(os.environ.get("BENCH_SECONDS", "3"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
CLIENTS = tuple(map(int, os.environ.get("BENCH_CLIENTS", "1 64 1000").split()))
QUEUE_TYPE = os.environ.get("BENCH_QUEUE_TYPE", "quorum")
PLENTY, FULL = 1_000_000, 20
WAIT = {"Prefer": "wait=30"}

Figures = dict[str, dict[str, float]]


@contextmanager
def ours(bench: Bench, env: Mapping[str, str]) -> Iterator[str]:
    """Run our gateway, and yield where."""
    argv = (sys.executable, "-m", "inference_tasks.cli", "gateway", "-A", APP, "--port", "0")
    seen = {key: text for key, text in env.items() if key != "BENCH_STARTS"}
    log = bench.directory / "gateway.log"
    with GatewayProcess(argv, log=log, env=environment(bench.directory, seen), directory=bench.directory) as process:
        yield process.url


@contextmanager
def plain(bench: Bench, env: Mapping[str, str]) -> Iterator[str]:
    """Run the plain app, and yield where."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--port", str(port), "--no-access-log", "--backlog", "4096")
    argv = (sys.executable, "-m", "uvicorn", "tests.benchmarks.plain_web:web", *options)
    log = bench.directory / "plain.log"
    with LoggedProcess(argv, log=log, env=environment(bench.directory, env), directory=bench.directory) as process:
        process.wait_for("Application startup complete")
        yield f"http://127.0.0.1:{port}"


class Sides:
    """A scenario of each side: ours with one tier that is full, stock with a vhost that is."""

    def __init__(self, bench: Bench) -> None:
        self.env = bench.setting(
            broker__queue_type=QUEUE_TYPE,
            tiers__realtime__bound=PLENTY,
            tiers__batch__bound=PLENTY,
            tiers__offline__bound=FULL,
        )
        app = app_for(self.env)
        task_of(app, "noop").submit_many([()] * 2 * FULL, tier="offline")
        inference_of(app).publisher.close()
        self.plain_env = self._stock(bench, PLENTY, 1)
        self.plain_full_env = self._stock(bench, FULL, 2)

    def _stock(self, bench: Bench, bound: int, database: int) -> dict[str, str]:
        env = {
            "STOCK_BROKER": bench.setting()["INFERENCE_BROKER__URL"],
            "STOCK_STATE": bench.redis.url(database),
            "STOCK_QUEUE_TYPE": QUEUE_TYPE,
            "STOCK_BOUND": str(bound),
            "STOCK_CONFIRMS": "1",
        }
        os.environ.update(env)
        stock: Celery = make_stock()
        for _ in range(2 * FULL if bound == FULL else 0):
            try:
                stock.tasks["noop"].apply_async(queue="batch", retry=False)
            except OperationalError:
                continue
        stock.close()
        return env


def measured(report: Report, url: str, asked: Mapping[str, tuple[bytes, int]]) -> dict[str, Figures]:
    """Measure requests in turn, each with every number of clients; {what: the median of the rounds}.

    Args:
        asked: {what: (request, status of its answer)}.
    """
    found: dict[str, Figures] = {what: {} for what in asked}
    for request, status in asked.values():
        offer(url, request, 4, 0.5, status)  # connects, and warms up
    for clients in CLIENTS:
        rounds: dict[str, list[Load]] = {what: [] for what in asked}
        for _ in range(ROUNDS):
            for what, (request, status) in asked.items():
                rounds[what].append(offer(url, request, clients, SECONDS, status))
        for what, loads in rounds.items():
            found[what][str(clients)] = _medians(loads)
            report.say(f"  {what}, {clients} clients: {found[what][str(clients)]}")
    return found


def _medians(rounds: list[Load]) -> dict[str, float]:
    figures = [load.figures() for load in rounds]
    return {name: round(statistics.median(one[name] for one in figures), 2) for name in figures[0]}


def answers(bench: Bench, report: Report, sides: Sides) -> dict[str, Figures]:
    """Accepted and refused, without a worker."""
    path, batch = "/v1/tasks/noop", {"args": [], "tier": "batch"}
    with ours(bench, sides.env) as url:
        full = request_of(url, path, {**batch, "tier": "offline"})
        found = measured(report, url, {"202": (request_of(url, path, batch), 202), "429": (full, 429)})
    with plain(bench, sides.plain_env) as url:
        found |= measured(report, url, {"plain 202": (request_of(url, path, batch), 202)})
    with plain(bench, sides.plain_full_env) as url:
        found |= measured(report, url, {"plain 429": (request_of(url, path, batch), 429)})
    return found


def round_trips(bench: Bench, report: Report, sides: Sides) -> dict[str, Figures]:
    """Submit and wait for the result, with one worker."""
    bench.purge(sides.env["INFERENCE_NAMESPACE"], f"{sides.env['INFERENCE_NAMESPACE']}.batch")
    body = {"args": [], "tier": "realtime"}
    pool = ("-P", "threads", "-c", "4")
    seen = {key: text for key, text in sides.env.items() if key != "BENCH_STARTS"}
    with bench.workers(seen, 1, *pool), ours(bench, sides.env) as url:
        found = measured(report, url, {"wait": (request_of(url, "/v1/tasks/noop", body, WAIT), 200)})
    options = (*pool, "-Q", "realtime")
    with (
        bench.workers(sides.plain_env, 1, *options, app="tests.benchmarks.stock:app", name="s") as (worker,),
        plain(bench, sides.plain_env) as url,
    ):
        found |= measured(report, url, {"plain wait": (request_of(url, "/v1/waits/noop", body), 200)})
        worker.kill()  # its warm stop may take half a minute, and nothing is measured any more
    return found


def main() -> None:
    """Measure both sides, and hold ours against its bar."""
    report = Report("gateway")
    with Bench() as bench:
        sides = Sides(bench)
        found = answers(bench, report, sides) | round_trips(bench, report, sides)
    for clients in map(str, CLIENTS):
        accepted, refused = found["202"][clients], found["429"][clients]
        ratio = refused["p99_ms"] / accepted["p99_ms"]
        report.bar(f"{clients} clients: P99 of a 429 / P99 of a 202", ratio, "<= 3", ok=ratio <= 3)
        strays = sum(found[what][clients]["other"] for what in ("202", "429", "wait"))
        report.bar(f"{clients} clients: answers of ours with another status", strays, "== 0", ok=strays == 0)
    report.figures = {"seconds": SECONDS, "rounds": ROUNDS, "queue_type": QUEUE_TYPE, "by_answer_and_clients": found}
    report.close()


if __name__ == "__main__":
    main()
