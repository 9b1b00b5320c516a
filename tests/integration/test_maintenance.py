"""The maintenance command: an ordinary worker on a queue of its own, with beat beside it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, cast

import redis
from kombu import Connection

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.broker.embedded_server import EmbeddedServer
from inference_tasks.cli.diagnosis.state import examine_state
from inference_tasks.schedule import ACCOUNT, LET_GO, PROMOTE, RECONCILE
from inference_tasks.state import keys
from tests.support.aging import client_of, grow_old, put
from tests.support.brokers import depths, until
from tests.support.history import History
from tests.support.processes import LoggedProcess
from tests.support.rig import Rig, task
from tests.support.servers import RedisNode
from tests.support.tier_app import OPTIONS_VARIABLE

LIMIT_S = 1800.0
READY = " ready."
SENDS = "beat sends the schedule"
QUICK = {"aging": {"every_s": 0.5}, "maintenance": {"account_every_s": 0.5, "reconcile_every_s": 1}}


def program(rig: Rig, *arguments: str, name: str = "maintenance", module: str = "inference_tasks.cli") -> LoggedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(rig.directory), *(entry for entry in sys.path if entry)]),
        "PYTHONUNBUFFERED": "1",
        OPTIONS_VARIABLE: json.dumps({**rig.options, **QUICK}),
    }
    return LoggedProcess(
        [sys.executable, "-m", module, *arguments],
        log=rig.directory / f"{name}.log",
        env=environment,
        directory=rig.directory,
    )


def maintenance(rig: Rig, *arguments: str, name: str = "maintenance") -> LoggedProcess:
    return program(rig, "maintenance", "-A", "tests.support.faulty_app:app", *arguments, name=name)


def old_task(app: InferenceApp, tier: str = "offline", number: int = 0) -> str:
    task_id = str(task(app, f"step.{tier}").submit(number).id)
    grow_old(app, [task_id], LIMIT_S + 1)
    return task_id


def wait_promoted(app: InferenceApp, task_id: str) -> None:
    until(lambda: app.status(task_id).lane == "aged", "the task moves up")


def test_one_command_promotes_and_ends_in_order(rig: Rig) -> None:
    app = rig.app()
    task_id = old_task(app)
    with maintenance(rig) as process:
        process.wait_for(READY)
        wait_promoted(app, task_id)
        assert process.terminate() == 0
    record = app.status(task_id)
    assert (record.tier, record.tier_first) == ("batch", "offline")
    # Nothing of this went through the tiers, or was counted as work.
    accounts = inference_of(app).store.accounts().by_tier
    assert {tier: counts["admitted"] for tier, counts in accounts.items() if counts["admitted"]} == {"offline": 1}
    with client_of(app) as client:
        assert not list(client.scan_iter(f"{inference_of(app).store.prefix}*:result"))


def test_it_works_while_every_slot_of_the_workers_is_taken(rig: Rig) -> None:
    app = rig.app()
    gate = rig.gate()
    with rig.worker(), maintenance(rig):
        running = [
            task(app, f"gated.{tier}").submit(number, str(gate)) for number, tier in enumerate(("realtime",) * 2)
        ]
        rig.wait_started(0)
        task_id = old_task(app, number=9)
        wait_promoted(app, task_id)
        gate.open()
        rig.wait_states(app, [one.id for one in running] + [task_id], success=3)


def test_beat_by_hand_sends_what_the_command_without_beat_runs(rig: Rig) -> None:
    app = rig.app()
    task_id = old_task(app)
    beat = program(rig, "-A", "tests.support.faulty_app", "beat", "-l", "INFO", name="beat", module="celery")
    with maintenance(rig, "--no-beat") as worker, beat:
        worker.wait_for(READY)
        beat.wait_for(SENDS)
        wait_promoted(app, task_id)
        assert SENDS not in worker.log
        assert beat.terminate() == 0
        assert worker.terminate() == 0


def test_of_two_beats_one_sends_and_the_other_takes_over_when_it_is_killed(rig: Rig) -> None:
    app = rig.app()
    first, second = maintenance(rig, name="first"), maintenance(rig, name="second")
    with first:
        first.wait_for(SENDS)
        with second:
            second.wait_for(READY)
            wait_promoted(app, old_task(app))
            assert SENDS not in second.log
            first.kill()
            # Its lock lives for five times the longest sleep.
            second.wait_for(SENDS, timeout_s=60)
            wait_promoted(app, old_task(app, number=1))


def test_a_beat_that_ends_in_order_leaves_its_place_at_once(rig: Rig) -> None:
    with maintenance(rig, name="first") as first:
        first.wait_for(SENDS)
        with maintenance(rig, name="second") as second:
            second.wait_for(READY)
            assert first.terminate() == 0
            second.wait_for(SENDS, timeout_s=10)


def test_the_schedule_does_not_pile_up_while_nobody_runs_it(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    inference.declare_topology()
    queue = inference.topology.maintenance.name
    with program(rig, "-A", "tests.support.faulty_app", "beat", "-l", "INFO", name="beat", module="celery") as beat:
        beat.wait_for("Sending due task", count=12)
        assert depths(app)[queue] <= 6
        until(lambda: depths(app)[queue] > 0, "the schedule is sent")
    until(lambda: depths(app)[queue] == 0, "what nobody ran has expired")
    assert depths(app)[inference.topology.dead.name] == 0


def test_a_flushed_redis_gets_its_schedule_back_and_aging_goes_on(
    amqp_url: str, private_redis: RedisNode, namespace: str, history: History, tmp_path: Path
) -> None:
    options = {"broker": {"url": amqp_url}, "state": {"url": private_redis.url()}, "namespace": namespace}
    rig = Rig(options, history, tmp_path, is_exact=False)
    app = rig.app()
    try:
        with maintenance(rig) as process:
            process.wait_for(SENDS)
            task_id = str(task(app, "step.offline").submit(1).id)
            with redis.Redis.from_url(private_redis.url()) as client:
                client.flushall()
            process.wait_for(SENDS, count=2, timeout_s=30)
            grow_old_message(rig, app, task_id)
            # Nothing lists the task any more: a look at the head finds it.
            queue = inference_of(app).topology.queue("batch", "aged").name
            until(lambda: depths(app)[queue] == 1, "the forgotten task moves up", 90)
            assert process.terminate() == 0
    finally:
        rig.close()


def grow_old_message(rig: Rig, app: InferenceApp, task_id: str) -> None:
    """Replace the task's message in `offline` by one that was submitted long ago."""
    message = rig.take(app, "offline")
    assert message.headers["id"] == task_id
    ours = {**message.headers["inference"], "submitted_at_s": message.headers["inference"]["submitted_at_s"] - LIMIT_S}
    put(app, inference_of(app).topology.queue("offline").name, message, inference=ours)


