"""What a run will hold in memory, part by part, and which options would make it less.

Puts together what `HollowPolicy` counts; knows the options of a run, not the command line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gigpo_lightning.cli_plan_split import Split
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.memory import GIB
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.engine_options import EngineOptions
from gigpo_lightning.policy.hollow import HollowPolicy, MicroShape, UpdateBytes
from gigpo_lightning.policy.hollow_shards import spread
from gigpo_lightning.rollout.collector import ACTION_ROOM_TOKENS
from gigpo_lightning.rollout.random_play import Work

# CUDA's context, kernels and cuBLAS's workspace: of a whole card that much is not there for tensors.
CONTEXT_BYTES = round(0.75 * GIB)
# Above this share of the memory a run is called tight: the allocator does not use every gap.
TIGHT_FRAC = 0.9
# Where no tokenizer is at hand to count with: the share of tokens that are chosen, ids to choose among (mean
# and most), a long prompt.
_CHOSEN_FRAC, _ALLOWED, _WIDEST, _PROMPT_TOKENS = 0.1, 8, 64, 640
_ALONE = Split()


@dataclass(frozen=True)
class Setup:
    """The options of a run that its memory depends on.

    Attributes:
        policy: Not prepared.
        tasks, optimizer: As in the datamodule and the module; and the optimiser's name.
        kl: Whether the loss has a KL to a reference.
        rows, max_tokens, micro_tokens: Episodes under way; tokens of a segment, and of a micro-batch.
        constrain: Whether answers are chosen among the admissible ones.
        work: What an episode comes to at most; None where it could not be counted.
        on_gpu: Whether the run is on a GPU.
        precision: The trainer's.
        split: How the run is split over processes; `rows` are those of one.
        engine: What says the answers; None for the policy's own model.
        device_bytes: All memory of the device, of which an engine takes a share.
    """

    policy: BasePolicy
    tasks: TaskSet
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    optimizer_name: str
    kl: bool
    rows: int
    max_tokens: int
    micro_tokens: int
    constrain: bool
    work: Work | None
    on_gpu: bool
    precision: str = "32-true"
    split: Split = _ALONE
    engine: EngineOptions | None = None
    device_bytes: int = 0

    @property
    def capacity(self) -> int:
        """Tokens of a row of the key-value cache."""
        return self.max_tokens + ACTION_ROOM_TOKENS

    @property
    def prompt_tokens(self) -> int:
        """The longest text that a row reads at once."""
        return min(self.work.prompt_tokens if self.work else _PROMPT_TOKENS, self.max_tokens)

    @property
    def widest(self) -> int | None:
        """The most ids that a token is chosen among; None for the whole vocabulary."""
        return self.work.widest if self.work else _WIDEST if self.constrain else None

    @property
    def micro_shape(self) -> MicroShape:
        """The largest micro-batch: a row that is longer than `micro_tokens` makes one of its own."""
        rows = ceil(self.micro_tokens / self.max_tokens)
        length = self.max_tokens if rows == 1 else self.micro_tokens // rows
        if self.work is not None:
            share = rows * length / self.work.tokens
            listed, allowed, free = (share * n for n in (self.work.listed, self.work.allowed, self.work.free))
        else:
            chosen = rows * length * _CHOSEN_FRAC
            listed, allowed, free = (chosen, chosen * _ALLOWED, 0.0) if self.constrain else (0.0, 0.0, chosen)
        # More than there are rows: a dry run tells the two by their number.
        least = rows + 1 if listed else 0
        return MicroShape(rows, length, max(round(listed), least), max(round(allowed), 2 * least), round(free))


@dataclass(frozen=True)
class EngineNeeds:
    """Bytes that another engine takes of the device: its `share`, of which its own `weights` are a part.

    `row` are the keys and values of one conversation; `stays` says whether the share is held in the update, too.
    """

    share: int
    weights: int
    row: int
    stays: bool

    @property
    def conversations(self) -> int:
        """The longest conversations that have room at once, before what the engine needs for its own computing."""
        return max(self.share - self.weights, 0) // self.row


@dataclass(frozen=True)
class Needs:
    """Bytes of a process by part; `update`, `rollout` and `step` are peaks beyond what is held all the time.

    `update_otherwise` is `update` with gradient checkpointing switched the other way, where the policy has it. The
    `cache` of keys and values is there in the rollout, and on a CPU kept in the update (`cache_stays`). `exchange` are
    copies of the gradients on their way to other processes; `gathered_update` and `gathered_rollout` what is whole of
    spread weights while that lasts.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    update: UpdateBytes
    update_otherwise: UpdateBytes | None
    step: int
    cache: int
    cache_stays: bool
    rollout: int
    exchange: int = 0
    gathered_update: int = 0
    gathered_rollout: int = 0
    engine: EngineNeeds | None = None

    @property
    def held(self) -> int:
        """What is held all the time, the cache left out."""
        return self.weights + self.gradients + self.exchange + self.optimizer + self.reference

    @property
    def peaks(self) -> dict[str, int]:
        """All that is held at the peaks of the run."""
        share, stays = (self.engine.share, self.engine.stays) if self.engine else (0, False)
        kept = self.held + self.cache * self.cache_stays + share * stays
        return {
            "the update": kept + self.update.peak + self.gathered_update,
            "the optimiser step": kept + self.step,
            "the rollout": self.held + self.cache + self.rollout + self.gathered_rollout + share,
        }

    @property
    def total(self) -> int:
        """The peak of the run."""
        return max(self.peaks.values())


