"""Celery's own settings, as the promises of the tiers need them.

Celery's configuration stays the user's: what is set there explicitly wins, unless it would break a promise; then it is
refused by name, with the promise it would break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kombu import Exchange, Queue

from inference_routing.tier import TIER_NAMES
from inference_routing.topology import Topology
from inference_tasks.schedule import LONGEST_SLEEP_S, SCHEDULER, MaintenanceRoute, beat_schedule
from inference_tasks.settings import Settings

__all__ = ["AMQP_CLASS", "CONSUMER_CLASS", "RESULT_BACKEND", "TASK_CLASS", "celery_defaults", "celery_problems"]

AMQP_CLASS = "inference_tasks.broker.celery_amqp:InferenceAMQP"
TASK_CLASS = "inference_tasks.task:InferenceTask"
CONSUMER_CLASS = "inference_tasks.worker.consumer:InferenceConsumer"
RESULT_BACKEND = "inference_tasks.state.backend:RecordBackend"

_JSON = frozenset({"json", "application/json"})


class CeleryConf(Protocol):
    """The part of ``app.conf`` that is read here."""

    def value_set_for(self, key: str) -> bool: ...

    def get(self, key: str, /) -> object: ...


@dataclass(frozen=True)
class Promise:
    """A Celery setting whose value the tiers depend on."""

    value: object
    why: str
    accepts: Callable[[object], bool] | None = None

    def kept_by(self, found: object) -> bool:
        """Tell whether a value that the user chose keeps the promise."""
        return self.accepts(found) if self.accepts else found == self.value


def _only_json(found: object) -> bool:
    names = [found] if isinstance(found, str) else found
    return names is None or (isinstance(names, Iterable) and all(name in _JSON for name in names))


def _not_false(found: object) -> bool:
    return found is not False


_PROMISES: Mapping[str, Promise] = {
    "worker_consumer": Promise(CONSUMER_CLASS, "it takes messages by tier"),
    "task_acks_late": Promise(True, "accepted work would be lost with the worker that holds it"),
    "task_reject_on_worker_lost": Promise(True, "accepted work would be lost when a process is killed"),
    "task_acks_on_failure_or_timeout": Promise(True, "a task that raises would come back for ever"),
    "task_acks_on_failure": Promise(None, "a task that raises would come back for ever", _not_false),
    "task_acks_on_timeout": Promise(None, "a task that hangs would come back for ever", _not_false),
    "accept_content": Promise(["json"], "other encodings can run code that a message brings along", _only_json),
    "result_accept_content": Promise(None, "other encodings can run code that a result brings along", _only_json),
    "task_serializer": Promise("json", "workers accept JSON only", _only_json),
    "result_serializer": Promise("json", "results are JSON only", _only_json),
    "event_serializer": Promise("json", "workers accept JSON only", _only_json),
    "task_protocol": Promise(2, "the tier travels in the headers of protocol 2"),
    "task_compression": Promise(None, "bodies are sent as they are"),
    "task_default_delivery_mode": Promise(2, "messages would not survive a restart of the broker"),
    "task_queue_max_priority": Promise(None, "priorities inside one queue compete with the tiers"),
    "worker_cancel_long_running_tasks_on_connection_loss": Promise(
        False, "a lost connection would kill the process and the models it holds; claims keep a task from running twice"
    ),
    "worker_enable_prefetch_count_reduction": Promise(False, "workers hold no prefetch that could be reduced"),
    "control_queue_exclusive": Promise(False, "a worker that reconnects would find its control queue locked and exit"),
    "control_queue_durable": Promise(True, "RabbitMQ 4.3 refuses queues that are neither exclusive nor durable"),
    "event_queue_exclusive": Promise(False, "a monitor that reconnects would find its queue locked"),
    "event_queue_durable": Promise(True, "RabbitMQ 4.3 refuses queues that are neither exclusive nor durable"),
    "result_backend_always_retry": Promise(True, "a result that cannot be written must be tried again"),
}

# Taken from the topology; a value of the user's would send tasks past the tiers.
_DERIVED = ("task_queues", "task_default_queue", "task_default_exchange", "task_default_routing_key")


def celery_problems(conf: CeleryConf) -> Iterator[str]:
    """Say which settings that the user chose explicitly break a promise."""
    for key, promise in _PROMISES.items():
        if conf.value_set_for(key) and not promise.kept_by(conf.get(key)):
            yield (
                f"Celery's {key} is {conf.get(key)!r}; it must be {promise.value!r}, because {promise.why}. "
                "Remove it from the Celery configuration."
            )
    for key in _DERIVED:
        if conf.value_set_for(key) and conf.get(key) is not None:
            yield (
                f"Celery's {key} is set, but the queues are those of the tiers. Remove it from the Celery "
                "configuration; the settings namespace and tiers shape the queues."
            )


def celery_defaults(
    conf: CeleryConf, settings: Settings, topology: Topology, route: Callable[..., object]
) -> dict[str, object]:
    """Return the values for Celery's configuration, without those that the user chose."""
    exchange = Exchange(topology.exchange.name, type="topic", durable=True)
    default_queue = next(
        queue.name for queue in topology.queues if queue.tier == settings.default_tier and queue.lane == "fresh"
    )
    user_routes = conf.get("task_routes") if conf.value_set_for("task_routes") else None
    routes = list(user_routes) if isinstance(user_routes, list | tuple) else [user_routes] if user_routes else []
    preferred: dict[str, object] = {
        "broker_url": settings.broker.url,
        "broker_connection_timeout": settings.broker.connect_timeout_s,
        "broker_connection_retry_on_startup": True,
        # Celery would give up after 100 attempts, and the worker with it.
        "broker_connection_max_retries": None,
        "broker_channel_error_retry": True,
        "broker_heartbeat": settings.broker.heartbeat_s,
        "redis_socket_timeout": settings.state.socket_timeout_s,
        "redis_socket_connect_timeout": settings.state.socket_timeout_s,
        "result_expires": settings.state.finished_ttl_s,
        # Flower shows nothing without events; a waiting task would be invisible to it without the sent event.
        "worker_send_task_events": True,
        "task_send_sent_event": True,
        "worker_concurrency": settings.worker.slots,
        "worker_pool": settings.worker.pool,
        "worker_prefetch_multiplier": 1,
        "beat_scheduler": SCHEDULER,
        "beat_max_loop_interval": LONGEST_SLEEP_S,
        # How long a new pool process may take to say that it is alive: its models are loaded before.
        "worker_proc_alive_timeout": settings.worker.model_load_timeout_s,
    }
    derived: dict[str, object] = {
        # no_declare: the topology is declared in one place, which goes on when a queue exists with other arguments.
        "task_queues": [
            Queue(
                queue.name,
                exchange,
                routing_key=queue.name,
                durable=True,
                queue_arguments=dict(queue.arguments),
                no_declare=True,
            )
            for queue in topology.queues
            if queue.tier in TIER_NAMES
        ],
        "task_default_queue": default_queue,
        "task_default_exchange": exchange.name,
        "task_default_exchange_type": "topic",
        "task_default_routing_key": default_queue,
        "result_backend": f"{RESULT_BACKEND}+{settings.state.url}",
        "result_backend_transport_options": {
            **_mapping(conf.get("result_backend_transport_options")),
            "global_keyprefix": settings.state.prefix,
            "namespace": settings.namespace,
            "unfinished_ttl_s": settings.state.unfinished_ttl_s,
            "finished_ttl_s": settings.state.finished_ttl_s,
        },
    }
    promised = {key: promise.value for key, promise in _PROMISES.items()}
    chosen = {key: value for key, value in (preferred | promised).items() if not conf.value_set_for(key)}
    # The router of the tiers comes last: what the user routes elsewhere goes there.
    routes = [MaintenanceRoute(topology), *routes, route]
    users_schedule = _mapping(conf.get("beat_schedule")) if conf.value_set_for("beat_schedule") else {}
    return chosen | derived | {"task_routes": routes, "beat_schedule": {**beat_schedule(settings), **users_schedule}}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
