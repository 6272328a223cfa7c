"""Runs of several processes on one machine, started together as torchrun starts them, and what each of them does.

Loaded by the child processes of `test_ddp.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from gigpo_lightning import __main__
from gigpo_lightning.batch import Minibatch, cut_by_tokens
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.lambda_decay import LambdaDecay
from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.detectors import EmbeddingDetector
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.store import RolloutStore
from gigpo_lightning.sharding import FullyShardedStrategy, whole
from tests.toy_run import fit, make_data, make_policy, make_trainer

CLIP = {"clip_low": 0.1, "clip_high": 0.1, "kl_coef": 0.1, "gradient_clip": None}


def together(folder: Path, target: Callable[..., None], *args: Any, timeout_s: float = 60) -> list[int | None]:
    """Call `target(*args)` in two processes that know of each other; their exit codes, in order of rank.

    What they say goes to `said-0` and `said-1` in `folder`. After `timeout_s` they are killed.
    """
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ddp_world"])  # loads torch once for all processes
    port = free_port()
    children = [context.Process(target=_child, args=(str(folder), rank, port, target, args)) for rank in range(2)]
    for child in children:
        child.start()
    end_s = time.monotonic() + timeout_s
    for child in children:
        child.join(max(0.0, end_s - time.monotonic()))
        child.kill()
        child.join()
    return [child.exitcode for child in children]


def said(folder: Path) -> str:
    """What both processes said, for a test that fails."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("said-*")))


def free_port() -> int:
    with closing(socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(folder: str, rank: int, port: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.chdir(folder)
    with Path(f"said-{rank}").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }
    torch.set_num_threads(1)  # two processes share few cores
    target(*args)


def command(*args: str) -> None:
    """`python -m gigpo_lightning ARGS`."""
    raise SystemExit(__main__.main(args))


class Witness(pl.Callback):
    """Writes the weights with which this process ends its training."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.save(pl_module.policy.state_dict(), f"weights-{trainer.global_rank}.pt")


# -- gradients ---------------------------------------------------------------------------------------------------------


class Given(RolloutDataModule):
    """One minibatch that was made before, instead of rollouts. A critic says something from the start."""

    minibatch: Minibatch

    def collect(self) -> Iterator[Minibatch]:
        self.iteration += 1
        if self.policy.critic is not None:
            torch.nn.init.constant_(self.policy.critic.head.weight, 0.1)
        yield self.minibatch


class Recorder(torch.optim.SGD):
    """Keeps the gradient and moves nothing."""

    gradient = torch.zeros(0)

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        every = [whole(p.grad) for group in self.param_groups for p in group["params"]]
        type(self).gradient = torch.cat([g.flatten() for g in every]).detach().clone()


class Figures(GiGPOModule):
    """Keeps the figures of its updates."""

    seen: dict[str, float]

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.seen = {name: float(value) for name, value in dictionary.items()}


def gradient(rows: list[int], max_tokens: int, strategy: Any, **model: Any) -> dict[str, Any]:
    """Gradient and figures of one update on these rows of `played.arrow`, which another policy played for a critic."""
    store = RolloutStore(Path("played.arrow"))
    cuts = cut_by_tokens([int(store.token_counts[row]) for row in rows], max_tokens)
    micro = tuple(store.micro_batch([rows[i] for i in cut]) for cut in cuts)
    options = {"optimizer": lambda parameters: Recorder(parameters, lr=1.0), **CLIP, **model}
    module = Figures(make_policy(init_seed=2), **options)
    # The reference differs from the policy, or its KL would have no gradient.
    module.reference = make_policy(init_seed=3)
    data = make_data()
    module.reference.prepare(data.tasks)
    module.reference.requires_grad_(False)
    credit = CreditRule(estimator="ppo" if model.get("critic") else "gigpo")
    given = Given(data.tasks, groups=2, members=2, passes=1, minibatches=1, entropy_coef=0.1, credit=credit)
    given.minibatch = Minibatch(micro, 1.3)
    devices = {"devices": 1 if strategy == "auto" else 2, "strategy": strategy}
    make_trainer(Path("root"), logger=False, **devices).fit(module, datamodule=given)
    return {"gradient": Recorder.gradient, "figures": module.seen, "micro_batches": len(micro)}


def gradients(cases: dict[str, tuple[list[list[int]], dict[str, Any]]], *strategies: str) -> None:
    """Both processes' part of every case; each writes `<strategy>-<case>-<rank>.pt`."""
    rank = int(os.environ["RANK"])
    for kind in strategies:
        for name, (shares, model) in cases.items():
            strategy = FullyShardedStrategy() if kind == "fsdp" else kind
            torch.save(gradient(shares[rank], 60, strategy, **model), f"{kind}-{name}-{rank}.pt")


SHARDED: Any = (
    {"aggregation": "turn", "kl_coef": 0.1, "critic": CriticRule(lr=0.02)},
    # One process has more groups than the other, and asks for more values and embeddings.
    {"credit": CreditRule(estimator="ppo", detector=EmbeddingDetector(0.9)), "groups": 5},
)


def sharded_runs() -> None:
    """Three iterations with spread weights, whole and resumed after two; the same on DDP. Folders name the runs."""
    model, data = SHARDED
    for name, epochs in (("whole", 3), ("cut", 2), ("cut", 3), ("ddp", 3)):
        last = Path(name) / "checkpoints/last.ckpt"
        strategy: Any = "ddp" if name == "ddp" else FullyShardedStrategy()
        path = str(last) if last.exists() else None
        # λ of the first resumed iteration is right only where the checkpoint is read before the fit begins.
        callbacks = [LambdaDecay("linear", start=1.0, end=0.0, span=3), IterationCheckpoint()]
        _, module, _ = fit(Path(name), epochs, callbacks, data, model, path, devices=2, strategy=strategy)
        spread = {isinstance(parameter, DTensor) for parameter in module.policy.parameters()}
        assert spread == {name != "ddp"}


class Leaves(pl.Callback):
    """The second process ends without a word in its second iteration."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == 1:
            os._exit(7)
