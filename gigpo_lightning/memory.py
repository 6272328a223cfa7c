"""How many bytes torch code holds: counted tensor by tensor, with real tensors or with ones that have no values.

Knows tensors and the layout of bitsandbytes' rounded weights; nothing about policies or training.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if sys.platform != "win32":
    import resource

KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNITS = {"": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}
# Weights that share a scale in NF4, and scales that share one of their own (bitsandbytes' defaults).
_NF4_BLOCK, _SCALE_BLOCK = 64, 256
# Of each layer in NF4: the code of 16 values, the code of 256 values for the scales, their mean; all float32.
_NF4_TABLES = 4 * (16 + 256 + 1)

# Limit and use of a container's memory, in version 2 and version 1 of Linux's control groups.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is on, until they are released.

    A kernel's own workspace and what the allocator loses are not counted.

    Attributes:
        now: Bytes held at present.
        peak: The most that was held at once.

    Args:
        known: Tensors that are there already; they and their views are not counted.
        stand_ins: What to call in place of an operator. Tensors without values need it where a shape or a branch
            depends on values.
    """

    def __init__(self, known: Iterable[Tensor] = (), stand_ins: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._stand_ins = stand_ins or {}
        self._known = list(known)  # kept, so that no other storage takes their place in memory
        self._held = {tensor.untyped_storage()._cdata for tensor in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator and count what is new in its result."""
        out = self._stand_ins.get(func, func)(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return
        self._held.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.now -= size


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind the tensors; what several share counts once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def nf4_bytes(weights: int) -> int:
    """Bytes of a layer's weights in NF4 with doubly rounded scales.

    4 bits a weight, 1 byte for the scale of 64 weights, 4 bytes for the scale of 256 scales, and the layer's tables.
    Source: bitsandbytes.functional.quantize_4bit with compress_statistics (QLoRA, arXiv 2305.14314, section 3).
    """
    scales = ceil(weights / _NF4_BLOCK)
    return ceil(weights / 2) + scales + 4 * ceil(scales / _SCALE_BLOCK) + _NF4_TABLES


def int8_bytes(outputs: int, inputs: int) -> int:
    """Bytes of a layer's weights in 8 bit: one each, and a float32 scale per output (LLM.int8(), arXiv 2208.07339)."""
    return outputs * inputs + 4 * outputs


def parse_size(text: str) -> int:
    """The bytes that a text such as `24GiB`, `512 MiB` or `80GB` means.

    Raises:
        ValueError: It is not a positive number with a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    factor = _UNITS.get(match[2].lower()) if match else None
    size = round(float(match[1]) * factor) if match and factor else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 24GiB, 80GB or 512MiB")
    return size


def format_size(size: float) -> str:
    """Bytes for the eye: `3.61 GiB`, `58.0 MiB`, `-1.20 GiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if abs(size) >= 0.995 * unit:
            value = size / unit
            return f"{value:.{2 if abs(value) < 99.5 and unit == GIB else 1 if abs(value) < 99.5 else 0}f} {name}"
    return f"{size / KIB:.0f} KiB"


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now; on the CPU within the limit of this process's group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [_meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, used in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # not there, or `max`
            free.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(min(free), 0)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of a GPU's tensors, or of main memory; 0 where it is not known.

    getrusage would do where /proc is missing only: it counts what the parent process held when it started this one.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    held = _meminfo("VmHWM", "/proc/self/status")
    if held is None and sys.platform != "win32":
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KIB)
    return held or 0


def whole_memory(device: torch.device) -> int:
    """All memory of a device, used or not; on the CPU the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(name: str, file: str = "/proc/meminfo") -> int | None:
    with suppress(OSError):
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * KIB
    return None
