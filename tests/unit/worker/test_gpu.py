"""Which GPUs are found and chosen, with a driver that exists in memory only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from inference_tasks.worker.gpu import Gpu, GpuChoiceError, Gpus, choose, discover, environment_for

FIRST = "GPU-1b2c3d4e-0000-0000-0000-000000000000"
SECOND = "GPU-5f6a7b8c-0000-0000-0000-000000000000"


class DriverError(Exception):
    """What NVML raises."""


class Driver:
    """As much of the module pynvml as is used."""

    NVMLError = DriverError

    def __init__(self, *uuids: str, is_there: bool = True, in_bytes: bool = False) -> None:
        self._uuids = uuids
        self._is_there = is_there
        self._in_bytes = in_bytes
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._is_there:
            raise DriverError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: object, /) -> str | bytes:  # noqa: N802
        assert isinstance(handle, int)
        return self._uuids[handle].encode() if self._in_bytes else self._uuids[handle]

    def nvmlDeviceGetName(self, handle: object, /) -> str | bytes:  # noqa: N802
        return b"Tesla T4" if self._in_bytes else "Tesla T4"


@pytest.fixture
def nothing(tmp_path: Path) -> Path:
    return tmp_path


def tokens(gpus: Gpus) -> list[str]:
    return [gpu.token for gpu in gpus]


def test_the_driver_tells_the_gpus_and_is_let_go_of() -> None:
    driver = Driver(FIRST, SECOND)
    gpus = discover({}, driver)
    assert gpus == Gpus((Gpu("0", FIRST, "Tesla T4"), Gpu("1", SECOND, "Tesla T4")), "driver")
    assert driver.open == 0


def test_an_old_driver_that_answers_in_bytes_is_understood() -> None:
    assert discover({}, Driver(FIRST, in_bytes=True)).found == (Gpu("0", FIRST, "Tesla T4"),)


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        ("", []),
        ("-1", []),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("0,7,1", ["0"]),
        (SECOND, ["1"]),
        (SECOND[:12], ["1"]),
        ("MIG-aaaa", ["MIG-aaaa"]),
    ],
)
def test_what_cuda_hides_is_left_out_as_cuda_would(visible: str, left: list[str]) -> None:
    assert tokens(discover({"CUDA_VISIBLE_DEVICES": visible}, Driver(FIRST, SECOND))) == left


@pytest.mark.parametrize(
    ("environ", "left", "source"),
    [({"CUDA_VISIBLE_DEVICES": "2,3"}, ["2", "3"], "CUDA_VISIBLE_DEVICES"), ({}, [], "none")],
)
def test_without_a_driver_the_variable_is_believed(
    environ: Mapping[str, str], left: list[str], source: str, nothing: Path
) -> None:
    gpus = discover(environ, Driver(is_there=False), nothing)
    assert (tokens(gpus), gpus.source) == (left, source)


def test_without_a_driver_or_the_variable_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia0-caps"):
        (tmp_path / name).touch()
    gpus = discover({}, Driver(is_there=False), tmp_path)
    assert (tokens(gpus), gpus.source) == (["0", "1", "10"], "device files")


TWO = Gpus((Gpu("0", FIRST, "Tesla T4"), Gpu("1", SECOND, "Tesla T4")), "driver")


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("all", ["0", "1"]),
        ("none", []),
        ("1", ["1"]),
        ("1, 0", ["1", "0"]),
        ("0,0", ["0"]),
        (SECOND, ["1"]),
        (SECOND[:10], ["1"]),
    ],
)
def test_gpus_are_chosen_by_index_or_uuid(asked: str, chosen: list[str]) -> None:
    assert [gpu.token for gpu in choose(asked, TWO)] == chosen


def test_a_gpu_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(GpuChoiceError, match=r"no GPU '2'.*0 \(Tesla T4\), 1 \(Tesla T4\)") as caught:
        choose("0,2", TWO)
    assert (caught.value.asked, caught.value.known) == ("2", ["0", "1"])


@pytest.mark.parametrize("asked", ["all", "0", "none"])
def test_without_a_gpu_every_choice_is_the_cpu(asked: str) -> None:
    assert choose(asked, Gpus((), "none")) == ()


def test_a_process_sees_its_gpu_only_and_on_the_cpu_none() -> None:
    assert environment_for(Gpu("1"))["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment_for(Gpu("1"))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment_for(None) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(("token", "label"), [("0", "gpu0"), (FIRST, "gpu-1b2c3d4e"), ("MIG-ab/c-1", "mig-abc1")])
def test_the_label_is_fit_for_a_node_name(token: str, label: str) -> None:
    assert Gpu(token).label == label
