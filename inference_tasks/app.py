"""What the tiers add to a Celery app: its settings, its parts, and the places where Celery takes ours."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from celery import Celery

from inference_routing.policy import Policy
from inference_routing.topology import Topology
from inference_tasks.addresses import EMBEDDED, RECORD_BACKEND, with_broker, with_state
from inference_tasks.broker.addressing import TierDoor
from inference_tasks.broker.celery_amqp import open_door
from inference_tasks.broker.depth import Depths
from inference_tasks.broker.embedded import EmbeddedDepths
from inference_tasks.broker.embedded_link import EmbeddedLinkSettings
from inference_tasks.broker.embedded_server import EmbeddedServer, is_embedded
from inference_tasks.broker.publisher import Publisher, redis_records
from inference_tasks.broker.topology import broker_version, declare
from inference_tasks.celery_settings import AMQP_CLASS, TASK_CLASS, celery_defaults, celery_problems
from inference_tasks.client import Client
from inference_tasks.dependencies import Releases
from inference_tasks.errors import DeploymentError, SettingsError
from inference_tasks.handles import TaskHandle
from inference_tasks.lifting import Lifts
from inference_tasks.models import ModelDecorator, load_all
from inference_tasks.probing import register_probe
from inference_tasks.routes import TierRouter
from inference_tasks.settings import Settings, find_file, load_settings
from inference_tasks.state.backend import RecordBackend
from inference_tasks.state.records import Cancellation, TaskRecord
from inference_tasks.state.store import TaskStore
from inference_tasks.submission import Herald
from inference_tasks.task import InferenceDecorator

if TYPE_CHECKING:
    from kombu import Connection

    from inference_tasks.worker.source import Source

__all__ = ["OVERRIDES_KEY", "Inference", "adopt", "inference_of", "inferences_named_like"]

# Celery carries its configuration into the processes it starts, and what is said in code with it. There may be a
# password in a URL, so Celery's reports must not show it: they hide what has SECRET in its name and is no mapping.
OVERRIDES_KEY = "inference_settings_secret"
_ATTRIBUTE = "_inference_tasks"

_every_inference: weakref.WeakSet[Inference] = weakref.WeakSet()


class Inference:
    """What the tiers add to one Celery app. Made by ``adopt``; an ``InferenceApp`` has its own.

    Nothing is read or connected before it is needed: settings at the first use of Celery's configuration, the broker
    and Redis at the first submit or look-up.

    Attributes:
        celery_app: the app.
        inference: the decorator that turns a function into a task with a tier.
        model: the decorator that turns a loading function into a model handle.
        is_rebuilt: whether Celery made the app in a new process, as a copy of the parent's; nothing is declared on it.
    """

    def __init__(self, celery_app: Celery) -> None:
        self.celery_app = celery_app
        self.inference = InferenceDecorator(celery_app)
        self.model = ModelDecorator()
        # Celery rebuilds an app in a spawned process from what it was made of; no other app has this class of ours yet.
        self.is_rebuilt = celery_app.amqp_cls == AMQP_CLASS
        self._settings: Settings | None = None
        _every_inference.add(self)

    @property
    def settings(self) -> Settings:
        """The settings in use, with the broker's and the state's address filled in."""
        if self._settings is None:
            # Reading any value of Celery's configuration makes it final, and calls configure() on the way.
            self.celery_app.conf.get("broker_url")
        if self._settings is None:
            raise DeploymentError("Celery's configuration was made final without the settings of the tiers.")
        return self._settings

    @cached_property
    def policy(self) -> Policy:
        """The tiers as the picker wants them."""
        return self.settings.policy()

    @cached_property
    def topology(self) -> Topology:
        """The exchange and queues as data."""
        return self.settings.topology()

    @cached_property
    def queue_by_lane(self) -> Mapping[tuple[str, str], str]:
        """{(tier, lane): queue}."""
        return MappingProxyType(_queue_by_lane(self.topology))

    @cached_property
    def store(self) -> TaskStore:
        """The state of tasks; safe to share between threads."""
        return self.new_store()

    @cached_property
    def releases(self) -> Releases:
        """Lets go tasks that have waited for others."""
        return Releases(self)

    @cached_property
    def lifts(self) -> Lifts:
        """Lifts tasks that others wait for into their tiers."""
        return Lifts(self)

    def new_store(self) -> TaskStore:
        """Return a store with a connection of its own, for a thread that must not wait for others."""
        state = self.settings.state
        store = TaskStore.from_url(
            cast(str, state.url),
            state.prefix,
            unfinished_ttl_s=state.unfinished_ttl_s,
            finished_ttl_s=state.finished_ttl_s,
            max_crashes=self.settings.worker.max_crashes,
            namespace=self.settings.namespace,
            bounds=self.settings.bounds(),
            socket_timeout_s=state.socket_timeout_s,
        )
        store.on_freed = self.releases.freed
        return store

    @cached_property
    def publisher(self) -> Publisher:
        """The one publisher of this app; everything that is sent goes through it."""
        settings = self.settings
        return Publisher(
            cast(str, settings.broker.url),
            state=redis_records(
                cast(str, settings.state.url),
                settings.state.prefix,
                unfinished_ttl_s=settings.state.unfinished_ttl_s,
                socket_timeout_s=settings.state.socket_timeout_s,
                namespace=settings.namespace,
                bounds=settings.bounds(),
                revive=self.declare_topology if settings.origin("state.url") == EMBEDDED else None,
            ),
            rates=self.store.drain_rates,
            declare=self.declare_topology,
            exchanges=[settings.namespace],
            confirm_timeout_s=settings.broker.confirm_timeout_s,
            connect_timeout_s=settings.broker.connect_timeout_s,
            heartbeat_s=settings.broker.heartbeat_s,
            max_body_bytes=settings.broker.max_body_bytes,
            lift_body_bytes=settings.state.lift_body_bytes,
            embedded=self._embedded_link(),
        )

    def _embedded_link(self) -> EmbeddedLinkSettings | None:
        url = cast(str, self.settings.broker.url)
        if not is_embedded(url):
            return None
        return EmbeddedLinkSettings(
            url, self.topology, self.policy, self.declare_topology, self.settings.broker.confirm_timeout_s
        )

    def depths(self) -> Depths | EmbeddedDepths:
        """Return what counts the messages that wait; the caller closes it."""
        broker = self.settings.broker
        kind = EmbeddedDepths if is_embedded(broker.url) else Depths
        return kind(cast(str, broker.url), connect_timeout_s=broker.connect_timeout_s)

    @cached_property
    def client(self) -> Client:
        """Submits tasks and looks them up."""
        if problems := self.task_problems():
            raise SettingsError(problems)
        app, settings = self.celery_app, self.settings
        if app.conf.task_always_eager:
            from inference_tasks.testing.eager import EagerRunner

            runner = EagerRunner(app)
            return Client(app, settings, runner, runner, self.queue_by_lane, herald=None)
        records = _Records(self.store, app)
        herald = Herald(app)
        return Client(app, settings, self.publisher, records, self.queue_by_lane, herald=herald, lifts=self.lifts)

    def door(self) -> TierDoor:
        """What Celery's own publishing needs to know of the tiers."""
        return TierDoor(
            publisher=self.publisher,
            exchange=self.settings.namespace,
            queue_by_lane=self.queue_by_lane,
            bounds=self.settings.bounds(),
            delay_prefix=self.topology.delay_prefix,
            default_tier=self.settings.default_tier,
        )

    def handle(self, task_id: str) -> TaskHandle[object]:
        """Return a handle on a task by its id; nothing is looked up yet."""
        return TaskHandle(task_id, self.client)

    def status(self, task_id: str) -> TaskRecord:
        """Look a task up by its id; see ``TaskHandle.status``."""
        return self.client.status(task_id)

    def result(self, task_id: str, *, timeout_s: float | None = None) -> object:
        """Wait for a task's result by its id; see ``TaskHandle.result``."""
        return self.client.result(task_id, timeout_s=timeout_s)

    def cancel(self, task_id: str, *, terminate: bool = False) -> bool:
        """Cancel a task by its id, whoever holds it; see ``TaskHandle.cancel``."""
        return self.client.cancel(task_id, terminate=terminate)

    def task_problems(self) -> list[str]:
        """Say which registered tasks ask for what the settings do not allow."""
        longest_s = self.settings.worker.longest_run_s
        return [
            f"Task {name}: time_limit_s is {task.time_limit:g}, but the queues allow for {longest_s:g} s. Lower it, or "
            "raise worker.longest_run_s for all workers and clients."
            for name, task in sorted(self.celery_app.tasks.items())
            if task.time_limit is not None and task.time_limit > longest_s
        ]

    def load_models(self) -> None:
        """Load and warm up the models in this process; see ``inference_tasks.models.load_all``."""
        load_all(self.celery_app)

    def declare_topology(self) -> None:
        """Declare what is missing of the exchange and the queues; what differs is logged and used as it is.

        The embedded broker needs no declarations; here it is started again if it has ended.
        """
        broker = self.settings.broker
        url = cast(str, broker.url)
        if is_embedded(url):
            EmbeddedServer.at(url).start()
            return
        version = broker_version(url, connect_timeout_s=broker.connect_timeout_s)
        declare(
            self.settings.topology(version),
            url,
            management_url=self.settings.management_url,
            connect_timeout_s=broker.connect_timeout_s,
        )

    def new_source(self, connection: Connection, on_lost: Callable[[str], None]) -> Source:
        """Return what a worker takes messages from, over its own connection.

        Args:
            connection: open, driven by the worker's event loop.
            on_lost: called with the name of a queue whose unacknowledged messages have gone back.
        """
        url = cast(str, self.settings.broker.url)
        if is_embedded(url):
            from inference_tasks.worker.polled import EmbeddedSource

            return EmbeddedSource(url, self.celery_app.conf.accept_content, self.topology.dead.name)
        from inference_tasks.worker.source import AmqpSource

        return AmqpSource(connection, self.celery_app.conf.accept_content, on_lost, self.settings.worker.hold_s)

    def configure(self) -> dict[str, object]:
        """Read the settings and return what they say for Celery's configuration. Called by Celery, once.

        Raises:
            SettingsError: with every problem of the settings and of Celery's own configuration.
        """
        conf = self.celery_app.conf
        settings = load_settings(dict(conf.get(OVERRIDES_KEY) or ()), os.environ, find_file(os.environ))
        problems = list(celery_problems(conf))
        settings = with_broker(settings, conf.broker_url, problems, is_needed=not conf.task_always_eager)
        settings = with_state(settings, conf.result_backend, problems)
        if problems:
            raise SettingsError(problems)
        topology = settings.topology()
        router = TierRouter(self.celery_app, settings.default_tier, _queue_by_lane(topology))
        defaults = celery_defaults(conf, settings, topology, router)
        # Defaults come after what was set on app.conf itself; these must not.
        for key in ("result_backend", "result_backend_transport_options", "task_routes", "beat_schedule"):
            if conf.value_set_for(key):
                conf[key] = defaults[key]
        self._settings = settings
        return defaults

    def _configure_or_stay_unconfigured(self) -> dict[str, object]:
        try:
            return self.configure()
        except BaseException:
            # Celery counts the configuration as final by now and would go on without the tiers at the next access.
            self.celery_app.configured = False  # type: ignore[attr-defined]  # public, but not in its stub
            self.celery_app.conf = None
            self.celery_app.add_defaults(self._configure_or_stay_unconfigured)
            raise


