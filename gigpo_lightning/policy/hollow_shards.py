"""What one process holds of weights that are spread over several, as `sharding.py` spreads them, without any process.

FSDP2 cuts each parameter along its first dimension. A decoder layer is gathered while it works, and the next one is
fetched beside it; embeddings, output layer and last norm during a whole call. Buffers are whole everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

from gigpo_lightning.memory import storage_bytes
from gigpo_lightning.policy.base import BasePolicy

# Layers that are whole at once: the one at work, and the one that is fetched meanwhile.
_GATHERED_LAYERS = 2


@dataclass(frozen=True)
class Spread:
    """Bytes of one process, the one with the largest part.

    Attributes:
        weights, trained: Its parts of all weights (buffers are whole) and of those that are trained.
        gathered: What is whole during an update: weights at work, and the gradients of those that are trained.
        gathered_reference: The same of a frozen copy.
        whole: All weights, as they are while episodes are played.
    """

    weights: int
    trained: int
    gathered: int
    gathered_reference: int
    whole: int


def spread(policy: BasePolicy, processes: int) -> Spread:
    """What a process holds of the policy."""
    layers = list(policy.model.get_decoder().layers)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    rest = [p for p in policy.parameters() if id(p) not in inside]
    widest = max(layers, key=lambda layer: storage_bytes(layer.parameters()), default=nn.Module())
    weights = storage_bytes(rest) + _GATHERED_LAYERS * storage_bytes(widest.parameters())
    gradients = storage_bytes(_trained(rest)) + _GATHERED_LAYERS * storage_bytes(_trained(widest.parameters()))
    return Spread(
        weights=_parts(policy.parameters(), processes) + storage_bytes(policy.buffers()),
        trained=_parts(_trained(policy.parameters()), processes),
        gathered=weights + gradients,
        gathered_reference=weights,
        whole=storage_bytes(policy.parameters()),
    )


def own_part(parameter: nn.Parameter, processes: int) -> nn.Parameter:
    """The largest part of a parameter that a process may have, with its gradient, both without content."""
    if processes == 1:
        return parameter
    shape = (_rows(parameter, processes), *parameter.shape[1:])
    part = nn.Parameter(torch.empty(shape, dtype=parameter.dtype))
    part.grad = torch.empty_like(part)
    return part


def _parts(parameters: Iterable[Tensor], processes: int) -> int:
    return sum(p.element_size() * p.numel() // len(p) * _rows(p, processes) for p in parameters)


def _rows(parameter: Tensor, processes: int) -> int:
    return ceil(len(parameter) / processes)


def _trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad]
