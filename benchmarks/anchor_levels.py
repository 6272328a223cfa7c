"""How the levels of ALFWorld's anchor key compare: what they cover, and what they mix. Prints a Markdown table.

    python benchmarks/anchor_levels.py [--tasks 30] [--members 8] [--horizon 50] [--receptacles 18]
        [--noise 0.05 0.2 1.0]

The player is the explorer between whose actions random ones are thrown in (noise: their share; 1 is a random player).
It is not told of them, so that some mislead it. All levels see the very same episodes.

coverage: share of the steps in step groups of at least 2.
mixes place or hands: share of the covered steps whose group holds states that differ in where the player stands or what
it carries. mixes task states: the same for states that differ in anything that the goal depends on (key `task`).
explained: share of the variance of the discounted step return, inside a task group, that the step groups explain; steps
alone in their group count as not explained. What is left over is what step advantages compare.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gigpo_lightning.envs.alfworld.anchors import LEVELS, digest
from gigpo_lightning.envs.alfworld.env import AlfworldEnv
from gigpo_lightning.envs.alfworld.experts import Explorer
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.base import Task

GAMMA = 0.95


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its key at every level, where the player stood with what in its hands, and the step return."""

    keys: dict[str, str]
    view: Any
    step_return: float


@dataclass(slots=True)
class Sums:
    """What is counted of one level, over all task groups."""

    steps: int = 0
    covered: int = 0
    mixes_view: int = 0
    mixes_task: int = 0
    variation: float = 0.0  # of the step return around the mean of its task group
    between: float = 0.0  # the part of it between step groups, of the covered steps
    groups: list[int] = field(default_factory=list)

    def add(self, steps: Sequence[Step], level: str) -> None:
        """Count one task group."""
        mean = float(np.mean([step.step_return for step in steps]))
        self.steps += len(steps)
        self.variation += sum((step.step_return - mean) ** 2 for step in steps)
        members: dict[str, list[Step]] = defaultdict(list)
        for step in steps:
            members[step.keys[level]].append(step)
        for group in members.values():
            self.groups.append(len(group))
            if len(group) < 2:
                continue
            self.covered += len(group)
            self.mixes_view += len(group) * (len({step.view for step in group}) > 1)
            self.mixes_task += len(group) * (len({step.keys["task"] for step in group}) > 1)
            self.between += len(group) * (float(np.mean([step.step_return for step in group])) - mean) ** 2

    def row(self, player: str, level: str) -> str:
        """A line of the table."""
        covered = max(self.covered, 1)
        shares = (self.covered / self.steps, self.mixes_view / covered, self.mixes_task / covered)
        explained = f"{100 * self.between / self.variation:.0f} %" if self.variation else "–"
        sizes = [size for size in self.groups if size > 1]
        cells = [
            player,
            f"`{level}`",
            *(f"{100 * share:.0f} %" for share in shares),
            explained,
            f"{np.mean(sizes or [0]):.1f}",
        ]
        return f"| {' | '.join(cells)} |"


def play(task: Task, horizon: int, noise: float, rng: random.Random) -> tuple[list[Step], bool]:
    """One episode of the explorer, with a random action in place of its own with probability `noise`."""
    env, explorer = AlfworldEnv(), Explorer()
    heard, won = env.reset(task), False
    seen: list[tuple[dict[str, str], tuple[str, tuple[str, ...]]]] = []
    while len(seen) < horizon and not won:
        possible, is_random = env.admissible_actions(), rng.random() < noise
        state = env.simulator
        seen.append(({level: digest(key(state)) for level, key in LEVELS.items()}, (state.place, state.held)))
        result = env.step(rng.choice(possible) if is_random else explorer.act(heard, possible))
        heard, won = heard if is_random else result.observation, result.terminated
    returns = [float(won) * GAMMA ** (len(seen) - 1 - number) for number in range(len(seen))]
    return [Step(*state, step_return) for state, step_return in zip(seen, returns, strict=True)], won


def measure(tasks: GeneratedTasks, options: argparse.Namespace, noise: float) -> tuple[dict[str, Sums], float, int]:
    """The sums of every level, the success rate, and the number of steps."""
    rng = random.Random(0)
    sums, wins = {level: Sums() for level in LEVELS}, 0
    for index in range(options.tasks):
        task, steps = tasks.get("train", index), []
        for _ in range(options.members):
            episode, won = play(task, options.horizon, noise, rng)
            steps += episode
            wins += won
        for level, counted in sums.items():
            counted.add(steps, level)
    return sums, wins / (options.tasks * options.members), sums["text"].steps


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--horizon", type=int, default=50)
    parser.add_argument("--receptacles", type=int, default=18)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.2, 1.0], help="shares of random actions")
    parser.add_argument("--seed", type=int, default=3, help="seed of the households")
    options = parser.parse_args(argv)
    tasks = GeneratedTasks(seed=options.seed, difficulty={"receptacles": options.receptacles})
    print("| player | level | coverage | mixes place or hands | mixes task states | explained | steps per group |")
    print("|---|---|---|---|---|---|---|")
    notes = []
    for noise in options.noise:
        player = "random" if noise == 1 else f"explorer, {100 * noise:g} % random"
        sums, success, steps = measure(tasks, options, noise)
        notes.append(f"{player}: {steps} steps, success {success:.2f}")
        for level, counted in sums.items():
            print(counted.row(player, level))
    print(f"\n{options.tasks} tasks of {options.receptacles} receptacles, groups of {options.members}, horizon "
          f"{options.horizon}; {'; '.join(notes)}.")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
