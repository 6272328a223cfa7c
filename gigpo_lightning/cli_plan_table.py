"""The tables of the command `plan`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from gigpo_lightning.callbacks.progress import clock
from gigpo_lightning.cli_plan_needs import TIGHT_FRAC, Needs, Setup
from gigpo_lightning.cli_plan_probe import PARTS
from gigpo_lightning.memory import format_size
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.hollow import MicroShape
from gigpo_lightning.rollout.random_play import Work

_WIDTH = 100


@dataclass(frozen=True)
class Room:
    """The memory that a process has: `size` in bytes, for its tensors; `what` says where the number is from.

    `whole` is all memory of the device, used or not.
    """

    size: int
    on_gpu: bool
    what: str
    whole: int = 0

    @property
    def device(self) -> str:
        """The kind of device."""
        return "GPU" if self.on_gpu else "CPU"

    def verdict(self, needed: int) -> str:
        """`fits`, `is tight` or `does not fit`."""
        if needed > self.size:
            return "does not fit"
        return "is tight" if needed > TIGHT_FRAC * self.size else "fits"

    def verdict_of(self, needs: Needs) -> str:
        """The same of a run's needs; one whose engine has no room for a conversation does not fit."""
        return "does not fit" if needs.engine and not needs.engine.conversations else self.verdict(needs.total)


def show_memory(setup: Setup, needs: Needs, room: Room, savings: Sequence[tuple[str, int]]) -> None:
    """Print what is needed, whether that is there, and what would help."""
    table = _table(f"Memory of {_whose(setup)} on a {room.device}", "", "bytes", "of what")
    trained = f"{_millions(needs.trained)} of them" if needs.trained < needs.parameters else "all"
    counts = f"{_millions(needs.parameters)} parameters, {trained} trained"
    table.add_row("weights", format_size(needs.weights), counts)
    table.add_row("gradients", format_size(needs.gradients), "of what is trained")
    if needs.exchange:
        table.add_row("their exchange", format_size(needs.exchange), "copies that ddp sends to the other processes")
    table.add_row("optimiser state", format_size(needs.optimizer), setup.optimizer_name)
    reference = "frozen copy of the weights" if needs.reference else "none: " + _no_reference(setup)
    table.add_row("reference", format_size(needs.reference), reference)
    table.add_row("held all the time", format_size(needs.held), "", style="bold", end_section=True)
    shape, checkpointed = setup.micro_shape, getattr(setup.policy, "gradient_checkpointing", False)
    note = f"{shape.rows} × {shape.length:,} tokens, forward and backward"
    table.add_row("activations", format_size(needs.update.activations), note)
    if needs.update_otherwise is not None:
        other = format_size(needs.update_otherwise.activations)
        table.add_row("", "", f"({other} with{'out' * checkpointed} gradient_checkpointing)")
    table.add_row("log-probs", format_size(needs.update.logprobs), _choices(shape))
    both = "both, and the reference's log-probs"
    if needs.gathered_update:
        table.add_row("gathered", format_size(needs.gathered_update), "embeddings and layers at work, whole")
        both = "all three, and the reference's log-probs"
    update = format_size(needs.update.peak + needs.gathered_update)
    table.add_row("update, at its peak", update, both, style="bold")
    table.add_row("optimiser step", format_size(needs.step), "", style="bold", end_section=True)
    _add_rollout(table, setup, needs)
    table.add_row("needed", format_size(needs.total), "the highest peak, with what is held all the time", style="bold")
    table.add_row("there", format_size(room.size), room.what)
    console = _console()
    console.print(table)
    console.print(f"The run {room.verdict_of(needs)}{_too_large(needs, room)}.", highlight=False)
    if savings:
        helps = _table("What would help, each by itself", "option", "less by", "then needed")
        for option, saved in savings:
            helps.add_row(option, format_size(saved), format_size(needs.total - saved))
        console.print(helps)


