"""RabbitMQ: whether it answers, what the user may do, its limits, its alarms, its queues."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from inference_tasks.app import Inference
from inference_tasks.broker.consumer_timeout import DEFAULT_S, configuration_line, long_tasks, node_timeout
from inference_tasks.broker.dial import dial
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.broker.management import Management, ManagementError
from inference_tasks.broker.topology import broker_version, check
from inference_tasks.cli.diagnosis.finding import Finding, error, fine, warning
from inference_tasks.errors import InferenceError
from inference_tasks.settings import Settings, masked
from inference_tasks.settings.tree import CONSUMER_TIMEOUT_MARGIN_S, CONSUMER_TIMEOUT_SINCE

__all__ = ["examine_broker", "examine_version", "is_loopback", "vhost_of"]

OLDEST = (3, 10)
#: From and below: a message that dead-letters after a rejection is taken for one that goes in circles.
LOSING = ((3, 13, 0), (3, 13, 3))
MESSAGE_LIMIT_BYTES = {4: 16 * 2**20, 3: 128 * 2**20}


def examine_broker(inference: Inference) -> Iterator[Finding]:
    """Look at the broker of the settings."""
    settings = inference.settings
    url, timeout_s = cast(str, settings.broker.url), settings.broker.connect_timeout_s
    where = masked(url)
    if is_embedded(url):
        yield warning("broker", f"the embedded one, {where}", "For development only; for production set broker.url.")
        return
    yield from _guest(url)
    try:
        version = broker_version(url, connect_timeout_s=timeout_s)
    except InferenceError as problem:
        yield error("broker", f"{where}: {problem}", "Start RabbitMQ, or correct broker.url (user, password, vhost).")
        return
    yield from examine_version(version, where or "")
    yield from _rights(url, settings)
    management = Management(settings.management_url, vhost_of(url)) if settings.management_url else None
    yield from _management(management)
    yield from _consumer_timeout(inference, version, management)
    yield from _message_size(settings, version)
    yield from _queues(settings, version)


def examine_version(version: tuple[int, ...], where: str) -> Iterator[Finding]:
    """Look at the version of RabbitMQ."""
    found = f"RabbitMQ {'.'.join(map(str, version))} at {where}"
    if version < OLDEST:
        yield error("broker", found, "RabbitMQ 3.10 or later is needed.")
    elif LOSING[0] <= version < LOSING[1]:
        yield error(
            "broker",
            f"{found}: it drops messages that were rejected once and come to a queue again",
            "Upgrade to RabbitMQ 3.13.3 or later.",
        )
    else:
        yield fine("broker", found)


def is_loopback(host: str | None) -> bool:
    """Tell whether a host name means this machine."""
    if not host or host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def vhost_of(url: str) -> str:
    """Return the virtual host that a broker's address names."""
    return unquote(urlsplit(url.partition(";")[0]).path[1:]) or "/"


def _guest(url: str) -> Iterator[Finding]:
    parts = urlsplit(url.partition(";")[0])
    if (parts.username or "guest") == "guest" and not is_loopback(parts.hostname):
        yield error(
            "broker: user",
            f"guest on {parts.hostname}: RabbitMQ lets guest in from its own machine only, and everybody knows it",
            "rabbitmqctl add_user NAME PASSWORD, set its permissions, and name it in broker.url.",
        )


def _rights(url: str, settings: Settings) -> Iterator[Finding]:
    """Try each right on a queue and an exchange that are gone at once: asking needs an administrator."""
    name = f"{settings.namespace}.doctor.{secrets.token_hex(4)}"
    missing: list[str] = []
    with dial(url, settings.broker.connect_timeout_s) as connection:
        refused = connection.channel_errors

        def attempt(right: str, method: str, *args: object, **kwargs: object) -> bool:
            # A channel for each: the broker closes it with every refusal.
            channel: Any = connection.channel()
            try:
                getattr(channel, method)(*args, **kwargs)
            except refused as problem:
                if getattr(problem, "code", None) == 403:
                    missing.append(right)
                return False
            channel.close()
            return True

        if attempt("configure", "queue_declare", name, exclusive=True, auto_delete=False):
            attempt("read", "basic_get", name, no_ack=True)
            if attempt("configure", "exchange_declare", name, "topic", durable=False, auto_delete=True):
                # Writes to the queue, and reads from the exchange.
                attempt("write", "queue_bind", name, name, name)
                attempt("configure", "exchange_delete", name)
    pattern = rf"^({settings.namespace}|celery|amq\.gen).*"
    if missing:
        yield error(
            "broker: rights",
            f"the user may not {', '.join(dict.fromkeys(missing))} {settings.namespace}.*",
            f"rabbitmqctl set_permissions -p {vhost_of(url)} USER '{pattern}' '{pattern}' '{pattern}'",
        )
    else:
        yield fine("broker: rights", "configure, write and read")


