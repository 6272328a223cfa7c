"""Weights spread over processes by FSDP2, under Lightning's ModelParallelStrategy.

A policy is called by methods of its own instead of `forward`, and while playing as often as each process likes: this
file says which methods gather weights, and gathers all of them for as long as a process plays. Knows nothing of the
trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gigpo_lightning.policy.base import BasePolicy

# Everything that runs the model or reads its output layer goes through these.
_METHODS = ("chosen_logprobs", "feed")


def shard(policy: BasePolicy, mesh: DeviceMesh) -> None:
    """Spread the weights over the processes of a one-dimensional mesh; a second call changes nothing.

    A decoder layer is gathered while it works, the embeddings and the output layer during a whole call.

    Raises:
        ValueError: Some weights are whole numbers, as quantized ones are.
    """
    if isinstance(policy, FSDPModule):
        return
    whole = next((name for name, p in policy.named_parameters() if not p.is_floating_point()), None)
    if whole is not None:
        raise ValueError(
            f"policy.quantization: quantized weights ({whole}) cannot be spread over processes; choose the strategy "
            "ddp, or quantization none"
        )
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    for method in _METHODS:
        register_fsdp_forward_method(policy, method)


@contextmanager
def gathered(policy: BasePolicy) -> Iterator[None]:
    """All weights on every process: each may call the policy as often as it likes. All processes must enter."""
    parts = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    with torch.inference_mode(False):  # weights that are gathered here are trained later
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not policy, recurse=False)
            part.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a spread tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A spread tensor put together, on every process; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
