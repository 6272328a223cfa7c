"""The processes of one command: which of them decides for all, and how the others learn what it decided.

Lightning starts the further processes of one machine itself, and they inherit an environment variable. torchrun, SLURM
and the like start all at once: those meet at the address at which they will train together. Knows nothing of what is
decided.
"""

from __future__ import annotations

import json
import os
from itertools import count
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

_VARIABLE = "GIGPO_RUN_PLACE"
# In Lightning's order of preference.
_ENVIRONMENTS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
_numbers = count()  # of the decisions of this process: all processes make the same ones in the same order
_stores: list[Any] = []  # kept open: a store that is dropped closes the address at which the others ask


def rank() -> int:
    """The number of this process among those of the command; 0 decides."""
    environment = _launcher()
    if environment is not None:
        return environment.global_rank()
    return int(os.environ.get("LOCAL_RANK", "0")) or int(os.environ.get("NODE_RANK", "0"))


def is_one_of_several() -> bool:
    """Whether torchrun, SLURM or the like has started this process together with others."""
    return _launcher() is not None


def tell(decision: dict[str, Any]) -> None:
    """Make a decision of process 0 known to the others, those that are running and those that Lightning will start."""
    text = os.environ[_VARIABLE] = json.dumps(decision)
    environment = _launcher()
    if environment is not None:
        _meeting(environment).set(f"place {next(_numbers)}", text)


def told() -> dict[str, Any]:
    """What process 0 decided; waits for it.

    Raises:
        ValueError: Nobody says: the processes were started in a way that is not known.
    """
    environment = _launcher()
    if environment is not None:
        text = _meeting(environment).get(f"place {next(_numbers)}").decode()
    else:
        text = os.environ.get(_VARIABLE, "")
    if not text:
        raise ValueError(
            f"LOCAL_RANK={os.environ.get('LOCAL_RANK')}, NODE_RANK={os.environ.get('NODE_RANK')}: this is not the "
            "first process, and the first cannot be asked; start processes with --trainer.devices, torchrun or srun"
        )
    decision: dict[str, Any] = json.loads(text)
    return decision


def forget() -> None:
    """Nothing came of the decision: what is started later must not take it over."""
    os.environ.pop(_VARIABLE, None)


def _launcher() -> ClusterEnvironment | None:
    """What started this process as one of several; None where that was Lightning or nobody."""
    for kind in _ENVIRONMENTS:
        if kind.detect():
            environment = kind()
            return environment if environment.world_size() > 1 else None
    return None


def _meeting(environment: ClusterEnvironment) -> dist.Store:
    """The store at the address of process 0, which torch opens for the training, too."""
    if not _stores:
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        store, _, _ = next(
            dist.rendezvous("env://", rank=environment.global_rank(), world_size=environment.world_size())
        )
        _stores.append(dist.PrefixStore("gigpo_lightning", store))
    return _stores[0]
