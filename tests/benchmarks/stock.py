"""The other side of the benchmarks: a plain Celery app with three queues, or one, set up by the environment."""

from __future__ import annotations

import os

from celery import Celery
from kombu import Exchange, Queue

from tests.benchmarks.tasks import noop, sleep

__all__ = ["TIERS", "app", "make_stock"]

TIERS = ("realtime", "batch", "offline")


def make_stock() -> Celery:
    """Return a plain Celery app that acknowledges late and keeps results in Redis, as ours does.

    Reads ``STOCK_BROKER``, ``STOCK_STATE``, ``STOCK_QUEUE_TYPE`` (classic), ``STOCK_BOUND`` (none), ``STOCK_CONFIRMS``
    (off), ``STOCK_MULTIPLIER`` (1) and ``STOCK_QUEUES`` (the three tiers).
    """
    stock = Celery("stock", set_as_current=False)
    exchange = Exchange("stock", type="direct")
    arguments: dict[str, object] = {"x-queue-type": os.environ.get("STOCK_QUEUE_TYPE", "classic")}
    if "STOCK_BOUND" in os.environ:
        arguments |= {"x-max-length": int(os.environ["STOCK_BOUND"]), "x-overflow": "reject-publish"}
    queues = os.environ.get("STOCK_QUEUES", " ".join(TIERS)).split()
    stock.conf.update(
        broker_url=os.environ.get("STOCK_BROKER"),
        result_backend=os.environ.get("STOCK_STATE"),
        broker_transport_options={"confirm_publish": True} if "STOCK_CONFIRMS" in os.environ else {},
        task_queues=[Queue(name, exchange, routing_key=name, queue_arguments=arguments) for name in queues],
        task_default_queue=queues[0],
        task_default_exchange="stock",
        task_default_routing_key=queues[0],
        task_acks_late=True,
        worker_prefetch_multiplier=int(os.environ.get("STOCK_MULTIPLIER", "1")),
        worker_send_task_events=True,
        broker_connection_retry_on_startup=True,
        control_queue_exclusive=False,
        control_queue_durable=True,
        broker_native_delayed_delivery_queue_type="classic",
    )
    stock.task(name="noop", shared=False)(noop)
    stock.task(name="sleep", shared=False)(sleep)
    return stock


app = make_stock()