def _add_rollout(table: Table, setup: Setup, needs: Needs) -> None:
    """The rows of the table about what says the answers."""
    if needs.engine is not None:
        engine, name = needs.engine, type(setup.engine).__name__
        note = f"its weights {format_size(engine.weights)}, then at most {engine.conversations:,} conversations of "
        note += f"{setup.capacity:,} tokens; {'held in the update, too' if engine.stays else 'given back afterwards'}"
        table.add_row(f"rollout: {name}", format_size(engine.share), note, style="bold", end_section=True)
        return
    note = f"{setup.rows} rows of {setup.capacity:,} tokens" + ", kept in the update" * needs.cache_stays
    table.add_row("keys and values", format_size(needs.cache), note)
    note = f"{setup.rows} rows, {setup.prompt_tokens:,} new tokens each"
    table.add_row("reading, sampling", format_size(needs.rollout), note)
    if needs.gathered_rollout:
        table.add_row("gathered", format_size(needs.gathered_rollout), "all weights, whole")
    rollout = format_size(needs.cache + needs.rollout + needs.gathered_rollout)
    what = "these three" if needs.gathered_rollout else "these two"
    table.add_row("rollout, at its peak", rollout, what, style="bold", end_section=True)


def show_work(works: Mapping[str, Work], why: str, episodes: int, processes: int = 1) -> None:
    """Print what the share of a process in an iteration comes to."""
    console = _console()
    if not works:
        console.print(f"tokens per iteration: not known, and log-probs and prompts assumed: {why}", highlight=False)
        return
    table = _table(
        f"An iteration of {episodes} episodes{_each(processes)}, played at random",
        "stage",
        "turns",
        "tokens",
        "chosen",
        "rows to",
    )
    for name, work in works.items():
        tokens, chosen = round(work.tokens * episodes), round((work.listed + work.free) * episodes)
        table.add_row(
            name, f"{work.turns * episodes:,.0f}", f"{tokens:,}", f"{chosen:,}", f"{work.row_tokens:,} tokens"
        )
    console.print(table)


def show_probe(
    seconds: Mapping[str, float],
    episodes: int,
    iterations: float | None,
    total_s: float | None,
    peak: int,
    on_gpu: bool,
) -> None:
    """Print how long an iteration took and what that comes to."""
    table = _table("Time of an iteration", "", "seconds", "share")
    for name, words in PARTS.items():
        if seconds[name] or name != "time/values_s":  # without a critic there is no such part
            table.add_row(words, f"{seconds[name]:.2f}", f"{seconds[name] / seconds['total']:.0%}")
    table.add_row("all", f"{seconds['total']:.2f}", "", style="bold")
    console = _console()
    console.print(table)
    tokens = seconds["tokens_per_episode"] * episodes
    console.print(f"tokens of an iteration: {tokens:,.0f}", highlight=False)
    if iterations is None or total_s is None:
        console.print("whole run: no limit is set", highlight=False)
    else:
        console.print(
            f"whole run: {iterations:,.0f} iterations in {clock(total_s)}, at this speed and without evaluations",
            highlight=False,
        )
    what = "tensors on the GPU" if on_gpu else "this process, libraries included"
    console.print(f"most memory so far: {format_size(peak)} ({what})", highlight=False)


def _too_large(needs: Needs, room: Room) -> str:
    """The parts for which there is no room."""
    if needs.engine is not None and not needs.engine.conversations:
        least = format_size(needs.engine.weights + needs.engine.row)
        return f": its engine needs at least {least} for weights and one conversation; raise gpu_memory_utilization"
    if needs.held > room.size:
        return f": what is held all the time needs {format_size(needs.held)}"
    tops = [f"{name} needs {format_size(size)}" for name, size in needs.peaks.items() if size > room.size]
    return f": {', '.join(tops)}" if tops else ""


def _choices(shape: MicroShape) -> str:
    """What the tokens of a micro-batch were chosen among."""
    each = shape.allowed / max(shape.listed, 1)
    listed = f"{shape.listed:,} sampled tokens, {each:.1f} to choose from on average" if shape.listed else ""
    return "; ".join(filter(None, [listed, f"{shape.free:,} sampled from the whole vocabulary" if shape.free else ""]))


def _whose(setup: Setup) -> str:
    """The run, or a process of it."""
    processes = setup.split.processes
    how = "fsdp2" if setup.split.spread else "ddp"
    return "a run" if processes == 1 else f"each of {processes} processes ({how})"


def _each(processes: int) -> str:
    return f" for each of {processes} processes" if processes > 1 else ""


def _no_reference(setup: Setup) -> str:
    lora = isinstance(setup.policy, CausalLMPolicy) and setup.policy.lora is not None
    return "the weights with the adapter off" if lora and setup.kl else "model.kl_coef is 0"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", width=_width() if len(columns) == 3 else None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "of what" else "right", overflow="fold")
    return table


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def _width() -> int:
    """Columns of a wide table: a terminal may have fewer."""
    return min(_WIDTH, _console().width)
