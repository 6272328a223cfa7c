"""Environments in worker processes: many per process, one message per process and call, and none that can stop the run.

A worker that dies, or stays too long in one environment, is killed and replaced. Its episodes end with an error, those
of the other workers go on. Inside a worker an `InProcessPool` does the work. Imports nothing heavy, as workers load it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, Literal, NoReturn

from gigpo_lightning.envs.base import Task, TextEnv
from gigpo_lightning.rollout.pool import EnvState, InProcessPool

START_S = 300.0  # importing a world can be slow; only a worker that is stuck takes so long
CLOSE_S = 5.0  # for environments to close by themselves before their process is killed
ORPHAN_S = 1.0  # the same, once the trainer is gone
READY = "ready"
GOODBYE = b""
# States travel as plain tuples: pickled five times as fast as dataclasses.
_as_tuple = attrgetter(*(field.name for field in fields(EnvState)))
# A forked child would inherit torch's locks without the threads that release them.
_spawn = multiprocessing.get_context("spawn")


class WorkerPool:
    """An `EnvPool` over worker processes: slot i lives in worker i % workers. Processes start when first used.

    Args:
        make_env: Makes an environment; picklable, as all that tasks, observations and anchors hold.
        workers: Number of processes, at least 1.
        deadline_s: The longest that one reset or step of one environment may take, in seconds. Making an environment,
            when its slot is first used, is part of the reset.

    Raises:
        ValueError: An argument is out of range, or `make_env` cannot be pickled. `reset` and `step` raise it, too, when
            environments cannot be made in a worker or what they exchange cannot be pickled.
    """

    is_elsewhere = True

    def __init__(self, make_env: Callable[[], TextEnv], workers: int, deadline_s: float):
        if workers < 1:
            raise ValueError(f"env_workers={workers}: must be at least 1 here; without workers, use an InProcessPool")
        if not deadline_s > 0:
            raise ValueError(f"env_deadline_s={deadline_s}: must be positive")
        self._make_env = _pickled(make_env, f"env_workers={workers}: environments are made by {make_env!r}, which")
        self._count, self._deadline_s = workers, deadline_s
        self._workers: list[_Worker] = []
        # of what is under way: states that are known, by place; the places that each worker answers for
        self._states: dict[int, EnvState] = {}
        self._shares: dict[int, list[int]] = {}

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[EnvState]:
        """Start `tasks[i]` in slot `slots[i]`. A failure of the world is a state with `error`."""
        self._ask("reset", slots, tasks)
        return self.receive()

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> list[EnvState]:
        """Take `actions[i]` in slot `slots[i]`. A slot whose worker was replaced has an error until its next reset."""
        self.send(slots, actions)
        return self.receive()

    def send(self, slots: Sequence[int], actions: Sequence[str]) -> None:
        """The first half of `step`: the workers start."""
        self._ask("step", slots, actions)

    def receive(self) -> list[EnvState]:
        """The second half: gather the answers, in the order of what was asked."""
        try:
            for number, share in self._shares.items():
                self._states.update(zip(share, self._answers(number), strict=True))
        except BaseException:
            self.close()
            raise
        return [self._states[position] for position in range(len(self._states))]

    def close(self) -> None:
        """Close all environments and end the processes. A later `reset` starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.say_goodbye()
        end = time.monotonic() + CLOSE_S
        for worker in workers:
            worker.end(wait_s=max(0.0, end - time.monotonic()))

    def _ask(self, kind: Literal["reset", "step"], slots: Sequence[int], values: Sequence[Any]) -> None:
        """Give every worker its share."""
        if not self._workers:
            self._workers = [_Worker(number, self._make_env) for number in range(self._count)]
        self._states, self._shares = {}, {}
        for position, (slot, _) in enumerate(zip(slots, values, strict=True)):
            number = slot % self._count
            if kind == "step" and slot not in self._workers[number].slots:
                error = f"slot {slot} has no episode: its worker process {number} is new, reset it first"
                self._states[position] = EnvState(error=error, lost=True)
            else:
                self._shares.setdefault(number, []).append(position)
        try:
            for number, share in self._shares.items():
                self._workers[number].ask(kind, [slots[p] for p in share], [values[p] for p in share])
        except BaseException:
            self.close()  # else answers under way would be taken for those of the next call
            raise

    def _answers(self, number: int) -> list[EnvState]:
        worker = self._workers[number]
        try:
            return worker.answers(self._deadline_s)
        except (EOFError, OSError) as error:
            late = f"did not answer within env_deadline_s={self._deadline_s:g}"
            states = worker.fail(late if isinstance(error, TimeoutError) else "")
            self._workers[number] = _Worker(number, self._make_env)  # is up by the time it is asked, or is waited for
            return states


