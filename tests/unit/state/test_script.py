"""Errors of Redis as errors of this package, and the scripts as files."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from redis import exceptions

from inference_tasks.errors import BugError, DeploymentError, InferenceError, StateUnavailableError
from inference_tasks.state.script import load, translated

SCRIPTS = resources.files("inference_tasks.state").joinpath("scripts")
READ_BEFORE_OTHERS = ("prelude", "ledger", "admission", "batches", "dependents")
NAMES = sorted({path.name.removesuffix(".lua") for path in SCRIPTS.iterdir()}.difference(READ_BEFORE_OTHERS))


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (exceptions.ConnectionError("Connection refused"), StateUnavailableError),
        (exceptions.TimeoutError("Timeout reading from socket"), StateUnavailableError),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), StateUnavailableError),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), StateUnavailableError),
        (exceptions.ResponseError("OOM command not allowed when used memory > 'maxmemory'."), StateUnavailableError),
        (exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"), StateUnavailableError),
        (exceptions.ResponseError("BUSY Redis is busy running a script."), StateUnavailableError),
        (exceptions.AuthenticationError("invalid username-password pair"), DeploymentError),
        (exceptions.NoPermissionError("this user has no permissions to run 'evalsha'"), DeploymentError),
        (exceptions.ResponseError("user_script:3: attempt to index a nil value in the ROOM"), BugError),
        (exceptions.DataError("Invalid input of type: 'NoneType'"), BugError),
    ],
)
def test_each_redis_error_says_who_must_act(error: exceptions.RedisError, meaning: type[InferenceError]) -> None:
    assert type(translated(error)) is meaning


@pytest.mark.parametrize("name", NAMES)
def test_each_script_says_what_it_takes_returns_and_guarantees(name: str) -> None:
    text = SCRIPTS.joinpath(f"{name}.lua").read_text("utf-8")
    header = text.split("\n\n", 1)[0]
    assert all(line.startswith("--") for line in header.splitlines())
    for word in ("KEYS", "ARGV", "Returns"):
        assert word in header, word
    assert re.search("Atomic|Changes nothing|changes nothing|Reads one count", header)


@pytest.mark.parametrize("name", NAMES)
def test_no_script_asks_any_clock_but_the_servers(name: str) -> None:
    text = SCRIPTS.joinpath(f"{name}.lua").read_text("utf-8")
    assert "os.time" not in text
    assert "os.clock" not in text


def test_a_script_is_read_once() -> None:
    assert load("claim") is load("claim")
    assert re.fullmatch("[0-9a-f]{40}", load("claim").sha)
