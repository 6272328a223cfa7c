"""Weights, gradients and optimiser state spread over processes: FSDP2 under Lightning's ModelParallelStrategy.

A policy is called by methods of its own instead of `forward`, and while playing as often as each process likes: this
file says which methods gather weights, and gathers all of them for as long as a process plays. A checkpoint is one
file, as of any other strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gigpo_lightning.policy.base import BasePolicy

# Everything that runs the model or reads its output layer goes through these.
_METHODS = ("chosen_logprobs", "values", "logprobs_and_values", "feed")
NOT_SPREAD = (
    "policy.quantization: quantized weights ({weights}) cannot be spread over processes; choose the strategy ddp, or "
    "quantization none"
)


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
        raise ValueError(NOT_SPREAD.format(weights=whole))
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    if policy.critic is not None:  # in float32, whatever the others are: what is gathered together shares a type
        fully_shard(policy.critic, mesh=mesh)
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


def take_over_from_first(policy: BasePolicy) -> None:
    """Give every process the weights of the first, where each has trained alone: roundings may differ."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for parameter in policy.parameters():
            if not isinstance(parameter, DTensor):  # spread weights have been trained together
                torch.distributed.broadcast(parameter.data, src=0)


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a spread tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A spread tensor put together, on every process; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class FullyShardedStrategy(ModelParallelStrategy):
    """Every process holds a part of all weights, gradients and optimiser states (FSDP2), over all processes."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Settle the number of processes, which is not known before."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    # Lightning's own would read a checkpoint after `on_fit_start`, where callbacks go by what is restored.
    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The whole content, on every process."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this process's part of the weights."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        state = checkpoint["state_dict"]
        self.lightning_module.load_state_dict({n: _spread(t, own.get(n)) for n, t in state.items()}, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's part of the optimiser's state."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                number: {name: _spread(value, parameters[number]) for name, value in entries.items()}
                for number, entries in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights on process 0, nothing on the others."""
        assert self.lightning_module is not None
        return self._collected(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of the optimiser on process 0, nothing on the others."""
        state = optimizer.state_dict()
        return {**state, "state": {number: self._collected(entries) for number, entries in state["state"].items()}}

    def _collected(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Spread tensors put together one by one, as every process must, and kept by process 0 alone."""
        kept = {}
        for name, value in values.items():
            together = whole(value).cpu() if isinstance(value, Tensor) else value
            if self.is_global_zero:
                kept[name] = together
        return kept


StrategyRegistry.register("fsdp2", FullyShardedStrategy, "weights spread over all processes, by FSDP2")


def _spread(value: Any, like: Any) -> Any:
    """A whole tensor spread as `like` is; scalars, and what `like` does not spread, stay as they are."""
    if isinstance(value, Tensor) and value.shape and isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value
