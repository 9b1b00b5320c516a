"""Connections that threads keep: how many there are, and that every reply belongs to its command."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import redis

from inference_tasks.state.held import HeldConnections, held
from inference_tasks.state.script import Script
from inference_tasks.state.store import client_from_url
from tests.support.servers import RedisNode

ECHO = Script("echo", "return ARGV[1]")
SLOW = Script("slow", "local t = redis.call('TIME')[1] repeat until redis.call('TIME')[1] - t >= 2 return 'slow'")


@pytest.fixture
def control(private_redis: RedisNode) -> Iterator[Any]:
    with redis.Redis.from_url(private_redis.url()) as client:
        client.ping()
        yield client


@pytest.fixture
def client(private_redis: RedisNode) -> Iterator[HeldConnections]:
    made = held(client_from_url(private_redis.url(), socket_timeout_s=10))
    assert isinstance(made, HeldConnections)
    assert echo(made, "first") == "first"
    yield made
    made.connection_pool.disconnect()


def echo(client: HeldConnections, text: str) -> str:
    return str(ECHO.call(client, (), (text,)).decode())


def connections(control: Any) -> int:
    return len(control.client_list()) - 1


def in_thread(client: HeldConnections, text: str) -> None:
    thread = threading.Thread(target=echo, args=(client, text))
    thread.start()
    thread.join(10)


def test_a_thread_keeps_one_and_gives_it_back_at_its_end(client: HeldConnections, control: Any) -> None:
    # One was opened to load the script: that is no call of a script, and went the usual way.
    opened = connections(control)
    assert [echo(client, str(number)) for number in range(50)] == [str(number) for number in range(50)]
    for number in range(20):
        in_thread(client, str(number))
    assert connections(control) == opened


def test_threads_beyond_half_of_the_pool_borrow(private_redis: RedisNode, control: Any) -> None:
    client = HeldConnections(redis.Redis.from_url(private_redis.url(), max_connections=2))
    assert echo(client, "kept") == "kept"
    for number in range(5):
        in_thread(client, str(number))
    together = threading.Barrier(2)
    answers: list[str] = []

    def two() -> None:
        together.wait(10)
        answers.append(echo(client, "borrowed"))

    thread = threading.Thread(target=two)
    thread.start()
    together.wait(10)
    assert echo(client, "kept") == "kept"
    thread.join(10)
    assert answers == ["borrowed"]
    assert connections(control) == 2
    client.connection_pool.disconnect()


def test_a_connection_that_the_server_has_closed_is_opened_again(client: HeldConnections, control: Any) -> None:
    for _ in range(3):
        assert control.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") > 0
        assert echo(client, "again") == "again"


def test_an_error_of_the_script_is_raised_and_the_connection_kept(client: HeldConnections, control: Any) -> None:
    opened = connections(control)
    with pytest.raises(redis.ResponseError, match="mine"):
        client.execute_command("EVALSHA", control.script_load("return redis.error_reply('mine')"), 0)
    assert echo(client, "next") == "next"
    assert connections(control) == opened


class InterruptedByTestError(Exception):
    """What the handler of the signal raises."""


def test_the_reply_of_an_interrupted_call_is_no_other_calls(
    client: HeldConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery raises in a signal's handler when a task's soft time limit is over, wherever the process is."""
    connection = client._of_thread.kept._connection
    send = connection.send_command

    def interrupted(*args: Any, **options: Any) -> None:
        send(*args, **options)
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGUSR1)

    def handler(number: int, frame: FrameType | None) -> None:
        raise InterruptedByTestError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(connection, "send_command", interrupted)
        with pytest.raises(InterruptedByTestError):
            echo(client, "lost")
        assert echo(client, "mine") == "mine"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_of_a_signal_may_call_while_a_call_waits(client: HeldConnections) -> None:
    answers: list[str] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: answers.append(echo(client, "within")))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert SLOW.call(client, (), ()) == b"slow"
        assert answers == ["within"]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_fork_opens_its_own_and_leaves_the_parents_alone(client: HeldConnections, control: Any) -> None:
    child = os.fork()
    if not child:
        os._exit(0 if [echo(client, str(number)) for number in range(20)] == [str(n) for n in range(20)] else 1)
    assert [echo(client, str(number)) for number in range(20)] == [str(number) for number in range(20)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert echo(client, "parent") == "parent"
