"""Tensors without values in the place of real ones: what a module, an optimiser and a rounded layer hold.

Knows torch's fake tensors and the layers of bitsandbytes; nothing about policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_iter

from gigpo_lightning.memory import storage_bytes

_ATEN = torch.ops.aten


class _Rounded(torch.autograd.Function):
    """Holds what bitsandbytes' layers hold: in the backward pass the weights unrounded; in 8 bit the inputs, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eight_bit: bool) -> Tensor:
        """The layer's output."""
        ctx.input, ctx.weight = (x if eight_bit else None), weight
        if eight_bit:
            x.to(torch.float16).to(torch.int8)  # rounded before they are multiplied
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradient of the input."""
        return gradient @ torch.empty_like(ctx.weight, dtype=gradient.dtype), None, None, None


def round_layer(layer: nn.Linear, eight_bit: bool) -> None:
    """Let a frozen layer hold what its rounded form would."""
    layer.forward = partial(_rounded, layer, eight_bit)  # type: ignore[method-assign]


def _rounded(layer: nn.Linear, eight_bit: bool, x: Tensor) -> Tensor:
    return _Rounded.apply(x, layer.weight, layer.bias, eight_bit)


def precision_named(name: str) -> Precision:
    """Lightning's precision, for a CPU: there torch has its tensors without values."""
    if name == "bf16-mixed":
        return MixedPrecision("bf16-mixed", "cpu")
    return HalfPrecision("bf16-true") if name == "bf16-true" else Precision()


def backward(loss: Tensor) -> None:
    """As the module does it: each operation's gradient is of the type that the operation had."""
    with torch.autocast("cpu", enabled=False):
        loss.backward()


def bitsandbytes_state(optimizer: Any) -> int:
    """Bytes of the state of one of bitsandbytes' optimisers, whose step needs values."""
    optimizer.is_paged = False  # pages are allocated by the driver, at once
    optimizer.check_overrides()
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, number, index)
    return storage_bytes(tensors_in(list(optimizer.state.values())))


def replace_tensors(module: nn.Module) -> None:
    """Put tensors of the present fake mode in the place of all others; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                store[name] = made[id(tensor)]  # type: ignore[assignment]


def stand_ins(repeated: Mapping[int, int]) -> dict[Any, Callable[..., Any]]:
    """Answers where shapes or branches depend on values: checks pass, n numbers of repetitions make `repeated[n]`."""
    return {
        _ATEN._local_scalar_dense.default: lambda x: 0.5 if x.is_floating_point() else 1,
        _ATEN.equal.default: lambda one, other: True,
        _ATEN.repeat_interleave.Tensor: lambda repeats, output_size=None: ids(repeated[len(repeats)]),
    }


def choice_stand_ins(listed: int, free: int, allowed: int) -> dict[Any, Callable[..., Any]]:
    """The same for `listed` tokens that were chosen among `allowed` ids, and `free` ones among the whole vocabulary."""

    def where(counted: Any, size: int) -> Callable[..., Any]:
        """Of the numbers of allowed ids, those above 0 or equal to 0."""

        def answer(x: Tensor, value: Any) -> Tensor:
            about_choices = x.dim() == 1 and len(x) == listed + free and x.dtype == torch.int64
            return torch.empty(size, dtype=torch.bool) if about_choices else counted(x, value)

        return answer

    def nonzero(x: Tensor) -> Tensor:
        return ids(listed if len(x) == allowed else len(x), 1)

    return {
        _ATEN.gt.Scalar: where(_ATEN.gt.Scalar, listed),
        _ATEN.eq.Scalar: where(_ATEN.eq.Scalar, free),
        _ATEN.nonzero.default: nonzero,
    }


def ids(*shape: int) -> Tensor:
    """Whole numbers of any value."""
    return torch.empty(shape, dtype=torch.int64)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor)]
