"""Steps per second of ALFWorld environments in this process and in worker processes, in one run.

    python benchmarks/pool_speed.py [--workers 1 2] [--environments 128] [--receptacles 18] [--steps 60] [--rounds 3]

Random admissible actions, the same for all; finished games start anew. Choosing the actions is not counted. Wall time,
as work is to be shared between processes: other work on the machine blurs it, so the kinds take turns, and the best
round of each counts.
"""

from __future__ import annotations

import argparse
import random
import time

from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.base import Task
from gigpo_lightning.rollout.pool import EnvPool, InProcessPool
from gigpo_lightning.rollout.workers import WorkerPool

MEMBERS = 8  # environments that play the same task


def play_s(pool: EnvPool, tasks: list[Task], steps: int) -> tuple[float, float]:
    """Seconds to reset all environments, and to take `steps` random steps in each."""
    rng, slots = random.Random(0), list(range(len(tasks)))
    begin = time.perf_counter()
    states = pool.reset(slots, tasks)
    reset_s, step_s = time.perf_counter() - begin, 0.0
    for _ in range(steps):
        over = [slot for slot in slots if not states[slot].admissible]
        for slot, state in zip(over, pool.reset(over, [tasks[slot] for slot in over]), strict=True):
            states[slot] = state
        actions = [rng.choice(state.admissible or ("look",)) for state in states]
        begin = time.perf_counter()
        states = pool.step(slots, actions)
        step_s += time.perf_counter() - begin
    return reset_s, step_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--environments", type=int, default=128)
    parser.add_argument("--receptacles", type=int, default=18)
    parser.add_argument("--steps", type=int, default=60, help="steps per environment and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    world = GeneratedTasks(difficulty={"receptacles": options.receptacles})
    games = [world.get("train", i) for i in range(-(-options.environments // MEMBERS))]
    tasks = [games[i // MEMBERS] for i in range(options.environments)]
    pools: dict[str, EnvPool] = {"in process": InProcessPool(world.make_env)}
    for workers in options.workers:
        pools[f"{workers} worker{'s' * (workers > 1)}"] = WorkerPool(world.make_env, workers, deadline_s=60.0)
    for pool in pools.values():
        play_s(pool, tasks, 1)  # starts the processes and loads the games
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in pools}
    for _ in range(options.rounds):
        for name, pool in pools.items():
            times[name].append(play_s(pool, tasks, options.steps))
    for pool in pools.values():
        pool.close()
    print(f"{options.environments} environments, {options.receptacles} receptacles, {options.steps} steps each")
    print(f"{'':12}{'ms/reset':>10}{'steps/s':>10}{'ratio':>8}")
    rates = {name: len(tasks) * options.steps / min(step for _, step in found) for name, found in times.items()}
    for name, found in times.items():
        reset_ms = 1e3 * min(reset for reset, _ in found) / len(tasks)
        print(f"{name:12}{reset_ms:10.3f}{rates[name]:10.0f}{rates[name] / rates['in process']:8.2f}")


if __name__ == "__main__":
    main()