def _management(management: Management | None) -> Iterator[Finding]:
    if management is None:
        yield warning("management API", "its address is not known", "Set broker.management_url.")
        return
    try:
        nodes = management.nodes()
    except ManagementError as problem:
        yield warning(
            "management API",
            str(problem),
            "rabbitmq-plugins enable rabbitmq_management, and the tag monitoring for the user.",
        )
        return
    yield fine("management API", f"answers at {management.address}, {len(nodes)} node{'s' * (len(nodes) != 1)}")
    for node in nodes:
        for key, what, advice in (
            ("mem_alarm", "memory", "Drain queues, or raise vm_memory_high_watermark."),
            ("disk_free_alarm", "disk", "Free disk space, or see disk_free_limit."),
        ):
            if node.get(key):
                yield error("broker: alarm", f"{node.get('name')}: {what} alarm, every publish is blocked", advice)
        if not node.get("running", True):
            yield error("broker: node", f"{node.get('name')} is down", "Quorum queues need most of the nodes.")


def _consumer_timeout(
    inference: Inference, version: tuple[int, ...], management: Management | None
) -> Iterator[Finding]:
    subject = "broker: consumer time-out"
    longest_s = inference.settings.worker.longest_run_s
    if version >= CONSUMER_TIMEOUT_SINCE:
        margin_s = longest_s + CONSUMER_TIMEOUT_MARGIN_S
        yield fine(
            subject, f"the queues carry it: {margin_s:g} s for runs of up to {longest_s:g} s (worker.longest_run_s)"
        )
        return
    try:
        node = node_timeout(management) if management else None
    except ManagementError:
        node = None
    timeout_s = node.timeout_s if node else DEFAULT_S
    limits = {f"worker.longest_run_s = {longest_s:g}": longest_s}
    limits |= {
        name: float(task.time_limit) for name, task in inference.celery_app.tasks.items() if task.time_limit is not None
    }
    longer = long_tasks(limits, timeout_s)
    shown = "switched off" if timeout_s is None else f"{timeout_s:g} s"
    shown += "" if node else " by default (the real value is not known here)"
    if longer:
        level = error if node else warning
        yield level(
            subject,
            f"{shown}; runs of these may take longer and would come back meanwhile: "
            f"{', '.join(one.name for one in longer)}",
            f"In rabbitmq.conf: {configuration_line(longer)} and restart the node; or RabbitMQ 3.12.",
        )
    elif node:
        yield fine(subject, f"{shown} ({node.origin}), runs take at most {longest_s:g} s")
    else:
        yield fine(subject, f"{shown}; runs take at most {longest_s:g} s")


def _message_size(settings: Settings, version: tuple[int, ...]) -> Iterator[Finding]:
    limit, wanted = MESSAGE_LIMIT_BYTES[4 if version >= (4,) else 3], settings.broker.max_body_bytes
    if wanted > limit:
        yield warning(
            "broker: message size",
            f"broker.max_body_bytes is {wanted}; RabbitMQ takes {limit} by default",
            "Lower it, or raise max_message_size in rabbitmq.conf.",
        )
    else:
        yield fine("broker: message size", f"at most {wanted} bytes are sent, RabbitMQ takes {limit} by default")


def _queues(settings: Settings, version: tuple[int, ...]) -> Iterator[Finding]:
    url = cast(str, settings.broker.url)
    try:
        report = check(
            settings.topology(version),
            url,
            management_url=settings.management_url,
            connect_timeout_s=settings.broker.connect_timeout_s,
        )
    except InferenceError as problem:
        yield error("queues", str(problem), "")
        return
    if report.is_as_wanted:
        yield fine("queues", "as the settings ask for")
    if report.missing:
        yield fine("queues", f"{len(report.missing)} do not exist yet; the first worker or submit declares them")
    for one in report.differences:
        yield warning(
            f"queue {one.queue}",
            f"{one.argument} is {one.found!r}, not {one.wanted!r}; it is used as it is",
            "inference-tasks topology apply",
        )
