"""Whether a checkpoint is of the policy that this run has: told by the policy's class and the options that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import FSDPModule

from gigpo_lightning.policy.base import BasePolicy

# The entry for the class, beside the options.
_CLASS = "policy"
# Differences that are spelled out.
_SHOWN = 3


def identity_of(policy: BasePolicy) -> dict[str, Any]:
    """What a checkpoint says of its policy: plain values."""
    # Spreading weights over processes puts a class of its own above the policy's.
    own = next(kind for kind in type(policy).__mro__ if not issubclass(kind, FSDPModule))
    return {_CLASS: own.__name__, **policy.identity()}


def check_same_policy(saved: Mapping[str, Any] | None, policy: BasePolicy) -> None:
    """Refuse a checkpoint of another policy.

    Args:
        saved: What `identity_of` said when it was written.
        policy: The run's, prepared.

    Raises:
        ValueError: They differ; or nothing was said.
    """
    if saved is None:
        raise ValueError("the checkpoint is not one of gigpo_lightning: it names no policy")
    own = identity_of(policy)
    there, here = saved.get(_CLASS, own[_CLASS]), own[_CLASS]
    names = [name for name in {**own, **saved} if name != _CLASS and saved.get(name) != own.get(name)]
    if there == here and not names:
        return
    shown = [f"{name}: {saved.get(name)!r} there, {own.get(name)!r} here" for name in names[:_SHOWN]]
    shown += [f"and {len(names) - _SHOWN} more"] * (len(names) > _SHOWN)
    what = f"{there}, this run has {here}" if there != here else f"{there} with other options ({'; '.join(shown)})"
    raise ValueError(
        f"the checkpoint is of another policy: {what}; name a checkpoint file of this policy with --ckpt_path, or give "
        "the options of the checkpoint's run"
    )
