"""What a submit costs: refused by a full queue, and accepted; ours, stock Celery with confirms, and the bare client.

All sides publish the same task to the same broker and wait for its confirm. Ours also writes the task's record to Redis
first, and tells monitors of a single submit; both sides run as they are by default, but for stock Celery's confirms.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiormq
from aiormq.channel import Channel
from celery import Celery
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps
from pamqp.commands import Basic

from inference_tasks import QueueFullError
from inference_tasks.app import inference_of
from inference_tasks.inference_app import InferenceApp
from tests.benchmarks.harness import Bench, Report, app_for, task_of
from tests.benchmarks.stock import make_stock

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
REFUSED = int(os.environ.get("BENCH_REFUSED", "60"))
SINGLE = int(os.environ.get("BENCH_SINGLE", "400"))
THREADED = int(os.environ.get("BENCH_THREADED", "1200"))
MANY = int(os.environ.get("BENCH_MANY", "6000"))
THREADS = 64
FULL = 20

Side = Callable[[], float]


class Broker:
    """One vhost with both sides' queues in it."""

    def __init__(self, bench: Bench, queue_type: str, bound: int) -> None:
        self._bench = bench
        environment = bench.setting(broker__queue_type=queue_type, tiers__batch__bound=bound)
        self.url = environment["INFERENCE_BROKER__URL"]
        self.namespace = environment["INFERENCE_NAMESPACE"]
        self.ours: InferenceApp = app_for(environment)
        os.environ.update(
            STOCK_BROKER=self.url,
            STOCK_STATE=bench.redis.url(1),
            STOCK_QUEUE_TYPE=queue_type,
            STOCK_BOUND=str(bound),
            STOCK_CONFIRMS="1",
        )
        self.stock: Celery = make_stock()
        # The first publish declares the queues.
        task_of(self.ours, "noop").submit()
        self.stock.tasks["noop"].apply_async(queue="batch")

    def purge(self) -> None:
        """Empty the queues, so that no round meets the messages of the one before."""
        self._bench.purge(self.namespace, "batch", f"{self.namespace}.batch")

    def close(self) -> None:
        """End what holds connections, and delete the vhost."""
        inference_of(self.ours).publisher.close()
        self.stock.close()
        self._bench.rabbitmq.delete_vhost(self.namespace)


def connects(bench: Bench) -> int:
    """Return how many connections the broker has accepted since its start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{bench.rabbitmq.prometheus_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r"^rabbitmq_connections_opened_total\S* (\d+)", text, re.MULTILINE)
    assert found is not None, "the node has its prometheus plugin"
    return int(found[1])


def refusals_ms(submit: Callable[[], object], error: type[Exception]) -> list[float]:
    """Return the milliseconds of each of ``REFUSED`` refused submits."""
    taken_ms = []
    for _ in range(REFUSED):
        began = time.perf_counter()
        try:
            submit()
        except error:
            taken_ms.append((time.perf_counter() - began) * 1e3)
    # A quorum queue may take a few more than its bound.
    assert len(taken_ms) > REFUSED / 2, f"only {len(taken_ms)} of {REFUSED} were refused"
    return taken_ms


def refused(bench: Bench, report: Report, queue_type: str) -> dict[str, dict[str, float]]:
    """Fill both queues, then refuse on each side in turn."""
    broker = Broker(bench, queue_type, FULL)
    ours, stock = task_of(broker.ours, "noop"), broker.stock.tasks["noop"]
    sides: dict[str, tuple[Callable[[], object], type[Exception]]] = {
        "ours": (ours.submit, QueueFullError),
        "stock": (lambda: stock.apply_async(queue="batch"), OperationalError),
        "stock without retry": (lambda: stock.apply_async(queue="batch", retry=False), OperationalError),
    }
    ours.submit_many([()] * 2 * FULL)
    for _ in range(2 * FULL):
        try:
            stock.apply_async(queue="batch", retry=False)
        except OperationalError:
            continue
    taken_ms: dict[str, list[float]] = {side: [] for side in sides}
    opened: dict[str, int] = dict.fromkeys(sides, 0)
    for _ in range(ROUNDS):
        for side, (submit, error) in sides.items():
            before = connects(bench)
            taken_ms[side] += refusals_ms(submit, error)
            opened[side] += connects(bench) - before
    broker.close()
    figures = {
        side: {
            "median_ms": round(statistics.median(taken_ms[side]), 3),
            "connects_per_refusal": round(opened[side] / len(taken_ms[side]), 2),
        }
        for side in sides
    }
    report.say(f"  refused: {figures}")
    value = figures["ours"]["median_ms"]
    report.bar(f"{queue_type}: ours, ms of a refused submit", value, "<= 3", ok=value <= 3)
    report.bar(f"{queue_type}: ours, connects of all refused submits", opened["ours"], "0", ok=opened["ours"] == 0)
    return figures


def one_by_one(submit: Callable[[], object]) -> float:
    """Return submits per second of a single thread."""
    began = time.perf_counter()
    for _ in range(SINGLE):
        submit()
    return SINGLE / (time.perf_counter() - began)


def at_once(submit: Callable[[], object]) -> float:
    """Return submits per second of ``THREADS`` threads together."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda _: time.sleep(0.01), range(THREADS)))
        began = time.perf_counter()
        list(threads.map(lambda _: submit(), range(THREADED)))
        return THREADED / (time.perf_counter() - began)


