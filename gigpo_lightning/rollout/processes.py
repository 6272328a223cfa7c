"""What the processes of a run tell each other between collections."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

Own = TypeVar("Own")


def gathered(own: Own, world: int) -> list[Own]:
    """The values of all `world` processes, in order of rank; all must ask."""
    if world == 1:
        return [own]
    every: list[Any] = [None] * world
    torch.distributed.all_gather_object(every, own)
    return every
