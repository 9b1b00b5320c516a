"""The walls between the packages stand: the same contracts that `make check` reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_importing_the_core_loads_nothing_that_does_io(tmp_path: Path) -> None:
    """Modules that Python itself loads at its start do not count, so the two sets of loaded modules are compared."""
    code = (
        "import sys, fractions, dataclasses, heapq, difflib, enum, collections.abc, typing, math\n"
        "before = set(sys.modules)\n"
        "import inference_routing\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "routing")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    forbidden = {
        "aiormq",
        "amqp",
        "asyncio",
        "celery",
        "http",
        "inference_tasks",
        "kombu",
        "logging",
        "redis",
        "select",
        "selectors",
        "socket",
        "ssl",
        "subprocess",
        "threading",
        "time",
        "urllib",
    }
    assert not forbidden & set(done.stdout.split())
