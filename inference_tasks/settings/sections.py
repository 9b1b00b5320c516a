"""The sections of the settings: each field with its meaning, its default and why, and what goes wrong at its ends.

The texts here are the only description of the settings: the commented ``config/inference.toml`` is generated from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar, cast

from inference_routing.tier import Overflow

__all__ = [
    "AgingSettings",
    "BrokerSettings",
    "FlowerSettings",
    "GatewaySettings",
    "MaintenanceSettings",
    "RetrySettings",
    "StateSettings",
    "TierSettings",
    "TiersSettings",
    "WorkerSettings",
    "masked",
    "setting",
]

T = TypeVar("T")

QueueType = Literal["quorum", "classic"]
SECRET = "********"


def setting(
    default: T,
    text: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
) -> T:
    """Declare one documented field; the bounds are checked when settings are loaded (``above`` is exclusive)."""
    metadata = {"text": text, "minimum": minimum, "above": above, "maximum": maximum, "secret": secret}
    # To a type checker this is the default itself, as with dataclasses.field.
    return field(default=default, metadata=metadata)


def masked(url: str | None) -> str | None:
    """Return the URL (or URLs, separated by semicolons) with its password, and anything in its query, hidden."""
    if url is None:
        return None
    if ";" in url:
        return ";".join(masked(one) or "" for one in url.split(";"))
    # Not by urlsplit: it refuses some broken addresses, and shows a password in which there is a slash.
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    user, at, host = rest.rpartition("@")
    if at:
        user = f"{re.split('[:/?#]', user)[0]}:{SECRET}"
    host, mark, _ = host.partition("?")
    return f"{scheme}{separator}{user}{at}{host}{mark}{SECRET if mark else ''}"


class _Masked:
    """A repr that hides the fields declared secret: several of them are URLs with a password in them."""

    def __repr__(self) -> str:
        shown = []
        for one in fields(cast("BrokerSettings", self)):
            value = getattr(self, one.name)
            shown.append(f"{one.name}={masked(value) if one.metadata['secret'] else value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class BrokerSettings(_Masked):
    """The message broker."""

    url: str | None = setting(
        None,
        "Address of RabbitMQ: amqp://user:password@host:5672/vhost, or amqps:// for TLS. Unset: Celery's own "
        "broker_url or CELERY_BROKER_URL, and if no broker is configured anywhere the embedded one, for development.",
        secret=True,
    )
    directory: str = setting(
        ".inference",
        "Where the embedded broker keeps its data, log and socket; used only if no broker is configured anywhere. All "
        "processes with the same directory share one broker. A relative path starts at the working directory, so start "
        "clients and workers in the same one, or set an absolute path.",
    )
    management_url: str | None = setting(
        None,
        'Address of the management API of RabbitMQ, used by `topology`, `doctor` and bounds = "policy". Unset: the '
        "broker's host, port 15672, with the same user.",
        secret=True,
    )
    queue_type: QueueType = setting(  # noqa: RUF009 -- a field, as from dataclasses.field
        "quorum",
        "Type of the tier queues, unless a tier sets its own: quorum is replicated in a cluster, its bound is soft (a "
        "burst may exceed it slightly); classic is faster on one node, its bound exact.",
    )
    bounds: Literal["arguments", "policy"] = setting(
        "arguments",
        "Where the bounds of the queues live. arguments: in the queue itself, no extra rights needed, changed by "
        "`topology apply`. policy: as policies through the management API, which can be changed at any time.",
    )
    confirm_timeout_s: float = setting(
        5.0,
        "Longest a submit waits for the broker's confirm; then its outcome is unknown. Too low: a slow disk turns into "
        "unknown outcomes. Too high: callers wait that long when the broker is stuck.",
        above=0,
    )
    connect_timeout_s: float = setting(
        3.0,
        "Longest a connection attempt may take. Too low: never connects over a slow network. Too high: an unreachable "
        "broker is noticed late.",
        above=0,
    )
    heartbeat_s: int = setting(
        10,
        "Heartbeat of each connection; a dead peer is noticed after two of them. 0 turns heartbeats off and a "
        "half-open connection is then noticed by nobody. Below 5, a busy machine loses healthy connections.",
        minimum=0,
        maximum=3600,
    )
    max_body_bytes: int = setting(
        1024 * 1024,
        "Largest message body that is sent; larger ones are refused before publishing. RabbitMQ 4 refuses above "
        "16 MiB. Large inputs travel better by reference.",
        minimum=1024,
    )


@dataclass(frozen=True, repr=False)
class StateSettings(_Masked):
    """Redis (or Valkey), which keeps the state of tasks; the work itself is in the broker."""

    url: str | None = setting(
        None,
        "Address of Redis: redis://:password@host:6379/0, rediss:// for TLS. Unset: localhost:6379/0, or the embedded "
        "one together with the embedded broker.",
        secret=True,
    )
    prefix: str = setting(
        "",
        "First part of every key. Empty: the namespace and a colon. Two deployments that share one Redis need two "
        "prefixes, else they see each other's tasks.",
    )
    lease_s: float = setting(
        30.0,
        "How long a claim on a task holds unless renewed; it is renewed three times within that. Too low: a short "
        "pause of a worker lets a second one start the same task. Too high: the task of a dead worker waits that long.",
        minimum=1,
    )
    unfinished_ttl_s: float = setting(
        30 * 86400.0,
        "How long the record of an unfinished task is kept. Must be longer than any task may wait.",
        minimum=60,
    )
    finished_ttl_s: float = setting(
        86400.0,
        "How long the record and the result of a finished task are kept. Also how long a second submit of the same id "
        "is recognised. Too low: results are gone before they are fetched. Too high: Redis fills up.",
        minimum=1,
    )
    idempotency_ttl_s: float = setting(
        86400.0,
        "How long a submit with an idempotency key that was used before is answered with the first one's task. Must be "
        "longer than a client goes on repeating one. More than finished_ttl_s does nothing for tasks that have ended.",
        minimum=1,
    )
    lift_body_bytes: int = setting(
        8192,
        "Largest body of a message that Redis keeps until its task starts, for tiers below realtime, so that the task "
        "can be lifted when one of a higher tier waits for it. It takes 1 KiB for each waiting task, and its body. 0: "
        "none are kept, and none are lifted. Too high: Redis fills up with what the broker has already.",
        minimum=0,
    )
    on_state_loss: Literal["wait", "run"] = setting(
        "wait",
        "What workers do while Redis is away. wait: take no new work until it is back. run: go on without claims, so "
        "that a task may run twice.",
    )
    socket_timeout_s: float = setting(
        2.0,
        "Longest one call to Redis may take. Too low: a busy Redis looks dead. Too high: a dead one is noticed late.",
        above=0,
    )


@dataclass(frozen=True, repr=False)
class WorkerSettings(_Masked):
    """Defaults of the workers; their command line wins over these."""

    pool: Literal["prefork", "threads", "solo"] = setting(
        "prefork",
        "How tasks run: prefork = a process for each slot, threads = a thread for each slot, solo = one task.",
    )
    slots: int = setting(
        1,
        "Tasks at a time for each worker, that is for each GPU. Each prefork slot loads its own models: too many fill "
        "the GPU's memory; too few leave it idle between tasks.",
        minimum=1,
    )
    reserve: int = setting(
        0,
        "How many of the slots only realtime may use. 0: none, right while tasks are short. With one slot for each "
        'GPU, run some workers with tiers = ["realtime"] instead.',
        minimum=0,
    )
    tiers: tuple[str, ...] = setting(
        ("realtime", "batch", "offline"),
        'Which tiers a worker serves; "all" or a list. Shares and floors hold on workers that serve all of them.',
    )
    hold_s: float = setting(
        0.02,
        "Longest a message may wait inside a worker before its task starts. 0: messages are taken for free slots only, "
        "which costs throughput with tasks of a millisecond. Higher: work waits where others cannot take it.",
        minimum=0,
        maximum=5,
    )
    share: Literal["time", "count"] = setting(
        "time",
        "What the tiers' weights divide. time: seconds of slots, so that long tasks do not squeeze out short ones. "
        "count: starts, in exact proportion.",
    )
    model_load_timeout_s: float = setting(
        600.0,
        "Longest a process may take to load its models before it is given up. Too low: a cold disk stops the worker. "
        "Too high: a stuck load is noticed late.",
        above=0,
    )
    max_crashes: int = setting(
        3,
        "How many times a task may take its process down (crash, out of memory) before it has failed for good. 1: the "
        "first crash ends it. Too high: a task that always crashes keeps killing processes and the models they hold.",
        minimum=1,
    )
    longest_run_s: float = setting(
        1500.0,
        "The longest run that the queues allow for; no task may have a larger time_limit_s. From RabbitMQ 3.12 the "
        "queues carry it, plus five minutes, as their consumer timeout; before, the node's own value (30 min) counts.",
        above=0,
    )


@dataclass(frozen=True)
class RetrySettings:
    """Defaults of how failed tasks are tried again; what ``@app.inference`` says of a task wins over these."""

    max_attempts: int = setting(
        5,
        "How often a task of `@app.inference` may start and raise before it has failed for good. 1: never tried again. "
        "Too high: work that cannot succeed keeps slots from work that can.",
        minimum=1,
    )
    base_s: float = setting(
        1.0,
        "Delay before the first retry; the next ones are longer by the factor. 0: every retry at once, which turns one "
        "failing backend into a storm. Delays are whole seconds, rounded up; chance adds up to a quarter.",
        minimum=0,
    )
    factor: float = setting(2.0, "How much longer each further delay is. 1: all are equal.", minimum=1)
    cap_s: float = setting(
        300.0,
        "The longest delay. Too low: a long outage is met by many vain tries. Too high: work waits long after its end.",
        minimum=0,
    )
    other_errors: Literal["fail", "retry"] = setting(
        "fail",
        "What an error does that a task does not name in retry_on and that is neither a TemporaryError nor a "
        "PermanentError. fail: the task has failed, for a mistake in the code fails each time. retry: it is tried "
        "again all the same.",
    )


@dataclass(frozen=True)
class AgingSettings:
    """How waiting tasks move up a tier; after how long is said by each tier's ``ages_after_s``."""

    every_s: float = setting(
        10.0,
        "How often the maintenance worker looks for tasks that have waited long enough to move up. Too low: looks that "
        "find nothing. Too high: tasks move up that much later.",
        above=0,
        maximum=3600,
    )
    ready_max: int = setting(
        1000,
        "How many promoted tasks may wait in a tier at a time; more of them move up as those are served. Too low: the "
        "aged lane runs empty between two looks. Too high: they have lost their place below and wait above instead.",
        minimum=1,
    )


