"""A private Prometheus server, and promtool beside it."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from inference_tasks.observe.exporter import catalogue
from tests.support.processes import LoggedProcess, program
from tests.support.servers import LOOPBACK, MissingServerError, Node, free_ports

__all__ = ["PrometheusNode", "promtool", "scraped"]


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; `text` is its standard input."""
    found = program("promtool")
    if found is None:
        raise MissingServerError("prometheus")
    argv = [found, *map(str, arguments)]
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)


class PrometheusNode(Node):
    """One server that asks these targets each second, {job: host:port}, and keeps these rules."""

    READY = ("Server is ready to receive web requests",)
    START_TIMEOUT_S = 60.0

    def __init__(self, targets: Mapping[str, str], rules: Path) -> None:
        server = program("prometheus")
        if server is None:
            raise MissingServerError("prometheus")
        super().__init__("prometheus")
        (self.port,) = free_ports(1)
        jobs = [{"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()]
        config = self.directory / "prometheus.yml"
        every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        # JSON is YAML too.
        config.write_text(json.dumps({"global": every, "rule_files": [str(rules)], "scrape_configs": jobs}))
        self.process = LoggedProcess(
            [
                server,
                f"--config.file={config}",
                f"--storage.tsdb.path={self.directory / 'data'}",
                f"--web.listen-address={LOOPBACK}:{self.port}",
            ],
            log=self.directory / "output",
            directory=self.directory,
        )

    def url(self) -> str:
        """Address of the server."""
        return f"http://{LOOPBACK}:{self.port}"

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return what an expression is now: {sorted labels: number}, the name left out; raises if it is none."""
        url = f"{self.url()}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return {
            tuple(sorted((key, value) for key, value in one["metric"].items() if key != "__name__")): float(
                one["value"][1]
            )
            for one in found["data"]["result"]
        }

    def rules(self) -> list[dict[str, str]]:
        """Return its rules with how their last evaluation went."""
        with urllib.request.urlopen(f"{self.url()}/api/v1/rules", timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


def scraped(url: str) -> dict[tuple[str, ...], float]:
    """{(metric, values of its labels, in the order of the catalogue): number}."""
    order = {metric.name: metric.labels for metric in catalogue()}
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(sample.labels[name] for name in order.get(sample.name, sorted(sample.labels)))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
