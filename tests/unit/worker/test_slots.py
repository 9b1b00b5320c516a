"""Slots are taken and freed exactly once, whichever way a job ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inference_routing.lane import QueueKey
from inference_tasks.worker.intake import Intake
from inference_tasks.worker.slots import SlotPool, Slots, Ticket


def ticket(task_id: str = "a", *, reserved: bool = False) -> Ticket:
    intake = Intake(task_id, "t", "batch", "batch", "fresh", 0, None, None, None)
    return Ticket(intake, cast(Any, None), QueueKey("batch", "fresh", "q"), None, 1, 0.0, 0.1, reserved)


class TestSlots:
    def test_a_slot_exists_once_its_process_is_ready(self) -> None:
        ready = 0
        slots = Slots(lambda: ready)
        assert (slots.ready, slots.free, slots.free_lower) == (0, 0, 0)
        ready = 2
        assert (slots.ready, slots.free, slots.free_lower) == (2, 2, 2)

    def test_a_ticket_is_freed_once(self) -> None:
        slots = Slots(lambda: 2)
        one = ticket()
        slots.take(one)
        assert (len(slots), slots.free) == (1, 1)
        assert slots.free_up(one)
        assert not slots.free_up(one)
        assert (len(slots), slots.free) == (0, 2)

    def test_there_are_never_less_than_no_slots_though_a_process_has_gone(self) -> None:
        ready = 2
        slots = Slots(lambda: ready)
        slots.take(ticket("a"))
        slots.take(ticket("b"))
        ready = 1
        assert (slots.free, slots.free_lower) == (0, 0)

    @pytest.mark.parametrize(
        ("lower", "realtime", "free", "free_lower"),
        [(0, 0, 4, 3), (3, 0, 1, 0), (2, 0, 2, 1), (0, 3, 1, 1), (1, 2, 1, 1), (0, 4, 0, 0), (2, 1, 1, 1)],
    )
    def test_the_reserve_is_kept_for_realtime(self, lower: int, realtime: int, free: int, free_lower: int) -> None:
        slots = Slots(lambda: 4, reserve=1)
        for number in range(lower):
            slots.take(ticket(f"lower-{number}"))
        for number in range(realtime):
            slots.take(ticket(f"realtime-{number}", reserved=True))
        assert (slots.free, slots.free_lower) == (free, free_lower)

    def test_a_message_that_comes_back_while_its_run_goes_on_is_kept(self) -> None:
        slots, first, again = Slots(lambda: 2), delivery(1), delivery(7)
        running = replace(ticket(), message=first)
        slots.take(running)
        assert not slots.adopt(running.intake, 1, again), "a second message, while the first is there"
        slots.connection_lost()
        assert not slots.adopt(running.intake, 2, again), "another claim"
        for other in ({"id": "b"}, {"hop": 1}, {"generation": 1}):
            assert not slots.adopt(replace(running.intake, **cast(Any, other)), 1, again)
        assert slots.adopt(running.intake, 1, again)
        assert (first.delivery_tag, first.channel) == (7, again.channel)
        assert not slots.adopt(running.intake, 1, delivery(8)), "it has its message again"

    def test_a_message_that_its_task_has_acknowledged_is_not_kept(self) -> None:
        slots, running = Slots(lambda: 2), replace(ticket(), message=delivery(1, acknowledged=True))
        slots.take(running)
        slots.connection_lost()
        assert not slots.adopt(running.intake, 1, delivery(7))


def delivery(tag: int, *, acknowledged: bool = False) -> Any:
    return SimpleNamespace(
        channel=object(), delivery_tag=tag, delivery_info={}, _state="RECEIVED", acknowledged=acknowledged
    )


class Pool:
    """A pool that keeps its callbacks, so that the test ends the jobs."""

    def __init__(self, job: object = None, error: Exception | None = None) -> None:
        self.job, self.error = job, error
        self.callbacks: dict[str, Callable[..., object]] = {}
        self.limit = 7

    def apply_async(self, target: object, args: object, kwargs: object, **options: Any) -> object:
        self.callbacks = {name: value for name, value in options.items() if name.endswith("callback")}
        if self.error is not None:
            raise self.error
        return self.job


class Bench:
    def __init__(self, pool: Pool) -> None:
        self.events: list[str] = []
        self.leaves_it = True
        self.pool = SlotPool(
            pool,
            take=self.take,
            free=lambda ticket: self.events.append("freed"),
            ended=self.ended,
        )

    def take(self, task_id: str) -> Ticket:
        self.events.append(f"taken {task_id}")
        return ticket(task_id)

    def ended(self, ticket: Ticket, info: object) -> Callable[[], None] | None:
        self.events.append(f"ended {info}")
        return None if self.leaves_it else lambda: self.events.append("settled")

    def apply(self) -> object:
        return self.pool.apply_async(
            print,
            (),
            {},
            callback=lambda *_: self.events.append("result"),
            error_callback=lambda *_: self.events.append("error"),
            timeout_callback=lambda soft, timeout: self.events.append(f"timeout {soft}"),
            correlation_id="a",
        )


def test_a_prefork_slot_is_free_after_the_result_was_taken_in() -> None:
    pool = Pool(job=SimpleNamespace())
    bench = Bench(pool)
    bench.apply()
    assert bench.events == ["taken a"]
    pool.callbacks["callback"]("done")
    assert bench.events == ["taken a", "result", "freed"]


def test_a_slot_is_free_though_the_callback_raises() -> None:
    pool = Pool(job=SimpleNamespace())
    bench = Bench(pool)
    bench.pool.apply_async(print, callback=lambda: 1 / 0, correlation_id="a")
    with pytest.raises(ZeroDivisionError):
        pool.callbacks["callback"]()
    assert bench.events == ["taken a", "freed"]


def test_a_lost_process_is_told_before_its_slot_is_free() -> None:
    pool = Pool(job=SimpleNamespace())
    bench = Bench(pool)
    bench.apply()
    pool.callbacks["error_callback"]("lost")
    assert bench.events == ["taken a", "ended lost", "error", "freed"]


def test_the_message_of_a_failed_run_is_settled_once_celery_has_noted_the_end() -> None:
    pool = Pool(job=SimpleNamespace())
    bench = Bench(pool)
    bench.leaves_it = False
    bench.apply()
    pool.callbacks["callback"]((1, "why", 0.5))
    assert bench.events == ["taken a", "ended why", "result", "settled", "freed"]


def test_the_hard_time_limit_frees_the_slot_and_the_soft_one_does_not() -> None:
    pool = Pool(job=SimpleNamespace())
    bench = Bench(pool)
    bench.apply()
    pool.callbacks["timeout_callback"](True, 1.0)
    assert bench.events == ["taken a", "timeout True"]
    pool.callbacks["timeout_callback"](False, 2.0)
    assert bench.events[-2:] == ["timeout False", "freed"]


def test_a_thread_frees_its_slot_by_the_end_of_its_future_alone() -> None:
    future: Future[None] = Future()
    pool = Pool(job=SimpleNamespace(f=future))
    bench = Bench(pool)
    bench.apply()
    pool.callbacks["callback"]("done")
    assert "freed" not in bench.events
    future.set_exception(SystemExit())
    assert bench.events == ["taken a", "result", "freed"]


def test_solo_has_run_the_task_when_the_call_returns() -> None:
    bench = Bench(Pool(job=None))
    bench.apply()
    assert bench.events == ["taken a", "freed"]


def test_a_pool_that_refuses_keeps_no_slot() -> None:
    bench = Bench(Pool(error=OSError("no more processes")))
    with pytest.raises(OSError, match="no more"):
        bench.apply()
    assert bench.events == ["taken a", "freed"]


def test_everything_else_is_the_pools_own() -> None:
    pool = Pool()
    wrapped: Any = Bench(pool).pool
    assert wrapped.limit == 7
    wrapped.limit = 8
    assert pool.limit == 8