@dataclass(frozen=True)
class MaintenanceSettings:
    """What the maintenance worker does besides aging."""

    account_every_s: float = setting(
        10.0,
        "How often dropped tasks are recorded and dead letters of the broker's own making are listed. Too high: "
        "whoever waits for the result of a dropped task learns it that much later.",
        above=0,
        maximum=3600,
    )
    reconcile_every_s: float = setting(
        60.0,
        "How often records of waiting tasks are compared with the queues. A message must be missed twice in a row "
        "before its task counts as lost.",
        minimum=1,
        maximum=86400,
    )
    reconcile_after_s: float = setting(
        600.0,
        "How long a task must have waited before its message can count as gone without a trace (a purged queue). Too "
        "low: a message that is only on its way is given up. Too high: its task shows as pending that much longer.",
        minimum=1,
    )
    waiting_every_s: float = setting(
        5.0,
        "How often the maintenance worker looks at messages of tasks that wait for others and have come round.",
        above=0,
        maximum=3600,
    )
    waiting_first_s: int = setting(
        60,
        "After how long the message of a task that waits for others comes round first, to be looked at; then twice as "
        "long each time. The task starts at once when it may, without this: it is for a process that dies in between, "
        "and for messages above 64 KiB. Too low: the broker moves waiting messages all the time.",
        minimum=1,
        maximum=86400,
    )
    waiting_longest_s: int = setting(
        600,
        "Longest time between two such looks. After a loss of Redis, a task that waits for one which nobody remembers "
        "is given up after this.",
        minimum=1,
        maximum=86400,
    )