def test_the_embedded_broker_does_not_age(tmp_path: Path) -> None:
    (tmp_path / "vision.py").write_text("from inference_tasks import InferenceApp\napp = InferenceApp('vision')\n")
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("INFERENCE_", "CELERY_"))}
    process = LoggedProcess(
        [sys.executable, "-m", "inference_tasks.cli", "maintenance", "-A", "vision:app"],
        log=tmp_path / "maintenance.log",
        env={**mine, "PYTHONPATH": os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])},
        directory=tmp_path,
    )
    try:
        with process:
            assert process.wait() == 7
    finally:
        EmbeddedServer(tmp_path / ".inference").stop()
    assert "need RabbitMQ" in process.log


def test_the_schedule_is_in_celerys_configuration_and_shows_no_address(rig: Rig) -> None:
    app = rig.app()
    schedule = app.conf.beat_schedule
    assert set(schedule) == {PROMOTE, ACCOUNT, RECONCILE, LET_GO}
    assert schedule[PROMOTE]["options"]["expires"] == schedule[PROMOTE]["schedule"] == 10.0
    url = str(inference_of(app).settings.state.url)
    assert not [key for key in app.conf if key.startswith("redbeat") and url in str(app.conf[key])]


def test_a_schedule_and_routes_of_the_users_stay_beside_ours(rig: Rig) -> None:
    app = rig.app(
        beat_schedule={"mine": {"task": "step.batch", "schedule": 60.0}}, task_routes={"*": {"queue": "elsewhere"}}
    )
    assert set(app.conf.beat_schedule) == {"mine", PROMOTE, ACCOUNT, RECONCILE, LET_GO}
    inference_of(app).declare_topology()
    app.send_task(PROMOTE, ignore_result=True, expires=30)
    assert depths(app)[inference_of(app).topology.maintenance.name] == 1
    with Connection(cast(str, inference_of(app).settings.broker.url)) as connection:
        channel: Any = connection.default_channel
        message = channel.basic_get(inference_of(app).topology.maintenance.name, no_ack=True)
    assert message.properties["expiration"] == "30000"
    assert "inference" not in message.headers


def test_it_ends_in_order_while_the_broker_does_not_answer(rig: Rig) -> None:
    options = {**rig.options, "broker": {**rig.options["broker"], "url": "amqp://guest:guest@127.0.0.1:1//"}}
    process = maintenance(Rig(options, rig.history, rig.directory, is_exact=False))
    with process:
        process.wait_for("Cannot connect")
        assert process.terminate(40) == 0
    assert not re.search("Traceback", process.log)


def test_keys_of_the_schedule_lie_under_our_prefix(rig: Rig) -> None:
    app = rig.app()
    with maintenance(rig) as process, client_of(app) as client:
        process.wait_for(SENDS)
        prefix = keys.beat(inference_of(app).store.prefix)
        until(lambda: client.zcard(f"{prefix}:schedule") == 4, "the schedule is written")
        # Five times the longest sleep of beat.
        assert 0 < client.ttl(keys.beat_lock(inference_of(app).store.prefix)) <= 25
        levels = {one.subject: one.level for one in examine_state(inference_of(app))}
        assert levels["maintenance"] == "ok"
        assert process.terminate() == 0
        assert not client.exists(keys.beat_lock(inference_of(app).store.prefix))