def many(app: InferenceApp) -> float:
    """Return submits per second of one ``submit_many``."""
    began = time.perf_counter()
    batch = task_of(app, "noop").submit_many([()] * MANY)
    taken_s = time.perf_counter() - began
    assert len(batch.accepted) == MANY, batch
    return MANY / taken_s


def held(app: Celery) -> float:
    """Return publishes per second of stock Celery through one producer that is kept."""
    with app.producer_pool.acquire(block=True) as producer:
        return one_by_one(lambda: app.tasks["noop"].apply_async(queue="batch", producer=producer))


def bare(broker: Broker) -> float:
    """Return publishes per second of aiormq, all on their way at once: the message is built once and sent as it is."""
    message = broker.stock.amqp.as_task_v2("00000000-0000-0000-0000-000000000000", "noop", (), {})
    return asyncio.run(_bare(broker, message))


async def _bare(broker: Broker, message: Any) -> float:
    payload = dumps(message.body).encode()
    connection = await aiormq.connect(broker.url)
    channel = await connection.channel(publisher_confirms=True)
    assert isinstance(channel, Channel), "which can publish without waiting for the socket"

    async def publish() -> None:
        await channel.basic_publish(
            payload,
            exchange=broker.namespace,
            routing_key=f"{broker.namespace}.batch",
            properties=Basic.Properties(
                content_type="application/json",
                content_encoding="utf-8",
                headers=dict(message.headers),
                delivery_mode=2,
                correlation_id=message.properties["correlation_id"],
                reply_to=message.properties["reply_to"],
            ),
            mandatory=True,
            wait=False,
        )

    began = time.perf_counter()
    await asyncio.gather(*(publish() for _ in range(MANY)))
    taken_s = time.perf_counter() - began
    await connection.close()
    return MANY / taken_s


def accepted(bench: Bench, report: Report, queue_type: str) -> dict[str, float]:
    """Submit on every side in turn, each time to empty queues."""
    broker = Broker(bench, queue_type, 1_000_000)
    ours, stock = task_of(broker.ours, "noop"), broker.stock.tasks["noop"]

    def apply_async() -> object:
        return stock.apply_async(queue="batch")

    sides: dict[str, Side] = {
        "ours, one by one": lambda: one_by_one(ours.submit),
        "stock, one by one": lambda: one_by_one(apply_async),
        "stock, one by one, producer held": lambda: held(broker.stock),
        f"ours, {THREADS} threads": lambda: at_once(ours.submit),
        f"stock, {THREADS} threads": lambda: at_once(apply_async),
        "ours, submit_many": lambda: many(broker.ours),
        "bare client, pipelined": lambda: bare(broker),
    }
    runs: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(ROUNDS):
        for side in sides if number % 2 else reversed(sides):
            runs[side].append(sides[side]())
            broker.purge()
    broker.close()
    per_s = {side: round(statistics.median(values), 1) for side, values in runs.items()}
    report.say(f"  accepted: {per_s}")
    bulk = per_s["ours, submit_many"]
    best_stock = max(per_s["stock, one by one"], per_s["stock, one by one, producer held"])
    for what, other, least in (("stock", best_stock, 5.0), ("bare client", per_s["bare client, pipelined"], 0.5)):
        ratio = bulk / other
        report.bar(f"{queue_type}: submit_many / {what}", ratio, f">= {least}", ok=ratio >= least)
    return per_s


def main() -> None:
    """Measure both queue types."""
    report = Report("admission")
    refused_by_type: dict[str, object] = {}
    accepted_by_type: dict[str, object] = {}
    with Bench() as bench:
        for queue_type in ("classic", "quorum"):
            report.say(queue_type)
            refused_by_type[queue_type] = refused(bench, report, queue_type)
            accepted_by_type[queue_type] = accepted(bench, report, queue_type)
    report.figures = {"rounds": ROUNDS, "refused": refused_by_type, "accepted_per_s": accepted_by_type}
    report.close()


if __name__ == "__main__":
    main()
