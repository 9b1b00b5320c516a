"""Which GPUs a worker may use, and which one it takes."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from inference_tasks.errors import DeploymentError

__all__ = [
    "Gpu",
    "GpuChoiceError",
    "Gpus",
    "Nvml",
    "choose",
    "discover",
    "environment_for",
    "has_initialised_cuda",
    "tokens",
]

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
DEVICE_FILES = Path("/dev")

Source = Literal["driver", "CUDA_VISIBLE_DEVICES", "device files", "none"]


class Nvml(Protocol):
    """The functions that are used of the module ``pynvml`` (package nvidia-ml-py)."""

    @property
    def NVMLError(self) -> type[Exception]: ...  # noqa: N802 -- NVIDIA's name, as are the next

    def nvmlInit(self) -> object: ...  # noqa: N802

    def nvmlShutdown(self) -> object: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object: ...  # noqa: N802

    def nvmlDeviceGetUUID(self, handle: object, /) -> str | bytes: ...  # noqa: N802

    def nvmlDeviceGetName(self, handle: object, /) -> str | bytes: ...  # noqa: N802


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG slice of it.

    Attributes:
        token: how ``CUDA_VISIBLE_DEVICES`` names it: an index or a UUID.
        uuid: of the device, empty where no driver told.
        model: as the driver calls it, likewise.
    """

    token: str
    uuid: str = ""
    model: str = ""

    @property
    def label(self) -> str:
        """A short name, fit for a part of a node name: ``gpu0``, ``gpu-1b2c3d4e``, ``mig-1b2c3d4e``."""
        if self.token.isdecimal():
            return f"gpu{self.token}"
        kind, _, rest = self.token.partition("-")
        return f"{kind.lower()}-{re.sub('[^0-9a-zA-Z]', '', rest)[:8].lower()}"

    def is_named(self, text: str) -> bool:
        """Tell whether the text means this GPU: its index, or its UUID or the beginning of it."""
        return text == self.token or (len(text) > 4 and any(one.startswith(text) for one in (self.token, self.uuid)))


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that this process may use, in order, and how they became known."""

    found: tuple[Gpu, ...]
    source: Source

    def __iter__(self) -> Iterator[Gpu]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


class GpuChoiceError(DeploymentError, ValueError):
    """A GPU was asked for that does not exist or may not be used here.

    Attributes:
        asked: what was asked for.
        known: the tokens of those that exist.
    """

    def __init__(self, asked: str, known: Sequence[Gpu], *, restricted: bool) -> None:
        names = ", ".join(f"{gpu.token} ({gpu.model})" if gpu.model else gpu.token for gpu in known)
        where = f" that {VISIBLE} leaves" if restricted else ""
        super().__init__(f"There is no GPU {asked!r}. The GPUs{where}: {names}. Choose with --gpu, or say --gpu all.")
        self.asked = asked
        self.known = [gpu.token for gpu in known]


def discover(environ: Mapping[str, str], nvml: Nvml | None = None, device_files: Path = DEVICE_FILES) -> Gpus:
    """Find the GPUs, without touching CUDA.

    The driver is asked through nvidia-ml-py where that is installed. Without it, ``CUDA_VISIBLE_DEVICES`` is believed,
    else the device files are counted. What ``CUDA_VISIBLE_DEVICES`` hides is left out, as CUDA itself would.

    Args:
        environ: of the process.
        nvml: the module ``pynvml``; None imports it if it is installed.
        device_files: where ``nvidia0`` and so on are.
    """
    nvml = nvml if nvml is not None else _installed_nvml()
    by_driver = _from_driver(nvml) if nvml is not None else None
    visible = environ.get(VISIBLE)
    if by_driver is None:
        if visible is not None:
            return Gpus(tuple(Gpu(token) for token in tokens(visible)), "CUDA_VISIBLE_DEVICES")
        names = [one.name.removeprefix("nvidia") for one in device_files.glob("nvidia[0-9]*")]
        indices = sorted(int(name) for name in names if name.isdecimal())
        files = tuple(Gpu(str(index)) for index in indices)
        return Gpus(files, "device files" if files else "none")
    if visible is None:
        return Gpus(by_driver, "driver")
    allowed: list[Gpu] = []
    for token in tokens(visible):
        known = Gpu(token) if token.startswith("MIG-") else next((g for g in by_driver if g.is_named(token)), None)
        if known is None:
            # CUDA ignores everything from the first token on that it does not know.
            break
        allowed.append(known)
    return Gpus(tuple(allowed), "driver")


def choose(asked: str, gpus: Gpus, *, restricted: bool = False) -> tuple[Gpu, ...]:
    """Return the GPUs that ``--gpu`` means; none of them is the CPU.

    Args:
        asked: ``all``, ``none``, or a list of indices and UUIDs (``0,1``).
        gpus: those that exist. Where there is none, every choice means the CPU.
        restricted: whether ``CUDA_VISIBLE_DEVICES`` hides others; for the message only.

    Raises:
        GpuChoiceError: one does not exist; the message names those that do.
    """
    wanted = asked.strip().lower()
    if wanted == "none" or not gpus.found:
        return ()
    if wanted == "all":
        return gpus.found
    chosen: dict[Gpu, None] = {}
    for token in tokens(asked):
        gpu = next((one for one in gpus.found if one.is_named(token)), None)
        if gpu is None:
            raise GpuChoiceError(token, gpus.found, restricted=restricted)
        chosen[gpu] = None
    if not chosen:
        raise GpuChoiceError(asked, gpus.found, restricted=restricted)
    return tuple(chosen)


def environment_for(gpu: Gpu | None) -> dict[str, str]:
    """Return the variables that leave a process this GPU alone, or none at all."""
    if gpu is None:
        return {VISIBLE: ""}
    # CUDA's own order is by speed; the indices of the driver, which people know, are by bus.
    return {VISIBLE: gpu.token, ORDER: os.environ.get(ORDER, "PCI_BUS_ID")}


def has_initialised_cuda() -> bool:
    """Tell whether this process has initialised CUDA already, as far as PyTorch knows; imports nothing."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialised = getattr(cuda, "is_initialized", None)
    return bool(is_initialised and is_initialised())


def tokens(text: str) -> list[str]:
    """Return the single names of a list as ``CUDA_VISIBLE_DEVICES`` has it."""
    named = [token.strip() for token in text.split(",")]
    # To CUDA, -1 hides itself and all that follow.
    return [token for token in (named[: named.index("-1")] if "-1" in named else named) if token]


def _installed_nvml() -> Nvml | None:
    try:
        return cast(Nvml, importlib.import_module("pynvml"))
    except ImportError:
        return None


def _from_driver(nvml: Nvml) -> tuple[Gpu, ...] | None:
    """Ask the driver; None if there is no driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(str(index), _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)))
            for index, handle in enumerate(handles)
        )
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    # Older versions of nvidia-ml-py answer in bytes.
    return value.decode() if isinstance(value, bytes) else value
