"""Every admitted task is accounted for."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import redis
from click.testing import CliRunner

from inference_tasks.app import inference_of
from inference_tasks.cli import main
from tests.support.brokers import until
from tests.support.dead_letters import command, ids_in_queue, perish, settings
from tests.support.rig import Rig, task

both = pytest.mark.parametrize("queue_type", ["quorum", "classic"])


@both
def test_the_accounts_are_exact_after_failures_drops_and_replays(rig: Rig) -> None:
    app = rig.app()
    assert command(rig, "tiers", "--audit")["since_s"] is None
    perish(rig, app, range(30))
    ids = ids_in_queue(app)
    command(rig, "dead", "list")
    found = command(rig, "tiers", "--audit")
    assert (found["is_exact"], found["moving"], found["broker"]["dead"]) == (True, 0, 30)
    assert found["tiers"]["batch"]["dead:replayable"] == found["tiers"]["batch"]["failed"] == 30

    dropped = command(rig, "dead", "drop", "--limit", "12", "--yes")
    assert (dropped["done"], dropped["is_complete"]) == (12, True)
    assert ids_in_queue(app) == ids[12:]
    assert command(rig, "dead", "replay", "--limit", "8")["done"] == 8
    more = [task(app, "add.realtime").submit(number, 0) for number in range(5)]
    with rig.worker():
        rig.wait_states(app, [*ids[12:20], *(handle.id for handle in more)], success=13)
        task(app, "raises").submit(7)
        until(lambda: inference_of(app).store.accounts().by_tier["batch"]["failed"] == 23, "it has failed")
    until(lambda: _audit(rig)["moving"] == 0, "nothing moves")
    found = _audit(rig)
    assert found["is_exact"]
    batch, realtime, total = (found["tiers"][name] for name in ("batch", "realtime", "total"))
    assert (batch["admitted"], batch["success"], batch["failed"]) == (31, 8, 23)
    assert (batch["dead:dropped"], batch["dead:replayable"], batch["dead:unburied"]) == (12, 11, 0)
    assert (realtime["admitted"], realtime["success"]) == (5, 5)
    assert total["admitted"] == 36
    assert found["broker"]["dead"] == found["indexed"] == 11
    assert Counter(record.dead for record in inference_of(app).store.get_many(ids) if record) == {
        "dropped": 12,
        "replayable": 10,
        None: 8,
    }


def _audit(rig: Rig) -> Any:
    command(rig, "dead", "list")
    return command(rig, "tiers", "--audit")


def test_the_audit_tells_what_moves(rig: Rig) -> None:
    app = rig.app()
    gate = rig.gate()
    handles = [task(app, "gated.batch").submit(number, str(gate)) for number in range(3)]
    with rig.worker():
        rig.wait_started(0)
        found = command(rig, "tiers", "--audit")
        assert (found["is_exact"], found["moving"]) == (True, 1)
        assert (found["tiers"]["batch"]["processing"], found["tiers"]["batch"]["pending"]) == (1, 2)
        assert found["broker"]["ready"] == 2
        gate.open()
        rig.wait_states(app, [handle.id for handle in handles], success=3)
    assert command(rig, "tiers", "--audit")["moving"] == 0


def test_an_account_that_does_not_add_up_is_told_by_the_exit_code(rig: Rig) -> None:
    app = rig.app()
    task(app, "add").submit(1, 1)
    options = cast("dict[str, Any]", rig.options)
    server = redis.Redis.from_url(options["state"]["url"])
    server.hincrby(f"{options['state']['prefix']}accounts", "batch:admitted", 1)
    server.close()
    assert not command(rig, "tiers", "--audit", code=1)["is_exact"]
    wrong = CliRunner().invoke(main, ["tiers", "--audit"], env=settings(rig))
    assert wrong.exit_code == 1
    assert "do not add up" in wrong.stdout
