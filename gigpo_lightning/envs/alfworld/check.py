"""Lock-step comparison of the native engine with the stock one: observation, commands and won, at every step.

Needs the extra `textworld`. `run_check` is behind `python -m gigpo_lightning check-env alfworld --data DIR`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.game import GameData, load_game
from gigpo_lightning.envs.alfworld.oracle import StockEngine, require_stock

# Shares: of broken commands, of episodes that follow a known solution to its end, of steps after which a game restarts.
_INVALID_FRAC = 0.1
_EXPERT_FRAC = 0.5
_RESTART_FRAC = 0.01
_MAX_DIFFERENCES = 20
_NONSENSE = ("", "dance", "look around", "go to nowhere 1", "take all", "open", "examine", "Inventory", "put it down")

Expert = Callable[[GameData], Sequence[str]]


@dataclass(frozen=True)
class Difference:
    """One disagreement: after `commands` in `game`, `what` differs."""

    game: str
    commands: tuple[str, ...]
    what: str
    native: str
    stock: str


@dataclass
class CheckReport:
    """What a comparison found.

    Attributes:
        games: Games compared.
        steps: Steps compared, resets not counted.
        wins: Times that a goal was reached.
        refused: Games that one of the engines does not play, with its message.
        differences: The disagreements, at most 20.
        native_s: Seconds spent in the native engine.
        stock_s: Seconds spent in the stock engine.
    """

    games: int = 0
    steps: int = 0
    wins: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    native_s: float = 0.0
    stock_s: float = 0.0

    def summary(self) -> str:
        """The figures in a few lines."""
        lines = [f"{self.games} games, {self.steps} steps, {self.wins} wins, {len(self.differences)} differences"]
        if self.steps and self.native_s > 0:
            native, stock = (1e3 * total / self.steps for total in (self.native_s, self.stock_s))
            lines.append(f"ms per step: native {native:.3f}, stock {stock:.1f} (ratio {stock / native:.0f})")
        lines += [f"refused: {name}: {message}" for name, message in self.refused]
        for one in self.differences:
            lines += [f"{one.game}: {one.what} differs after {' > '.join(one.commands) or '(reset)'}",
                      f"  native: {one.native}", f"  stock:  {one.stock}"]  # fmt: skip
        return "\n".join(lines)


def check_env(
    data_dir: str | Path, *, games: int, steps_per_game: int, seed: int, expert: Expert | None = None
) -> CheckReport:
    """Compare the engines on game files found under `data_dir`.

    Args:
        data_dir: Folder with `game.tw-pddl` files at any depth.
        games: How many of them, drawn at random.
        steps_per_game: Steps in each.
        seed: Seed of the draw and of the commands.
        expert: Gives a solution of a game; by default its file's walkthrough.

    Raises:
        ValueError: A number below 1, no game files, or the extra is not installed.
    """
    for option, value in (("games", games), ("steps", steps_per_game)):
        if value < 1:
            raise ValueError(f"--{option}={value}: must be at least 1")
    paths = sorted(Path(data_dir).rglob("game.tw-pddl"))
    if not paths:
        raise ValueError(f"--data {data_dir} holds no game.tw-pddl files")
    require_stock()
    rng = random.Random(seed)
    report = CheckReport()
    for path in rng.sample(paths, min(games, len(paths))):
        try:
            game, stock = load_game(path), StockEngine(path)
        except ValueError as error:
            report.refused.append((str(path), str(error)))
            continue
        compare(game, stock, steps_per_game, rng, report, expert)
    return report


def compare(
    game: GameData,
    stock: StockEngine,
    steps: int,
    rng: random.Random,
    report: CheckReport,
    expert: Expert | None = None,
) -> None:
    """Play `steps` commands in both engines and enter what differs into `report`.

    An episode follows the solution or is random; after its end, play goes on at random for a while.
    """
    native = Simulator(game)
    solution = list(expert(game)) if expert is not None else list(game.walkthrough)
    report.games += 1
    commands: list[str] = []
    planned: list[str] = []
    for number in range(steps):
        if len(report.differences) >= _MAX_DIFFERENCES:
            return
        if number == 0 or rng.random() < (0.2 if native.won else _RESTART_FRAC):
            _restart(native, stock, game, report)
            commands, planned = [], list(solution) if rng.random() < _EXPERT_FRAC else []
        command = _choose(native, planned, rng)
        commands.append(command)
        was_won = native.won
        started = time.perf_counter()
        text, won = native.step(command)
        admissible = native.admissible()
        between = time.perf_counter()
        stock_text, stock_won = stock.step(command)
        stock_admissible = stock.admissible()
        report.native_s += between - started
        report.stock_s += time.perf_counter() - between
        report.steps += 1
        report.wins += won and not was_won
        pairs = [("text", text, stock_text), ("won", str(won), str(stock_won))]
        _note(report, game, commands, [*pairs, _command_pair(admissible, stock_admissible)])


def run_check(argv: Sequence[str]) -> int:
    """Command line of the comparison; returns the exit code: 0 equal, 1 differences, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="check-env alfworld", description="Compare the native with the stock engine.")
    parser.add_argument("--data", required=True, help="folder with game.tw-pddl files at any depth")
    parser.add_argument("--games", type=int, default=20, help="how many of them, drawn at random (default 20)")
    parser.add_argument("--steps", type=int, default=50, help="steps in each (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of games and commands (default 0)")
    options = parser.parse_args(argv)
    try:
        report = check_env(options.data, games=options.games, steps_per_game=options.steps, seed=options.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.summary())
    return 1 if report.differences or not report.steps else 0


def _restart(native: Simulator, stock: StockEngine, game: GameData, report: CheckReport) -> None:
    pairs = [("intro", native.reset(), stock.reset()), ("won", str(native.won), str(stock.won))]
    _note(report, game, [], [*pairs, _command_pair(native.admissible(), stock.admissible())])


def _choose(native: Simulator, planned: list[str], rng: random.Random) -> str:
    """The next command: a broken one, the next of `planned`, which it takes out, or a random one."""
    if rng.random() < _INVALID_FRAC:
        broken = list(rng.choice(native.admissible()))
        broken[rng.randrange(len(broken))] = rng.choice("xyz 1")
        return rng.choice((*_NONSENSE, "".join(broken)))
    if planned:
        return planned.pop(0)
    # Travel is most of what can be done: half of the random commands are drawn from the rest, which changes more.
    admissible = native.admissible()
    other = [command for command in admissible if not command.startswith("go to")]
    return rng.choice(other if rng.random() < 0.5 else admissible)


def _command_pair(native: Sequence[str], stock: Sequence[str]) -> tuple[str, str, str]:
    if list(native) == list(stock):
        return "commands", "", ""
    extra, missing = sorted(set(native) - set(stock)), sorted(set(stock) - set(native))
    return "commands", f"has {extra} or another order", f"has {missing}"


def _note(report: CheckReport, game: GameData, commands: Sequence[str], pairs: Sequence[tuple[str, str, str]]) -> None:
    for what, native, stock in pairs:
        if native != stock:
            name = game.source or game.instruction
            report.differences.append(Difference(name, tuple(commands), what, native, stock))
