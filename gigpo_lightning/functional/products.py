"""Products of matrices in a short type, added up in float32.

A product of two bfloat16 or float16 numbers is exact in float32, so such a sum needs no float32 copy of its inputs.
"""

from __future__ import annotations

import functools

import torch

SHORT = (torch.bfloat16, torch.float16)


@functools.cache
def sums_in_float32(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether `torch.mm(…, out_dtype=torch.float32)` works for this type here; not every version of torch offers it."""
    if device.type != "cuda" or dtype not in SHORT:
        return False
    a, out = (torch.ones(16, 16, dtype=kind, device=device) for kind in (dtype, torch.float32))
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=out)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True
