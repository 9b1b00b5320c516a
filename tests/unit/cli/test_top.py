"""What `top` draws of a look, how it counts refusals, and what its keys do; the terminal is in tests/integration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from inference_tasks.app import inference_of
from inference_tasks.cli.cockpit import Cockpit, targets_of
from inference_tasks.cli.top_view import span, view
from inference_tasks.inference_app import InferenceApp
from inference_tasks.observe import fleet
from inference_tasks.observe.top import RefusalWindow, Top
from inference_tasks.state.records import Accounts, RunningTask, WorkerBeat
from inference_tasks.state.switches import Action
from inference_tasks.testing.store import FakeTaskStore

NODE = "gpu0-1a2b3c@host"


class Depths:
    def of(self, topology: object, /) -> dict[str, int]:
        return {"inference.realtime": 1000, "inference.batch": 3}


@pytest.fixture
def store() -> FakeTaskStore:
    store = FakeTaskStore()
    running = tuple(
        RunningTask(str(n), "vision.embed", "realtime", "batch", "aged", store.now_s - 90) for n in range(9)
    )
    beat = WorkerBeat(NODE, 7, "0", "threads", 9, 0, ("realtime", "batch"), 9, running=running, gpu_utilization=0.5)
    store.renew([], NODE, 30.0, beat)
    return store


@pytest.fixture
def inference(store: FakeTaskStore) -> Any:
    """The parts of an app that are looked at, with a store in memory."""
    real = inference_of(InferenceApp("top", broker="amqp://nowhere", set_as_current=False))
    parts = ("settings", "topology", "queue_by_lane")
    return SimpleNamespace(store=store, **{name: getattr(real, name) for name in parts})


def looked(inference: Any, **fields: Any) -> Top:
    return Top(fleet.read(inference, Depths()), (), tuple(inference.store.operator_log(5)), **fields)


def drawn(top: Top, width: int = 140, chosen: str = "") -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(view(top, chosen=chosen, width=width))
    return capture.get()


@pytest.mark.parametrize(
    ("amount_s", "shown"),
    [(None, "-"), (0.0123, "12 ms"), (59.95, "60.0 s"), (150.0, "2.5 min"), (9000.0, "2.5 h"), (864000.0, "10.0 d")],
)
def test_durations_have_the_unit_that_fits(amount_s: float | None, shown: str) -> None:
    assert span(amount_s) == shown


@pytest.mark.parametrize("width", [80, 140])
def test_what_needs_attention_is_said_beside_the_tier(inference: Any, width: int) -> None:
    inference.store.switch("tier:batch", Action.PAUSE, by="ann", because="a new model")
    text = drawn(looked(inference), width)
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "full" in lines["realtime"]
    assert "paused" in lines["batch"]
    assert max(map(len, text.splitlines())) <= width


def test_of_a_worker_the_longest_runs_are_drawn_with_where_they_came_from(inference: Any) -> None:
    text = drawn(looked(inference))
    assert text.count("vision.embed") == 8
    assert "and 1 more" in text
    assert "realtime (from batch)" in text
    assert "90.0 s" in text
    assert "50.0%" in text


def test_refusals_are_those_since_the_look_of_a_minute_ago() -> None:
    window = RefusalWindow()
    assert window.lately(0.0, {"batch": {"full": 5}}) is None
    assert window.lately(1.0, {"batch": {"full": 5}}) == {}
    assert window.lately(50.0, {"batch": {"full": 7}, "offline": {"late": 1}}) == {
        "batch": {"full": 2},
        "offline": {"late": 1},
    }
    assert window.lately(100.0, {"batch": {"full": 8}, "offline": {"late": 1}}) == {"batch": {"full": 1}}
    # Redis was lost, and the counts began anew.
    assert window.lately(101.0, {"batch": {"full": 3}}) == {"batch": {"full": 3}}


def test_a_first_look_shows_all_refusals_since_the_counts_began(inference: Any) -> None:
    first = looked(inference)
    assert "none" in drawn(first)
    accounts = Accounts(1.0, {}, {}, {"offline": {"full": 12}})
    told = Top(fleet.Fleet(**{**_fields(first.fleet), "accounts": accounts}), (), ())
    assert "12 of offline (full)" in drawn(told)
    assert "refused lately: none" in drawn(Top(told.fleet, (), (), {}))


def _fields(found: fleet.Fleet) -> dict[str, Any]:
    return {name: getattr(found, name) for name in type(found).__dataclass_fields__}


def test_keys_choose_a_row_ask_and_act(inference: Any) -> None:
    cockpit, top = Cockpit(inference), looked(inference)
    assert targets_of(top) == ["tier:realtime", "tier:batch", "tier:offline", f"worker:{NODE}"]

    def press(*keys: str) -> list[bool]:
        return [cockpit.press(key, top) for key in keys]

    press("p")
    assert cockpit.question == ""  # nothing is chosen yet
    press("down", "down", "j", "j", "j", "up", "k", "down")
    assert cockpit.chosen == "tier:offline"
    press("p", "n")
    assert not inference.store.switches()
    press("p", "q")  # to a question, q is a no
    assert not inference.store.switches()
    press("p", "y")
    assert [(one.target, one.action) for one in inference.store.switches()] == [("tier:offline", Action.PAUSE)]
    press("down", "d", "y")
    assert cockpit.message == f"worker:{NODE} takes nothing new"
    assert [(one.action, one.target, one.because) for one in inference.store.operator_log(2)] == [
        ("drain", f"worker:{NODE}", "in top"),
        ("pause", "tier:offline", "in top"),
    ]
    assert press("x", "q") == [True, False]


def test_a_key_while_redis_is_away_says_so_and_changes_nothing(inference: Any) -> None:
    cockpit, top = Cockpit(inference, chosen="tier:batch"), looked(inference)
    inference.store.is_away = True
    cockpit.press("p", top)
    assert cockpit.press("y", top)
    assert "state" in cockpit.message.lower()
    inference.store.is_away = False
    assert not inference.store.switches()
