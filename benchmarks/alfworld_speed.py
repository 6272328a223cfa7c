"""Steps per second of the native ALFWorld engine and of the stock one, on the same games and commands, in one run.

    python benchmarks/alfworld_speed.py [--receptacles 18] [--games 3] [--steps 60]

Every step includes working out the admissible commands. Without the extra `textworld` only the native engine is
measured. Times are of the process's CPU, so that other work on the machine matters less; trust the ratio most.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.env import AlfworldEnv
from gigpo_lightning.envs.alfworld.game import GameData
from gigpo_lightning.envs.alfworld.oracle import StockEngine, is_available
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.base import Task

TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_heat_then_place_in_recep", "pick_two_obj_and_place")
Engine = Simulator | StockEngine


def cpu_s(work: Callable[[], object]) -> float:
    """Seconds of CPU that `work` takes."""
    started = time.process_time()
    work()
    return time.process_time() - started


def draw_commands(game: GameData, steps: int, seed: int) -> list[str]:
    """Admissible commands of a random walk, half of them other than travel."""
    rng, sim, commands = random.Random(seed), Simulator(game), []
    for _ in range(steps):
        admissible = sim.admissible()
        other = [one for one in admissible if not one.startswith("go to")]
        commands.append(rng.choice(other if rng.random() < 0.5 else admissible))
        sim.step(commands[-1])
    return commands


def play(engine: Engine, commands: list[str]) -> None:
    """Carry out `commands`, listing what is possible after each."""
    for command in commands:
        engine.step(command)
        engine.admissible()


def measure(make: Callable[[GameData], Engine], games: list[GameData], scripts: list[list[str]]) -> dict[str, float]:
    """Milliseconds to load a game, to reset it, and per step."""
    load = reset = play_s = 0.0
    for game, script in zip(games, scripts, strict=True):
        made: list[Engine] = []
        load += cpu_s(lambda game=game, made=made: made.append(make(game)))  # type: ignore[misc]
        reset += cpu_s(made[0].reset)
        play_s += cpu_s(lambda engine=made[0], script=script: play(engine, script))  # type: ignore[misc]
    steps = sum(map(len, scripts))
    return {"load": 1e3 * load / len(games), "reset": 1e3 * reset / len(games), "step": 1e3 * play_s / steps}


def fresh(game: GameData) -> GameData:
    """The same game with nothing worked out yet."""
    return GameData(**{name: getattr(game, name) for name in game.__dataclass_fields__})


def group_ratio(games: list[GameData], members: int = 8) -> float:
    """Cost of resetting a group, over that of resetting its first member."""
    first = rest = 0.0
    for number, game in enumerate(games):
        tasks = [Task(str(number), "train", {}, fresh(game)) for _ in range(members)]
        first += cpu_s(lambda tasks=tasks: AlfworldEnv().reset(tasks[0]))  # type: ignore[misc]
        rest += cpu_s(lambda tasks=tasks: [AlfworldEnv().reset(task) for task in tasks[1:]])  # type: ignore[misc]
    return (first + rest) / first


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receptacles", type=int, default=18)
    parser.add_argument("--games", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps per game with the stock engine")
    options = parser.parse_args()
    games = []
    for number in range(options.games):
        difficulty = {"type": TYPES[number % len(TYPES)], "receptacles": options.receptacles}
        games.append(GeneratedTasks(seed=7, difficulty=difficulty).get("train", number).payload)
    scripts = [draw_commands(game, options.steps, number) for number, game in enumerate(games)]
    # The native engine needs more steps for a figure that stands still.
    long_scripts = [draw_commands(game, 100 * options.steps, number) for number, game in enumerate(games)]
    native = measure(lambda game: Simulator(fresh(game)), games, long_scripts)
    rows = {"native": native, "stock": measure(StockEngine, games, scripts)} if is_available() else {"native": native}
    print(f"{options.games} games with {options.receptacles} receptacles, ms of CPU")
    print(f"{'':8}{'load':>10}{'reset':>10}{'step':>10}")
    for name, row in rows.items():
        print(f"{name:8}{row['load']:10.3f}{row['reset']:10.4f}{row['step']:10.4f}")
    if "stock" in rows:
        ratios = {name: rows["stock"][name] / native[name] for name in native}
        print(f"{'ratio':8}{ratios['load']:10.0f}{ratios['reset']:10.0f}{ratios['step']:10.0f}")
    print(f"a group of 8 resets costs {group_ratio(games):.2f} times one load")


if __name__ == "__main__":
    main()
