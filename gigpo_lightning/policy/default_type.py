"""The type of tensors that are made without naming one. `bf16-true` changes it for whatever Lightning calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Policies and engines are made in types of their own, which the trainer's precision must not decide."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
