"""What the doctor makes of what it is told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from inference_tasks.cli.diagnosis.broker import examine_version, is_loopback
from inference_tasks.cli.diagnosis.host import examine_host
from inference_tasks.cli.diagnosis.state import examine_info
from inference_tasks.worker.gpu import Gpu, Gpus

HEALTHY = {"redis_version": "7.2.4", "role": "master", "maxmemory_policy": "noeviction", "aof_enabled": 1}


def subjects(info: Mapping[str, object], level: str) -> set[str]:
    return {one.subject for one in examine_info({**HEALTHY, **info}, "here") if one.level == level}


def test_a_healthy_redis_gives_no_advice() -> None:
    assert all(one.level == "ok" and not one.advice for one in examine_info(HEALTHY, "here"))


@pytest.mark.parametrize(
    ("info", "level", "subject"),
    [
        ({"redis_version": "6.2.1"}, "error", "Redis"),
        ({"role": "slave"}, "error", "Redis: role"),
        ({"cluster_enabled": 1}, "error", "Redis: cluster"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 100}, "error", "Redis: maxmemory-policy"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 0}, "warning", "Redis: maxmemory-policy"),
        ({"maxmemory": 100, "used_memory": 95}, "warning", "Redis: memory"),
        ({"aof_enabled": 0}, "warning", "Redis: persistence"),
        ({"aof_last_write_status": "err"}, "error", "Redis: persistence"),
        ({"aof_enabled": 0, "rdb_last_bgsave_status": "err"}, "error", "Redis: persistence"),
        ({"evicted_keys": 3}, "error", "Redis: evictions"),
    ],
)
def test_each_trouble_of_redis_is_found(info: Mapping[str, object], level: str, subject: str) -> None:
    assert subjects(info, level) == {subject}


def test_valkey_is_known_by_its_own_version() -> None:
    info = {"server_name": "valkey", "valkey_version": "9.1.2", "redis_version": "7.2.4"}
    assert next(iter(examine_info({**HEALTHY, **info}, "here"))).found == "valkey 9.1.2 at here"


@pytest.mark.parametrize("host", [None, "", "localhost", "127.0.0.1", "127.8.8.8", "::1"])
def test_this_machine_has_several_names(host: str | None) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["rabbit", "10.0.0.1", "localhost.example"])
def test_other_machines_are_not_this_one(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("gpus", "level", "said"),
    [
        (Gpus((Gpu("0", "GPU-1", "Tesla T4"),), "driver"), "ok", "Tesla T4"),
        (Gpus((Gpu("0"),), "device files"), "warning", "no answer of the driver"),
        (Gpus((), "none"), "ok", "none"),
    ],
)
def test_the_gpus_are_told(gpus: Gpus, level: str, said: str) -> None:
    (found,) = (one for one in examine_host({}, gpus) if one.subject == "GPU")
    assert (found.level, said in found.found) == (level, True)


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ((3, 9, 29), "error"),
        ((3, 10, 8), "ok"),
        ((3, 12, 14), "ok"),
        ((3, 13, 0), "error"),
        ((3, 13, 2), "error"),
        ((3, 13, 3), "ok"),
        ((4, 0, 5), "ok"),
    ],
)
def test_versions_of_rabbitmq_that_are_too_old_or_lose_messages_are_named(version: tuple[int, ...], level: str) -> None:
    assert [one.level for one in examine_version(version, "here")] == [level]
