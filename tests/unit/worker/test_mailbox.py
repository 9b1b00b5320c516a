"""The mailbox: calls from any thread, done by the owner, and a wake-up that never blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from inference_tasks.worker.mailbox import Mailbox


def test_what_other_threads_post_is_done_by_the_owner_in_its_order() -> None:
    mailbox, done = Mailbox(), list[tuple[int, bool]]()

    def post() -> None:
        for number in range(3):
            mailbox.post(lambda number=number: done.append((number, mailbox.is_owner)))  # type: ignore[misc]

    thread = threading.Thread(target=post)
    thread.start()
    thread.join()
    assert done == []
    mailbox.run()
    assert done == [(0, True), (1, True), (2, True)]


def test_a_wake_up_never_blocks_and_the_loop_sees_one_for_many() -> None:
    mailbox, readers = Mailbox(), list[tuple[Any, Callable[[], None]]]()
    mailbox.register(SimpleNamespace(add_reader=lambda reader, callback: readers.append((reader, callback))))
    for _ in range(100_000):
        mailbox.wake()
        mailbox._is_waking = False  # as if the loop were about to read, each time
    ((reader, woken),) = readers
    assert reader.recv(1) == b"\0"
    woken()
    mailbox.wait(0)
