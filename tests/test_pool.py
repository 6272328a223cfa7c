"""Worker processes say exactly what environments in this process say, and no environment can stop or hang the run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.base import Task, TaskSet
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.pool import EnvPool, EnvState, InProcessPool
from gigpo_lightning.rollout.workers import WorkerPool
from gigpo_lightning.trajectory import Episode
from tests.fatal_world import SlowEnv, TrickEnv, UnsendableEnv, impossible_env
from tests.toy_world import BoxEnv, BoxTasks

TASKS = BoxTasks(4)
ROOT = Path(__file__).parents[1]


def task(task_id: str = "") -> Task:
    one = TASKS.get("train", 0)
    return Task(task_id or one.id, one.split, one.difficulty, one.payload)


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[WorkerPool]:
    """Two workers whose processes all tests may use, and which each test leaves in working order."""
    pool = WorkerPool(TrickEnv, workers=2, deadline_s=1.0)
    yield pool
    pool.close()


@pytest.fixture
def pool(shared_pool: WorkerPool) -> WorkerPool:
    """Four fresh episodes: slots 0 and 2 in worker 0, slots 1 and 3 in worker 1."""
    states = shared_pool.reset([0, 1, 2, 3], [task()] * 4)
    assert [s.error for s in states] == [None] * 4
    return shared_pool


def walk(pool: EnvPool, tasks: TaskSet, slots: int, steps: int) -> list[list[EnvState]]:
    """Episodes of random admissible actions, a part of the slots at a time and in no order; new ones where one ends."""
    rng, states, history, started = random.Random(0), {}, [], 0
    for _ in range(steps):
        chosen = rng.sample(range(slots), rng.randint(1, slots))
        fresh = [s for s in chosen if s not in states or not states[s].admissible]
        acting = [s for s in chosen if s not in fresh]
        found = pool.reset(fresh, [tasks.get("train", (started + i) // 2) for i in range(len(fresh))])
        started += len(fresh)
        found += pool.step(acting, [rng.choice(states[s].admissible or ()) for s in acting])
        states.update(zip(fresh + acting, found, strict=True))
        history.append(found)
    return history


@pytest.mark.parametrize(
    ("tasks", "workers"),
    [(TASKS, 1), (TASKS, 3), (GeneratedTasks(difficulty={"receptacles": [4, 8], "steps": [3, 8]}), 2)],
)
def test_workers_say_what_environments_in_this_process_say(tasks: TaskSet, workers: int) -> None:
    pool = WorkerPool(tasks.make_env, workers, deadline_s=60.0)
    found = walk(pool, tasks, slots=7, steps=40)
    pool.close()
    assert found == walk(InProcessPool(tasks.make_env), tasks, slots=7, steps=40)
    assert len({state.observation for states in found for state in states}) > 3
    assert all(state.error is None for states in found for state in states)


def test_the_collector_plays_the_same_episodes() -> None:
    """Workers answer one decoding step later, whatever their number and speed: equal bits among themselves. Against
    environments in this process other rows are decoded together, which moves log-probs in their last bits."""
    policy = ScratchPolicy(hidden_size=32, layers=1, initializer_range=0.2)
    policy.prepare(TASKS)

    def play(pool: EnvPool) -> dict[int, Episode]:
        jobs = [EpisodeJob(TASKS.get("train", i // 2), 4, (7, i)) for i in range(12)]
        episodes = dict(Collector(policy.eval(), pool, SegmentRule(max_tokens=200), rows=5).run(jobs, 1.3))
        pool.close()
        return episodes

    def tokens(episodes: dict[int, Episode]) -> list[list[int]]:
        return [s.token_ids for i in sorted(episodes) for s in episodes[i].segments]

    def logprobs(episodes: dict[int, Episode]) -> list[float]:
        return [p for i in sorted(episodes) for s in episodes[i].segments for p in s.logprobs]

    two, here = play(WorkerPool(TASKS.make_env, 2, 60.0)), play(InProcessPool(TASKS.make_env))
    assert two == play(WorkerPool(TASKS.make_env, 3, 60.0))
    assert tokens(two) == tokens(here)
    assert logprobs(two) == pytest.approx(logprobs(here), abs=1e-5)


def make_trainer(folder: Path, callback: pl.Callback, max_epochs: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        default_root_dir=folder,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )


def test_a_fit_learns_the_same_with_workers_and_leaves_none(tmp_path: Path) -> None:
    others, counts = set(multiprocessing.active_children()), []

    class Watch(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            counts.append(len(set(multiprocessing.active_children()) - others))

    def fit(env_workers: int) -> list[torch.Tensor]:
        pl.seed_everything(0)
        data = RolloutDataModule(BoxTasks(3), groups=2, members=4, rows=8, max_turns=3, env_workers=env_workers)
        module = GiGPOModule(ScratchPolicy(hidden_size=32, layers=1), kl_coef=0.0)
        trainer = make_trainer(tmp_path, Watch(), max_epochs=2)
        trainer.fit(module, datamodule=data)
        return [parameter.detach().clone() for parameter in module.policy.parameters()]

    for expected, found in zip(fit(0), fit(2), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)  # four steps of 1e-3 each
    assert counts == [0, 2]
    assert set(multiprocessing.active_children()) == others


def test_a_fit_that_fails_leaves_no_workers(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())

    class Fail(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            assert len(set(multiprocessing.active_children()) - others) == 1
            raise RuntimeError("out of luck")

    data = RolloutDataModule(BoxTasks(3), groups=1, members=2, max_turns=3, env_workers=1)
    trainer = make_trainer(tmp_path, Fail(), max_epochs=1)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(GiGPOModule(ScratchPolicy(hidden_size=32, layers=1), kl_coef=0.0), datamodule=data)
    assert set(multiprocessing.active_children()) == others


@pytest.mark.parametrize(("option", "value"), [("env_workers", -1), ("env_deadline_s", 0.0)])
def test_the_datamodule_checks_its_options(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.{option}={value}: must be"):
        RolloutDataModule(TASKS, **{option: value})


def test_a_slot_lives_in_its_worker_and_many_share_one(pool: WorkerPool) -> None:
    pids = [state.observation for state in pool.step([0, 1, 2, 3], ["pid"] * 4)]
    assert pids[0] == pids[2] != pids[1] == pids[3]
    assert str(os.getpid()) not in pids


def test_an_error_of_one_environment_is_its_own(pool: WorkerPool) -> None:
    states = pool.step([0, 2], ["raise", "open box 1"])
    assert states[0].error == f"step 'raise' of task {task().id}: OSError: the lights went out"
    assert "fatal_world.py" in states[0].trace  # where it happened comes along
    assert states[1].error is None
    states = pool.reset([1, 3], [task("refused"), task()])
    assert states[0].error == "reset of task refused: OSError: no such box"
    assert not states[0].lost
    assert states[1].error is None


def test_a_worker_that_dies_takes_only_its_own_slots(pool: WorkerPool) -> None:
    before = pool.step([0, 1], ["pid", "pid"])
    states = pool.step([0, 1, 2, 3], ["open box 1", "open box 1", "exit", "open box 1"])
    assert [s.error is None for s in states] == [False, True, False, True]
    assert states[2].error == "worker process 0 died (exit code 7) at slot 2, action 'exit'"
    assert states[0].error == f"slot 0 is lost: {states[2].error}"
    assert [s.lost for s in states] == [True, False, False, False]
    # Both slots of the dead worker have to be reset; those of the other one go on.
    states = pool.step([2, 3, 0], ["open box 2"] * 3)
    assert [s.error is None for s in states] == [False, True, False]
    assert "slot 2 has no episode: its worker process 0 is new, reset it first" in (states[0].error or "")
    assert states[0].lost
    assert states[2].lost
    assert pool.reset([0], [task()])[0].error is None
    after = pool.step([0, 1, 2], ["pid", "pid", "pid"])
    assert after[0].observation != before[0].observation
    assert after[1].observation == before[1].observation
    assert after[2].error is not None


def test_a_worker_that_dies_in_a_reset_or_between_calls_is_replaced(pool: WorkerPool) -> None:
    states = pool.reset([1, 0], [task("fatal"), task()])
    assert states[0].error == "worker process 1 died (exit code 9) at slot 1, reset of task fatal"
    assert states[1].error is None
    os.kill(int(pool.step([0], ["pid"])[0].observation), signal.SIGKILL)
    # Nobody is at fault: the failure is counted once, at the first slot that is asked.
    states = pool.step([2, 0], ["open box 1"] * 2)
    assert states[0].error == "worker process 0 died (signal 9, Killed) at slot 2, action 'open box 1'"
    assert [s.lost for s in states] == [False, True]


def test_a_worker_that_hangs_is_killed_at_its_deadline(pool: WorkerPool) -> None:
    pid = int(pool.step([1], ["pid"])[0].observation)
    begin = time.monotonic()
    states = pool.step([0, 1, 3], ["open box 1", "sleep", "open box 1"])
    assert 1.0 <= time.monotonic() - begin < 10.0
    assert states[0].error is None
    cause = "worker process 1 did not answer within env_deadline_s=1 and was killed at slot 1, action 'sleep'"
    assert states[1].error == cause
    assert states[2].error == f"slot 3 is lost: {cause}"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert pool.reset([1, 3], [task()] * 2) == InProcessPool(TrickEnv).reset([1, 3], [task()] * 2)


def test_the_deadline_is_for_one_environment_not_for_the_batch() -> None:
    pool = WorkerPool(SlowEnv, workers=1, deadline_s=1.0)
    pool.reset(range(4), [task()] * 4)
    assert [s.error for s in pool.step(range(4), ["open box 1"] * 4)] == [None] * 4  # 1.6 s together
    pool.close()


def test_closing_leaves_no_process_and_the_pool_can_be_used_again() -> None:
    others = set(multiprocessing.active_children())
    pool = WorkerPool(TrickEnv, workers=2, deadline_s=60.0)
    assert set(multiprocessing.active_children()) == others  # nothing runs before it is needed
    pool.reset([0, 1], [task()] * 2)
    pids = [int(state.observation) for state in pool.step([0, 1], ["pid"] * 2)]
    assert len(set(multiprocessing.active_children()) - others) == 2
    pool.close()
    assert set(multiprocessing.active_children()) == others
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # not even a zombie
            os.kill(pid, 0)
    assert pool.step([0], ["open box 1"])[0].lost
    assert pool.reset([0], [task()])[0].error is None
    pool.close()
    pool.close()


def test_what_cannot_be_pickled_is_told_before_and_after_the_fact() -> None:
    others = set(multiprocessing.active_children())

    class LocalEnv(BoxEnv):
        pass

    with pytest.raises(ValueError, match=r"env_workers=2: .*LocalEnv.* cannot be pickled .*env_workers: 0"):
        WorkerPool(LocalEnv, workers=2, deadline_s=1.0)
    pool = WorkerPool(UnsendableEnv, workers=1, deadline_s=60.0)
    with pytest.raises(ValueError, match=r"worker process 0 cannot play: .*lambda.*env_workers: 0"):
        pool.reset([0], [task()])
    with pytest.raises(ValueError, match=r"each reset is sent to a worker process, but this one cannot be pickled"):
        pool.reset([0], [Task("t", "train", {}, lambda: None)])
    assert set(multiprocessing.active_children()) == others


def test_environments_that_cannot_be_made_stop_the_run() -> None:
    pool = WorkerPool(impossible_env, workers=1, deadline_s=60.0)
    with pytest.raises(ValueError, match="cannot play: RuntimeError: no environment today"):
        pool.reset([0], [task()])


@pytest.mark.parametrize(("workers", "deadline_s", "name"), [(0, 1.0, "env_workers=0"), (1, 0.0, "env_deadline_s=0.0")])
def test_bad_arguments(workers: int, deadline_s: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        WorkerPool(BoxEnv, workers, deadline_s)


def start_script(folder: Path, body: str, *, guarded: bool = True) -> subprocess.Popen[str]:
    """A script that starts a pool of two workers, prints their process ids, and goes on with `body`."""
    lines = [
        "pool = WorkerPool(TrickEnv, workers=2, deadline_s=60.0)",
        "pool.reset([0, 1], [BoxTasks().get('train', 0)] * 2)",
        "print(*[state.observation for state in pool.step([0, 1], ['pid'] * 2)], flush=True)",
        body,
    ]
    head = "if __name__ == '__main__':" if guarded else "if True:"
    imports = [
        "from gigpo_lightning.rollout.workers import WorkerPool",
        "from tests.fatal_world import TrickEnv",
        "from tests.toy_world import BoxTasks",
    ]
    (folder / "script.py").write_text("\n".join([*imports, head, *(f"    {line}" for line in lines)]))
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def wait_for_end(pids: list[int]) -> None:
    """Return once none of the processes runs; fail after 20 s."""
    end = time.monotonic() + 20.0
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < end, "worker processes outlived their trainer"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether the process is there. One that nobody has waited for yet (in a container nobody may) has ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("body", "code"), [("pass", 0), ("raise RuntimeError('over')", 1), ("pool.step([0], ['sleep'])", -9)]
)
def test_workers_end_with_their_trainer(tmp_path: Path, body: str, code: int) -> None:
    with start_script(tmp_path, body) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 2
        if code == -9:
            assert all(runs(pid) for pid in pids)
            script.kill()  # in the midst of a step, without a chance to tidy up
        script.communicate(timeout=60)
        assert script.returncode == code
    wait_for_end(pids)


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    with start_script(tmp_path, "pass", guarded=False) as script:
        _, errors = script.communicate(timeout=60)
    assert "cannot play: it ended while starting (exit code 1)" in errors
    assert "must stand under `if __name__ == '__main__':`" in errors


def test_workers_load_neither_torch_nor_lightning() -> None:
    code = "import sys, gigpo_lightning.rollout.workers\nprint({'torch', 'lightning', 'numpy'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout == "set()\n"