class Planner:
    """Counts needs; remembers the models that it has built, as the options to compare share them."""

    def __init__(self) -> None:
        self._hollow: dict[Any, HollowPolicy] = {}
        self._counted: dict[Any, Any] = {}

    def needs(self, setup: Setup, compare: bool = True) -> Needs:
        """The needs of a run.

        Args:
            setup: The run.
            compare: Whether to count the update without (or with) gradient checkpointing, too.

        Raises:
            ValueError: Model or adapter cannot be built, or the optimiser cannot be tried.
        """
        hollow, split = self._build(setup), setup.split
        optimizer, step = hollow.optimizer_bytes(setup.optimizer, split.processes if split.spread else 1)
        needs = Needs(
            parameters=hollow.parameters,
            trained=hollow.trained,
            weights=hollow.weight_bytes,
            gradients=hollow.trained_bytes,
            optimizer=optimizer,
            reference=hollow.reference_bytes if setup.kl else 0,
            update=self._update(setup),
            update_otherwise=self._update(switched(setup)) if compare and _is_pretrained(setup) else None,
            step=step,
            cache_stays=not setup.on_gpu,
            **self._playing(setup, hollow),
        )
        return _spread(needs, hollow, split.processes) if split.spread else _exchanged(needs, split)

    def _playing(self, setup: Setup, hollow: HollowPolicy) -> dict[str, Any]:
        """What says the answers: the policy's own model with its cache, or an engine with its share of the memory."""
        if setup.engine is not None:
            share, row = setup.engine.memory_bytes(setup.device_bytes), hollow.cache_bytes(1, setup.capacity, True)
            stays = not setup.engine.rests(setup.on_gpu)
            return {"cache": 0, "rollout": 0, "engine": EngineNeeds(share, hollow.weight_bytes, row, stays)}
        sizes = (setup.rows, setup.capacity, setup.prompt_tokens, setup.widest)
        rollout = self._once(("rollout", id(hollow), *sizes), lambda: hollow.rollout_bytes(*sizes))
        return {"cache": hollow.cache_bytes(setup.rows, setup.capacity), "rollout": rollout}

    def _update(self, setup: Setup) -> UpdateBytes:
        hollow = self._build(setup)
        return self._once(
            ("update", id(hollow), setup.micro_shape, setup.kl),
            lambda: hollow.update_bytes(setup.micro_shape, setup.kl),
        )

    def _build(self, setup: Setup) -> HollowPolicy:
        policy = setup.policy
        options = [getattr(policy, name, None) for name in ("dtype", "lora", "quantization", "gradient_checkpointing")]
        key = repr([*options, setup.precision])
        if key not in self._hollow:
            self._hollow[key] = HollowPolicy(policy, setup.tasks, setup.on_gpu, setup.precision)
        return self._hollow[key]

    def _once(self, key: Any, count: Callable[[], Any]) -> Any:
        if key not in self._counted:
            self._counted[key] = count()
        return self._counted[key]


def _spread(needs: Needs, hollow: HollowPolicy, processes: int) -> Needs:
    """With weights, gradients and reference spread over processes (the optimiser's state is so already)."""
    held = spread(hollow.policy, processes)
    return replace(
        needs,
        weights=held.weights,
        gradients=held.trained,
        reference=held.weights if needs.reference else 0,
        gathered_update=held.gathered + (held.gathered_reference if needs.reference else 0),
        gathered_rollout=held.whole,
    )


def _exchanged(needs: Needs, split: Split) -> Needs:
    """With the copies that DDP sends: as many bytes as the gradients."""
    return replace(needs, exchange=needs.gradients) if split.processes > 1 else needs


def _is_pretrained(setup: Setup) -> bool:
    return isinstance(setup.policy, CausalLMPolicy)


def changed(setup: Setup, **options: Any) -> Setup:
    """The setup with other options of its policy."""
    policy = copy.deepcopy(setup.policy)
    for name, value in options.items():
        setattr(policy, name, value)
    return replace(setup, policy=policy)


def switched(setup: Setup) -> Setup:
    """With gradient checkpointing the other way."""
    return changed(setup, gradient_checkpointing=not getattr(setup.policy, "gradient_checkpointing", False))