@dataclass(frozen=True)
class GatewaySettings:
    """The HTTP gateway."""

    keys: str | None = setting(
        None,
        "File of the API keys, TOML or JSON; `inference-tasks gateway key new` prints an entry for it. It holds "
        "hashes, never keys, and is read again when it changes. Unset: everybody on this machine may ask, and nobody "
        "else can.",
    )
    max_body_bytes: int = setting(
        1048576,
        "Largest body of a request, refused before it is read. More than broker.max_body_bytes helps nobody: the "
        "message would be refused.",
        minimum=1024,
    )
    wait_max_s: float = setting(
        60.0,
        "Longest that a request may wait for its result (`Prefer: wait=N`), whatever it asks for. Too high: proxies "
        "between client and gateway give up first.",
        above=0,
        maximum=3600,
    )


@dataclass(frozen=True)
class FlowerSettings:
    """Flower, as `inference-tasks flower` and config/flowerconfig.py start it."""

    show_arguments: bool = setting(
        False,
        "Whether Flower shows arguments and results of tasks. false, because prompts are private and everybody who may "
        "see Flower would read them. The text of errors is shown in any case.",
    )


@dataclass(frozen=True, repr=False)
class TierSettings(_Masked):
    """One tier."""

    weight: float = setting(
        1,
        "Share relative to the other tiers while all of them have work. Must be above 0.",
        above=0,
    )
    floor: float = setting(
        0.0,
        "Least share, 0 to 1, whatever the weights say. 0: none. The floors together must leave room for the reserve.",
        minimum=0,
        maximum=1,
    )
    bound: int = setting(
        100_000,
        "How many fresh tasks may wait; the next submit is refused. Too low: refusals in every burst. Too high: tasks "
        "wait longer than anybody cares for.",
        minimum=1,
    )
    overflow: Overflow = setting(  # noqa: RUF009 -- a field
        "reject-publish",
        "What a full queue does. reject-publish: refuse the new task. drop-head: drop the oldest, on offline only, "
        "where fresh work matters more than complete work.",
    )
    ages_after_s: float | None = setting(
        None,
        "After how long a waiting task moves up one tier. Unset: never.",
        above=0,
    )
    queue_type: QueueType | None = setting(  # noqa: RUF009 -- a field
        None, "Type of this tier's queues. Unset: broker.queue_type."
    )


@dataclass(frozen=True)
class TiersSettings:
    """The three tiers, highest first."""

    realtime: TierSettings = TierSettings(weight=8, bound=1_000)
    batch: TierSettings = TierSettings(weight=2, bound=100_000, ages_after_s=1800.0)
    offline: TierSettings = TierSettings(weight=1, floor=0.05, bound=1_000_000, ages_after_s=1800.0)

    def __getitem__(self, tier: str) -> TierSettings:
        """Return the settings of the tier of this name."""
        if tier not in ("realtime", "batch", "offline"):
            raise KeyError(tier)
        return cast(TierSettings, getattr(self, tier))

    def items(self) -> Iterator[tuple[str, TierSettings]]:
        """Iterate over name and settings, highest tier first."""
        yield from (("realtime", self.realtime), ("batch", self.batch), ("offline", self.offline))
