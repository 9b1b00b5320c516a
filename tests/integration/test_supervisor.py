"""Several processes kept alive, restarted with growing pauses, and drained together; real processes and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from inference_tasks.worker.supervisor import Backoff
from tests.support.processes import LoggedProcess

# A process that drains in its own time: SIGTERM is answered after as long as its second argument says.
CHILD = """
import os, signal, subprocess, sys, time
kind, drain_s = sys.argv[1], float(sys.argv[2])
def say(*words):
    if kind != "silent":
        print(*words, flush=True)
def drain(*_):
    say("draining")
    time.sleep(drain_s)
    say("drained")
    os._exit(0)
signal.signal(signal.SIGTERM, drain)
# A shell starts what runs in its background with this ignored.
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if kind == "devoted":
    from inference_tasks.worker.supervisor import die_with
    die_with(os.getppid())
if kind == "dies":
    print("dies now", flush=True)
    sys.exit(3)
if kind == "refuses":
    sys.exit(7)
if kind == "family":
    below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("below", below.pid, "end", flush=True)
if kind == "silent":
    os.close(1); os.close(2)
say("up", os.getpid(), "end")
while True:
    time.sleep(60)
"""

DRIVER = """
import json, sys
from functools import partial
from inference_tasks.worker.supervisor import Backoff, ChildPlan, Supervisor
options = json.loads(sys.argv[1])
plans = [ChildPlan(name, (sys.executable, "child.py", *arguments)) for name, arguments in options["plans"].items()]
sys.exit(Supervisor(plans, kill_after_s=options.get("kill_after_s"), final_codes=frozenset({7}),
                    backoff=partial(Backoff, first_s=0.05, most_s=5, healthy_s=30)).run())
"""

Start = Callable[..., LoggedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a supervisor over children: `start(kill_after_s=1, one=("lives", "0"))`."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "driver.py").write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    running: list[LoggedProcess] = []

    def begin(*, kill_after_s: float | None = None, **plans: tuple[str, str]) -> LoggedProcess:
        options = json.dumps({"plans": plans, "kill_after_s": kill_after_s})
        process = LoggedProcess(
            [sys.executable, "driver.py", options], log=tmp_path / "log", env=env, directory=tmp_path
        )
        process.start()
        running.append(process)
        return process

    yield begin
    for process in running:
        below = process.children()
        process.close()
        for one in below:
            if one.is_running():
                one.kill()


def pids(log: str, word: str = "up") -> list[int]:
    return [int(line.split(f"{word} ")[1].split(" end")[0]) for line in log.splitlines() if f"{word} " in line]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_output_carries_the_name_of_its_process(start: Start) -> None:
    supervisor = start(one=("lives", "0"), two=("lives", "0"))
    log = supervisor.wait_for("] up ", count=2)
    assert "[one] up" in log
    assert "[two] up" in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_signal_drains_all_and_ends_with_0(start: Start, number: signal.Signals) -> None:
    supervisor = start(one=("lives", "0.3"), two=("lives", "0"))
    supervisor.wait_for("] up ", count=2)
    supervisor.send(number)
    assert supervisor.wait() == 0
    assert "[one] drained" in supervisor.log
    assert "[two] drained" in supervisor.log
    assert all(gone(pid) for pid in pids(supervisor.log))


def test_a_process_that_ends_is_started_again_with_growing_pauses(start: Start) -> None:
    supervisor = start(bad=("dies", "0"), good=("lives", "0"))
    log = supervisor.wait_for("starts again in 0.8 s")
    assert re.findall("starts again in (.*) s", log) == ["0.05", "0.1", "0.2", "0.4", "0.8"]
    assert log.count("good started") == 1
    assert supervisor.terminate() == 0


def test_a_killed_process_is_started_again_and_what_it_left_behind_is_ended(start: Start) -> None:
    supervisor = start(one=("family", "0"))
    log = supervisor.wait_for("] up ")
    os.kill(pids(log)[0], signal.SIGKILL)
    log = supervisor.wait_for("] up ", count=2)
    assert "signal SIGKILL" in log
    assert gone(pids(log, "below")[0])
    assert not gone(pids(log, "below")[1])
    assert supervisor.terminate() == 0
    assert gone(pids(log, "below")[1])


def test_a_wrong_setting_ends_all_at_once(start: Start) -> None:
    supervisor = start(good=("lives", "0"), bad=("refuses", "0"))
    assert supervisor.wait() == 7
    assert "a restart would end the same way" in supervisor.log


def test_the_drain_waits_as_long_as_tasks_run_unless_told_otherwise(start: Start) -> None:
    supervisor = start(kill_after_s=0.3, slow=("lives", "600"), quick=("lives", "0"))
    supervisor.wait_for("] up ", count=2)
    assert supervisor.terminate() == 128 + signal.SIGKILL
    assert "slow is killed" in supervisor.log
    assert "[quick] drained" in supervisor.log


def test_a_second_signal_is_cold(start: Start) -> None:
    supervisor = start(slow=("lives", "600"))
    supervisor.wait_for("] up ")
    supervisor.send(signal.SIGTERM)
    supervisor.wait_for("draining", count=2)
    supervisor.send(signal.SIGTERM)
    # SIGQUIT is not caught by this child.
    assert supervisor.wait() == 128 + signal.SIGQUIT
    assert "cold stop" in supervisor.log


def test_a_process_that_closes_its_output_costs_nothing(start: Start) -> None:
    supervisor = start(quiet=("silent", "0"), good=("lives", "0"))
    supervisor.wait_for("] up ")
    before_s = sum(psutil.Process(supervisor.pid).cpu_times()[:2])
    # A loop that spins would use the whole second.
    with pytest.raises(TimeoutError):
        supervisor.wait(1.0)
    assert sum(psutil.Process(supervisor.pid).cpu_times()[:2]) - before_s < 0.5
    assert supervisor.terminate() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_worker_drains_when_its_supervisor_is_killed(start: Start) -> None:
    supervisor = start(one=("devoted", "0"))
    (pid,) = pids(supervisor.wait_for("] up "))
    child = psutil.Process(pid)
    supervisor.kill()
    psutil.wait_procs([child], timeout=60)
    assert gone(pid)


def test_the_pause_is_short_again_after_a_healthy_while() -> None:
    backoff = Backoff(first_s=1, most_s=5, healthy_s=60)
    assert [backoff.pause_s(1) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert [backoff.pause_s(61), backoff.pause_s(1)] == [1, 2]
