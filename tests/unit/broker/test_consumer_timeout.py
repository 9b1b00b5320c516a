"""What is known of a node's consumer time-out, and which tasks are too long for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_tasks.broker.consumer_timeout import LongTask, NodeTimeout, configuration_line, long_tasks, node_timeout


class Nodes:
    """A management API that names files of configuration."""

    def __init__(self, *files_by_node: list[str]) -> None:
        self._files = files_by_node

    def nodes(self) -> list[dict[str, object]]:
        return [{"name": f"rabbit@{index}", "config_files": files} for index, files in enumerate(self._files)]


@pytest.mark.parametrize(
    ("name", "text", "timeout_s"),
    [
        ("rabbitmq.conf", "listeners.tcp.default = 5672\n", 1800.0),
        ("rabbitmq.conf", "# consumer_timeout = 1\nconsumer_timeout = 3600000\n", 3600.0),
        ("rabbitmq.conf", "consumer_timeout = undefined\n", None),
        ("advanced.config", "[{rabbit, [{consumer_timeout, 7200000}]}].\n", 7200.0),
        ("advanced.config", "[{rabbit, [\n%% {consumer_timeout, 1}\n]}].\n", 1800.0),
        ("advanced.config", "[{rabbit, [{consumer_timeout, undefined}]}].\n", None),
    ],
)
def test_it_is_read_from_the_nodes_files(tmp_path: Path, name: str, text: str, timeout_s: float | None) -> None:
    file = tmp_path / name
    file.write_text(text)
    found = node_timeout(Nodes([str(file)]))
    assert found is not None
    assert found.timeout_s == timeout_s


def test_it_is_unknown_where_a_file_cannot_be_read(tmp_path: Path) -> None:
    assert node_timeout(Nodes([str(tmp_path / "elsewhere.conf")])) is None
    assert node_timeout(Nodes([])) is None
    assert node_timeout(Nodes()) is None


def test_the_shortest_of_all_nodes_counts(tmp_path: Path) -> None:
    long, off = tmp_path / "long.conf", tmp_path / "off.conf"
    long.write_text("consumer_timeout = 3600000\n")
    off.write_text("consumer_timeout = false\n")
    assert node_timeout(Nodes([str(off)], [str(long)])) == NodeTimeout(3600.0, str(long))


def test_tasks_need_a_margin_to_the_time_out() -> None:
    limits = {"short": 60.0, "near": 1790.0, "long": 3600.0}
    assert long_tasks(limits, 1800.0) == [LongTask("long", 3600.0), LongTask("near", 1790.0)]
    assert long_tasks(limits, None) == []


def test_the_line_to_change_fits_the_longest_task() -> None:
    assert configuration_line([LongTask("a", 10.0), LongTask("b", 3600.0)]) == "consumer_timeout = 3900000"
