"""A batch of a million lines, uploaded in one request while it is being made: lines per second, and memory.

No worker runs: what is measured is reading, checking, submitting and noting the lines. The gateway's memory is looked
at after a warm-up of a hundredth, and at its peak.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.harness import APP, Bench, Report
from tests.support.gateway import GatewayProcess
from tests.support.processes import environment

LINES = int(os.environ.get("BENCH_LINES", "1000000"))
QUEUE_TYPE = os.environ.get("BENCH_QUEUE_TYPE", "quorum")
CHUNK = 1000
GROWTH_MIB = 64.0


def made(prefix: str, count: int) -> Iterator[bytes]:
    """Yield the lines of an upload, some at a time."""
    for start in range(0, count, CHUNK):
        numbers = range(start, min(start + CHUNK, count))
        rows = ({"task": "noop", "custom_id": f"{prefix}-{number}"} for number in numbers)
        yield "".join(json.dumps(row) + "\n" for row in rows).encode()


def peak_mib(pid: int) -> float:
    """Return the most memory that a process has had, in MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, "Linux tells it"
    return int(found[1]) / 1024


def main() -> None:
    """Upload, and hold the growth of memory against its bar."""
    report = Report("upload")
    with Bench() as bench:
        env = bench.setting(broker__queue_type=QUEUE_TYPE, tiers__batch__bound=2 * LINES)
        seen = {key: text for key, text in env.items() if key != "BENCH_STARTS"}
        argv = (sys.executable, "-m", "inference_tasks.cli", "gateway", "-A", APP, "--port", "0")
        directory = bench.directory
        headers = {"Content-Type": "application/jsonl"}
        with (
            GatewayProcess(
                argv, log=directory / "gateway.log", env=environment(directory, seen), directory=directory
            ) as gateway,
            gateway.client(headers=headers) as http,
        ):
            http.timeout = 600.0
            warm = http.post("/v1/batches", content=made("warm", max(CHUNK, LINES // 100)))
            assert warm.status_code == 201, warm.text
            before_mib = peak_mib(gateway.pid)
            began = time.perf_counter()
            answer = http.post("/v1/batches", content=made("line", LINES))
            taken_s = time.perf_counter() - began
            after_mib = peak_mib(gateway.pid)
            body = answer.json()
            began = time.perf_counter()
            http.get(body["links"]["self"])
            progress_ms = (time.perf_counter() - began) * 1e3
    report.figures = {
        "lines": LINES,
        "queue_type": QUEUE_TYPE,
        "lines_per_s": round(LINES / taken_s, 1),
        "peak_mib": round(after_mib, 1),
        "progress_ms": round(progress_ms, 2),
    }
    report.bar("lines accepted", body["accepted"], f"== {LINES}", ok=body["accepted"] == LINES)
    growth_mib = after_mib - before_mib
    report.bar("growth of the gateway's memory, MiB", growth_mib, f"<= {GROWTH_MIB:g}", ok=growth_mib <= GROWTH_MIB)
    report.close()


if __name__ == "__main__":
    main()
