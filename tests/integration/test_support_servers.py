"""The tools that other tests stand on: servers, proxy, processes and history do what they say."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import amqp  # noqa: TID251 - a client that shares no code with the product
import pytest
import redis
from pytest_celery import CeleryTestSetup

from tests.support.history import History
from tests.support.processes import LoggedProcess, ProcessEndedError, WorkerProcess
from tests.support.proxy import FaultProxy
from tests.support.servers import RabbitMQNode, RedisNode


def _connect(node: RabbitMQNode, vhost: str, *, read_timeout_s: float = 30.0) -> amqp.Connection:
    connection = amqp.Connection(
        f"127.0.0.1:{node.port}", virtual_host=vhost, connect_timeout=10, read_timeout=read_timeout_s
    )
    connection.connect()
    return connection


def _body(message: amqp.Message | None) -> object:
    assert message is not None, "the queue is empty"
    return message.body


class TestRabbitMQNode:
    def test_a_virtual_host_is_fresh_and_usable(self, rabbitmq: RabbitMQNode, vhost: str) -> None:
        with _connect(rabbitmq, vhost) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True, auto_delete=False)
            channel.basic_publish(amqp.Message("hello"), routing_key="q")
            assert _body(channel.basic_get("q", no_ack=True)) == "hello"
        queues = rabbitmq.api("GET", f"/api/queues/{vhost}")
        assert isinstance(queues, list)
        assert [queue["name"] for queue in queues] == ["q"]

    def test_the_broker_closes_all_connections_on_request(self, rabbitmq: RabbitMQNode, vhost: str) -> None:
        connection = _connect(rabbitmq, vhost)
        rabbitmq.close_all_connections()
        with pytest.raises(amqp.ConnectionForced):
            connection.drain_events(timeout=10)
        connection.collect()

    def test_durable_messages_survive_a_kill_and_a_freeze(self, private_rabbitmq: RabbitMQNode) -> None:
        node = private_rabbitmq
        with _connect(node, "/") as connection:
            channel = connection.channel()
            channel.confirm_select()
            channel.queue_declare("q", durable=True, auto_delete=False)
            channel.basic_publish_confirm(amqp.Message("kept", delivery_mode=2), routing_key="q", confirm_timeout=10)
        first = node.pid

        node.restart(kill=True)

        assert node.pid != first
        frozen = _connect(node, "/", read_timeout_s=2.0)
        channel = frozen.channel()
        node.pause()
        with pytest.raises(TimeoutError):
            channel.queue_declare("q", passive=True)
        node.resume()
        frozen.collect()
        with _connect(node, "/") as connection:
            assert _body(connection.channel().basic_get("q", no_ack=True)) == "kept"


class TestRedisNode:
    def test_data_survives_a_kill_only_with_the_append_only_file(self) -> None:
        for appendonly in (False, True):
            with RedisNode(appendonly=appendonly) as node, redis.Redis(port=node.port) as client:
                client.set("key", "value")
                node.restart(kill=True)
                assert client.exists("key") == appendonly

    def test_a_frozen_server_keeps_the_line_and_says_nothing(self, private_redis: RedisNode) -> None:
        with redis.Redis(port=private_redis.port, socket_timeout=0.2, retry=None) as client:
            client.ping()
            private_redis.pause()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            private_redis.resume()
            assert client.ping()

    def test_nothing_is_left_of_a_closed_node(self) -> None:
        with RedisNode() as node:
            pid, directory = node.pid, node.directory
        assert not directory.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def echo() -> Iterator[FaultProxy]:
    """A proxy before a server that returns what it is sent."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(link: socket.socket) -> None:
        with link:
            try:
                while chunk := link.recv(1024):
                    link.sendall(chunk)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                link, _address = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(link,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    with FaultProxy(listener.getsockname()[1]) as proxy:
        yield proxy
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def _dial(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


class TestFaultProxy:
    def test_it_forwards_until_told_otherwise(self, echo: FaultProxy) -> None:
        with _dial(echo) as link:
            link.sendall(b"hello")
            assert link.recv(100) == b"hello"
            assert echo.open_connections == 1

    def test_a_black_hole_is_silent_and_keeps_what_was_sent(self, echo: FaultProxy) -> None:
        with _dial(echo) as link:
            link.sendall(b"a")
            assert link.recv(1) == b"a"
            echo.black_hole()
            link.sendall(b"b")
            link.settimeout(0.1)
            with pytest.raises(TimeoutError):
                link.recv(1)
            echo.resume()
            link.settimeout(5)
            assert link.recv(1) == b"b"

    def test_a_reset_hits_what_is_open_and_nothing_later(self, echo: FaultProxy) -> None:
        with _dial(echo) as link:
            link.sendall(b"a")
            assert link.recv(1) == b"a"
            echo.reset_peer()
            with pytest.raises(ConnectionResetError):
                link.recv(1)
        with _dial(echo) as link:
            link.sendall(b"b")
            assert link.recv(1) == b"b"

    def test_down_refuses_until_resumed_on_the_same_port(self, echo: FaultProxy) -> None:
        port = echo.port
        echo.down()
        with pytest.raises(ConnectionRefusedError):
            _dial(echo)
        echo.resume()
        assert echo.port == port
        with _dial(echo) as link:
            link.sendall(b"a")
            assert link.recv(1) == b"a"

    def test_latency_delays_both_ways(self, echo: FaultProxy) -> None:
        echo.latency(0.1)
        with _dial(echo) as link:
            started = time.monotonic()
            link.sendall(b"a")
            assert link.recv(1) == b"a"
            assert time.monotonic() - started >= 0.2

    def test_an_address_is_rewritten_with_its_rights_and_path(self, echo: FaultProxy) -> None:
        assert echo.url("amqp://guest:guest@10.0.0.1:5672/%2F") == f"amqp://guest:guest@127.0.0.1:{echo.port}/%2F"


class TestProcesses:
    def test_an_end_before_the_awaited_words_is_told_with_the_log(self, tmp_path: Path) -> None:
        process = LoggedProcess([sys.executable, "-c", "print('oops'); raise SystemExit(3)"], log=tmp_path / "log")
        with process, pytest.raises(ProcessEndedError, match="oops"):
            process.wait_for("never")
        assert process.exit_code == 3

    def test_words_of_an_earlier_run_do_not_count(self, tmp_path: Path) -> None:
        code = "import time; print('up', flush=True); time.sleep(60)"
        process = LoggedProcess([sys.executable, "-c", code], log=tmp_path / "log")
        with process:
            process.wait_for("up")
            assert process.terminate() == -signal.SIGTERM
            process.start()
            process.wait_for("up")
            assert (tmp_path / "log").read_text().count("up") == 2
            assert process.log.count("up") == 1

    def test_children_do_not_outlive_a_closed_process(self, tmp_path: Path) -> None:
        code = (
            "import subprocess, sys, time; "
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
            "print('child up', flush=True); time.sleep(60)"
        )
        with LoggedProcess([sys.executable, "-c", code], log=tmp_path / "log") as process:
            process.wait_for("child up")
            (child,) = process.children()
            process.kill()
            assert child.is_running()
        child.wait(5)

    def test_a_worker_runs_tasks_and_ends_in_order(
        self, amqp_url: str, redis_url: str, tmp_path: Path, history: History
    ) -> None:
        from tests.support.plain_app import app

        env = {"CELERY_BROKER_URL": amqp_url, "CELERY_RESULT_BACKEND": redis_url, **history.env}
        with WorkerProcess.celery("tests.support.plain_app", "-c", "1", directory=tmp_path, env=env) as worker:
            with app.connection_for_write(amqp_url) as connection:
                app.send_task("plain.add", (2, 3), connection=connection, ignore_result=True)
            (entry,) = history.wait_for("add")
            assert (entry["x"], entry["y"]) == (2, 3)
            assert entry.pid in {child.pid for child in worker.children()}
            assert worker.restart() == 0
            assert worker.terminate() == 0


class TestHistory:
    def test_entries_of_many_writers_are_whole_and_none_is_lost(self, history: History) -> None:
        def write(writer: int) -> None:
            for number in range(50):
                history.append("tick", writer=writer, number=number)

        writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in writers:
            thread.start()
        for thread in writers:
            thread.join()

        assert history.counts("tick", "writer") == {0: 50, 1: 50, 2: 50, 3: 50}
        for writer in range(4):
            assert [entry["number"] for entry in history.of("tick") if entry["writer"] == writer] == list(range(50))

    def test_a_wait_that_fails_shows_what_was_there(self, history: History) -> None:
        history.append("start", id="a")
        with pytest.raises(TimeoutError, match="start"):
            history.wait_for("end", timeout_s=0.05)


class TestPytestCelery:
    def test_its_setup_runs_on_local_processes(self, celery_setup: CeleryTestSetup) -> None:
        assert celery_setup.ready(control=True)
        assert celery_setup.app.send_task("plain.add", (20, 22)).get(timeout=20) == 42
        celery_setup.worker.kill()
        assert celery_setup.worker.container.status == "exited"
        celery_setup.worker.restart()
        assert celery_setup.app.send_task("plain.add", (1, 1)).get(timeout=20) == 2