class _Worker:
    """This process's side of one worker process, from its start to its end."""

    def __init__(self, number: int, make_env: bytes):
        self.slots: set[int] = set()  # those that were reset in this process
        self._number = number
        self._asked: tuple[str, Sequence[int], Sequence[Any]] = ("", (), ())
        self._ready = False
        # Shared: when the worker turned to the environment that it is in, and that one's place in the batch.
        self._turned = _spawn.RawArray("d", 2)
        self._connection, theirs = _spawn.Pipe()
        self._process = _spawn.Process(
            target=serve, args=(theirs, make_env, self._turned), name=f"environments-{number}", daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, kind: str, slots: Sequence[int], values: Sequence[Any]) -> None:
        """Send a batch. That the worker has died is noticed when it should answer."""
        self._await_start()
        self._asked = (kind, slots, values)
        self.slots.update(slots)
        message = _pickled(self._asked, f"env_workers: each {kind} is sent to a worker process, but this one")
        self._turned[:] = (time.monotonic(), 0)
        with suppress(OSError):
            self._connection.send_bytes(message)

    def answers(self, deadline_s: float) -> list[EnvState]:
        """The states after what was asked.

        Raises:
            TimeoutError: It is in the same environment for longer than `deadline_s`.
            EOFError, OSError: It died.
            ValueError: It cannot make environments, or cannot send what they say.
        """
        while not self._connection.poll(max(0.0, self._turned[0] + deadline_s - time.monotonic())):
            if time.monotonic() >= self._turned[0] + deadline_s:
                raise TimeoutError
        reply = self._connection.recv()
        if isinstance(reply, str):
            self._refuse(reply)
        return [EnvState(*values) for values in reply]

    def fail(self, late: str) -> list[EnvState]:
        """End the process and say what went wrong (`late`, or it died): one state is at fault, the others are lost."""
        kind, slots, values = self._asked
        exit_code = self.end(wait_s=0.0 if late else 1.0)
        what = f"{late} and was killed" if late else f"died ({_exit_text(exit_code)})"
        culprit = int(self._turned[1])
        doing = f"action {values[culprit]!r}" if kind == "step" else f"reset of task {values[culprit].id}"
        cause = f"worker process {self._number} {what} at slot {slots[culprit]}, {doing}"
        return [
            EnvState(error=cause) if place == culprit else EnvState(error=f"slot {slot} is lost: {cause}", lost=True)
            for place, slot in enumerate(slots)
        ]

    def say_goodbye(self) -> None:
        """Ask the process to close its environments and end."""
        with suppress(OSError):
            self._connection.send_bytes(GOODBYE)

    def end(self, wait_s: float) -> int | None:
        """End the process, by force after `wait_s`; returns its exit code."""
        self._process.join(wait_s)
        self._process.kill()
        self._process.join()
        exit_code = self._process.exitcode
        self._process.close()
        self._connection.close()
        return exit_code

    def _await_start(self) -> None:
        if self._ready:
            return
        try:
            reply = (
                self._connection.recv() if self._connection.poll(START_S) else f"it is not ready after {START_S:g} s"
            )
        except (EOFError, OSError):
            self._process.join(1.0)
            reply = (
                f"it ended while starting ({_exit_text(self._process.exitcode)}), see its own message above. Workers "
                "import the script that was started: what it does must stand under `if __name__ == '__main__':`"
            )
        if reply != READY:
            self._refuse(reply)
        self._ready = True

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(
            f"env_workers: worker process {self._number} cannot play: {reason} (env_workers: 0 plays without workers)"
        )


def serve(connection: Connection, make_env: bytes, turned: Any) -> None:
    """What a worker process does: answer message after message, until told to end or left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pool = InProcessPool(pickle.loads(make_env))
    except Exception as error:  # noqa: BLE001 - a world's code: told to the trainer, which raises it
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(READY)
    with suppress(EOFError, OSError):  # the trainer is gone
        while (message := connection.recv_bytes()) != GOODBYE:
            connection.send_bytes(_answer(pool, message, turned))
    pool.close()


def _answer(pool: InProcessPool, message: bytes, turned: Any) -> bytes:
    """The pickled states, or a pickled text that says why there are none."""
    try:
        kind, slots, values = pickle.loads(message)
        act: Callable[..., list[EnvState]] = pool.reset if kind == "reset" else pool.step
        answers: list[tuple[Any, ...]] = []
        for place, (slot, value) in enumerate(zip(slots, values, strict=True)):
            turned[:] = (time.monotonic(), place)  # the same clock in all processes of a machine
            answers += map(_as_tuple, act([slot], [value]))
        return pickle.dumps(answers, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - a world's code: told to the trainer, which raises it
        return pickle.dumps(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    """Once the trainer is gone, leave even in the midst of a step."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        time.sleep(ORPHAN_S)
        os._exit(1)


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{what} cannot be pickled ({error}). Define classes and functions at the top level of a module and keep "
            "lambdas, locks and open files out of them, or set env_workers: 0"
        ) from error


def _exit_text(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"signal {-exit_code}, {signal.strsignal(-exit_code)}"
    return f"exit code {exit_code}"
