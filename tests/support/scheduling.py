"""Several processes for the tests: most of them wait for servers and workers, so more run at once than there are cores.

A pytest plugin for pytest-xdist. Tests go to whichever process is free, the slow kinds first; files of the quick kinds
go as a whole, and so do tests that share something dear (`xdist_group`). What is marked `serial` runs last, alone, in
the one process that is left by then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

SERIAL = "serial"
# Their tests take milliseconds: to hand them out one by one would cost more than they do.
QUICK = frozenset({"architecture", "properties", "seam", "unit"})

# How pytest-xdist notes the group of a test in its name; inside of brackets it is the test's own.
_GROUP = re.compile(r"@([^@\]]+)$")
_PROCESSES_PER_CORE = 2
_MOST_PROCESSES = 8


class SerialLast(LoadGroupScheduling):
    """Hands out the group of serial tests once every other process has ended."""

    def remove_node(self, node: Any) -> str | None:
        crashed = super().remove_node(node)
        for left in self.nodes:
            self._reschedule(left)
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        if group := _GROUP.search(nodeid):
            return group[1]
        path = nodeid.split("::", 1)[0]
        return path if QUICK & set(Path(path).parts) else nodeid

    def _assign_work_unit(self, node: Any) -> None:
        if not self._is_serial_next() or self.nodes == [node]:
            super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        others = [one for one in self.nodes if one is not node]
        if not (self._is_serial_next() and others):
            super()._reschedule(node)
        elif not all(one.shutting_down for one in others):
            # Ends when it has run what it has. The last one that gets here stays, and is asked again as others end.
            node.shutdown()

    def _is_serial_next(self) -> bool:
        return next(iter(self.workqueue), None) == SERIAL


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SerialLast | None:
    """Take our scheduler where tests are handed out by group."""
    if config.getoption("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # the order is made below, and the same in each process
    return SerialLast(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Choose the number of processes: none besides this one for a few files, which would wait for them in vain."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    if all(Path(one.split("::", 1)[0]).is_file() for one in config.args):
        return 0
    return min(_PROCESSES_PER_CORE * len(os.sched_getaffinity(0)), _MOST_PROCESSES)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Put first what takes longest, and what is serial last; keep the random order otherwise."""
    if not hasattr(config, "workerinput"):
        yield
        return
    for item in items:
        if item.get_closest_marker(SERIAL):
            item.add_marker(pytest.mark.xdist_group(SERIAL))
    yield
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker(SERIAL):
        return 3
    if QUICK & set(item.path.parts):
        return 2
    return 0 if item.get_closest_marker("xdist_group") else 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a test by the name that runs it again."""
    # In the process that ran it, pytest-xdist still looks for the longer name.
    if hasattr(report, "node"):
        report.nodeid = _GROUP.sub("", report.nodeid)