def adopt(celery_app: Celery, **overrides: object) -> Inference:
    """Add the tiers to an existing Celery app; call it where the app is made. Calling it again changes nothing.

    Args:
        celery_app: the app. What its configuration says explicitly stays, unless it would break a promise.
        overrides: settings by section, such as ``tiers={"realtime": {"bound": 50}}`` or ``broker={"url": …}``.

    Raises:
        SettingsError: if the app has read its configuration already and it breaks a promise; else at first use.
    """
    existing = getattr(celery_app, _ATTRIBUTE, None)
    if isinstance(existing, Inference):
        return existing
    inference = Inference(celery_app)
    _take_over(celery_app)
    open_door(celery_app, inference.door)
    if overrides:
        celery_app.conf[OVERRIDES_KEY] = tuple(overrides.items())
    if celery_app.configured:  # type: ignore[attr-defined]  # public, but not in its stub
        celery_app.add_defaults(inference.configure)
    else:
        celery_app.add_defaults(inference._configure_or_stay_unconfigured)
    setattr(celery_app, _ATTRIBUTE, inference)
    register_probe(inference.inference)
    return inference


def inference_of(celery_app: Celery) -> Inference:
    """Return what the tiers added to the app; an app that Celery rebuilt in a new process is adopted again."""
    # Celery hands out proxies of the current app.
    current = getattr(celery_app, "_get_current_object", None)
    return adopt(current() if current is not None else celery_app)


