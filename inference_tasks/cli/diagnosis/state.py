"""Redis: whether it answers, keeps what it is given, and agrees on the time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from redis import exceptions

from inference_tasks.app import Inference
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.cli.diagnosis.finding import Finding, error, fine, warning
from inference_tasks.errors import InferenceError
from inference_tasks.settings import masked
from inference_tasks.state import keys
from inference_tasks.state.script import Commands
from inference_tasks.state.store import client_from_url

__all__ = ["examine_info", "examine_state"]

OLDEST = (7, 0)
CLOCK_WARNING_S = 1.0
CLOCK_ERROR_S = 30.0
FULL_RATIO = 0.9


def examine_state(inference: Inference) -> Iterator[Finding]:
    """Look at the Redis of the settings."""
    state = inference.settings.state
    where = masked(state.url)
    client = client_from_url(cast(str, state.url), socket_timeout_s=state.socket_timeout_s)
    try:
        info = _info(client)
    except exceptions.AuthenticationError as problem:
        yield error("Redis", f"{where} refuses the login: {problem}", "Correct user and password in state.url.")
        return
    except exceptions.NoPermissionError as problem:
        yield warning("Redis", f"the user may not ask for INFO: {problem}", "Grant +info, to have the rest checked.")
        info = {}
    except exceptions.RedisError as problem:
        yield error("Redis", f"{where} does not answer: {problem}", "Start Redis, or correct state.url.")
        return
    if info:
        yield from examine_info(info, str(where))
    yield from _clock(client)
    try:
        beats = inference.store.workers()
    except InferenceError as problem:
        yield error("Redis: rights", str(problem), "The user needs EVALSHA, SCRIPT LOAD and its keys.")
    else:
        yield fine("workers", f"{len(beats)} alive" + (": " + ", ".join(beat.node for beat in beats) if beats else ""))
    if not is_embedded(inference.settings.broker.url):
        yield from _maintenance(client, state.prefix)


def examine_info(info: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Look at what ``INFO`` says."""
    yield from _server(info, where)
    yield from _memory(info)
    yield from _persistence(info)
    if evicted := int(info.get("evicted_keys", 0)):
        yield error(
            "Redis: evictions", f"{evicted} keys have been evicted: tasks were forgotten", "See maxmemory-policy."
        )


def _server(info: Mapping[str, Any], where: str) -> Iterator[Finding]:
    name = str(info.get("server_name", "redis"))
    text = str(info.get(f"{name}_version") or info.get("redis_version", "0"))
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if version < OLDEST:
        yield error("Redis", f"{name} {text} at {where}", "Redis 7 or Valkey is needed.")
    else:
        yield fine("Redis", f"{name} {text} at {where}")
    if info.get("role", "master") != "master":
        yield error(
            "Redis: role", "it is a replica and takes no writes", "Name the primary, or Sentinel, in state.url."
        )
    if int(info.get("cluster_enabled", 0)):
        yield error("Redis: cluster", "cluster mode is on", "It is not supported; use one primary, with replicas.")


def _memory(info: Mapping[str, Any]) -> Iterator[Finding]:
    most, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        level = error if most else warning
        yield level(
            "Redis: maxmemory-policy",
            f"{policy}: a full Redis forgets tasks in silence",
            "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf.",
        )
    else:
        yield fine("Redis: maxmemory-policy", policy)
    if most and used > FULL_RATIO * most:
        yield warning("Redis: memory", f"{used / most:.0%} of maxmemory is used", "Raise maxmemory, or lower the TTLs.")


def _persistence(info: Mapping[str, Any]) -> Iterator[Finding]:
    if int(info.get("aof_enabled", 0)):
        if info.get("aof_last_write_status", "ok") != "ok":
            yield error("Redis: persistence", "the last write to the append-only file failed", "See its disk.")
        else:
            yield fine("Redis: persistence", "append-only file")
        return
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield error("Redis: persistence", "the last snapshot failed; writes may be refused", "See its disk and memory.")
    else:
        yield warning(
            "Redis: persistence",
            "no append-only file: a restart forgets the states since the last snapshot (the work itself is safe)",
            "CONFIG SET appendonly yes, and the same in redis.conf.",
        )


def _clock(client: Commands) -> Iterator[Finding]:
    before_s = time.time()
    try:
        at_s, at_us = client.execute_command("TIME")
    except exceptions.RedisError as problem:
        yield error("clock", f"Redis does not tell the time: {problem}", "Grant +time.")
        return
    difference_s = (before_s + time.time()) / 2 - (int(at_s) + int(at_us) / 1e6)
    found = f"this machine is {abs(difference_s):.2f} s {'ahead of' if difference_s > 0 else 'behind'} Redis"
    if abs(difference_s) < CLOCK_WARNING_S:
        yield fine("clock", found)
    else:
        level = error if abs(difference_s) > CLOCK_ERROR_S else warning
        yield level("clock", found, "Deadlines go by the clock of Redis; let NTP set both.")


def _maintenance(client: Commands, prefix: str) -> Iterator[Finding]:
    try:
        has_beat = bool(client.execute_command("EXISTS", keys.beat_lock(prefix)))
    except exceptions.RedisError as problem:
        yield error("maintenance", f"Redis does not tell whether a beat runs: {problem}", "Grant +exists.")
        return
    if has_beat:
        yield fine("maintenance", "a beat sends its schedule")
    else:
        yield warning(
            "maintenance",
            "no beat sends its schedule: waiting tasks do not move up, dropped and lost ones are not recorded",
            "inference-tasks maintenance",
        )


def _info(client: Commands) -> dict[str, Any]:
    # As one section: the default sections lack the list of keys that INFO everything brings.
    reply = client.execute_command("INFO")
    return cast("dict[str, Any]", reply)
