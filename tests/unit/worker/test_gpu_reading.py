"""What is read of a GPU, of several, of none, and of a driver that fails."""

from __future__ import annotations

import sys

import pytest

from inference_tasks.worker.gpu_reading import EVERY_S, RETRY_S, GpuReader, GpuReading
from tests.support.fake_gpu import MIG, UUID, Amounts, Driver

FIRST = Amounts(used=4, total=16, gpu=50)
SECOND = Amounts(used=1, total=8, gpu=100)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("name", ["0", UUID, UUID[:12]])
def test_a_gpu_is_found_by_each_of_its_names(name: str) -> None:
    assert GpuReader(name, nvml=Driver(FIRST, SECOND)).read() == GpuReading(4, 16, 0.5)


def test_a_uuid_in_bytes_is_a_uuid() -> None:
    assert GpuReader("GPU-5f6a7b8c", nvml=Driver(FIRST, SECOND)).read() == GpuReading(1, 8, 1.0)


def test_several_count_as_one() -> None:
    assert GpuReader("0,1", nvml=Driver(FIRST, SECOND)).read() == GpuReading(5, 24, 0.75)


def test_a_slice_has_memory_and_no_known_use() -> None:
    assert GpuReader(MIG, nvml=Driver(FIRST, is_mig=True)).read() == GpuReading(4, 16, None)


@pytest.mark.parametrize("name", [None, "", "-1"])
def test_a_worker_without_a_gpu_asks_nobody(name: str | None) -> None:
    driver = Driver(FIRST)
    assert GpuReader(name, nvml=driver).read() is None
    assert driver.inits == 0


@pytest.mark.parametrize("name", ["7", "GPU-ffffffff", "nonsense"])
def test_a_name_that_is_unknown_reads_as_nothing(name: str) -> None:
    assert GpuReader(name, nvml=Driver(FIRST)).read() is None


def test_without_the_package_there_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader("0").read() is None


def test_the_driver_is_asked_no_more_often_than_every_two_seconds() -> None:
    clock, driver = Clock(), Driver(FIRST)
    reader = GpuReader("0", nvml=driver, clock=clock)
    reader.read()
    driver.amounts[0] = SECOND
    clock.now_s = EVERY_S / 2
    assert reader.read() == GpuReading(4, 16, 0.5)
    assert driver.looks == 1
    clock.now_s = EVERY_S
    assert reader.read() == GpuReading(1, 8, 1.0)
    assert (driver.looks, driver.inits) == (2, 1)


def test_a_driver_that_fails_is_asked_again_after_a_minute() -> None:
    clock, driver = Clock(), Driver(FIRST)
    reader = GpuReader("0", nvml=driver, clock=clock)
    assert reader.read() is not None
    clock.now_s, driver.is_there = EVERY_S, False
    assert reader.read() is None
    driver.is_there = True
    clock.now_s = EVERY_S + RETRY_S / 2
    assert reader.read() is None
    clock.now_s = EVERY_S + RETRY_S
    assert reader.read() == GpuReading(4, 16, 0.5)
    assert driver.inits == 2


def test_the_real_package_has_what_is_used_and_where_there_is_no_driver_nothing_is_read() -> None:
    pynvml = pytest.importorskip("pynvml")
    used = [name for name in dir(Driver) if name.startswith("nvml")]
    assert len(used) == 9
    assert all(callable(getattr(pynvml, name)) for name in used)
    assert issubclass(pynvml.NVMLError, Exception)
    reading = GpuReader("0").read()
    assert reading is None or reading.memory_total_bytes > 0