def record_backend(app: Celery, url: str | None = None) -> RecordBackend:
    """Return the result backend for the app's state store, wherever its address was set."""
    inference = inference_of(app)
    return RecordBackend(app=app, url=inference.settings.state.url, on_freed=inference.releases.freed)


def inferences_named_like(celery_app: Celery) -> list[Inference]:
    """Return the app's own, and for an app that Celery rebuilt those of the apps that it is a copy of.

    In a process that was started anew (``spawn``) there are two: the one Celery rebuilt, and the one that the user's
    module made, which the models are registered with. Nothing but its name tells that one; any other app in the process
    that merely has the name of this one, or none as this one, is not meant.
    """
    own = inference_of(celery_app)
    if not own.is_rebuilt:
        return [own]
    originals = [one for one in list(_every_inference) if not one.is_rebuilt and one.celery_app.main == celery_app.main]
    return [own, *originals]


class _Records:
    """Records and results as the client reads them."""

    def __init__(self, store: TaskStore, app: Celery) -> None:
        self._store = store
        self._app = app

    def get(self, task_id: str) -> TaskRecord:
        return self._store.get(task_id)

    def result(self, task_id: str) -> object:
        return self._app.backend.get_task_meta(task_id).get("result")

    def cancel(self, task_id: str, *, terminate: bool, nonce: str) -> Cancellation:
        return self._store.cancel([(task_id, nonce)], terminate=terminate)[0]


def _take_over(celery_app: Celery) -> None:
    """Put our classes where Celery asks for them."""
    stock_amqp, stock_task = Celery.amqp_cls, Celery.task_cls
    if celery_app.amqp_cls not in (stock_amqp, AMQP_CLASS):
        raise SettingsError([f"The app has an AMQP class of its own, {celery_app.amqp_cls!r}; the tiers need theirs."])
    celery_app.amqp_cls = AMQP_CLASS
    # Not by result_backend alone: CELERY_RESULT_BACKEND would replace it, even before the configuration is read.
    celery_app.backend_cls = RECORD_BACKEND
    if celery_app.task_cls == stock_task:
        celery_app.task_cls = TASK_CLASS
    # Celery keeps what it has made of these classes.
    for made in ("amqp", "Task"):
        vars(celery_app).pop(made, None)


def _queue_by_lane(topology: Topology) -> dict[tuple[str, str], str]:
    return {(queue.tier, queue.lane): queue.name for queue in topology.queues if queue.tier and queue.lane}
