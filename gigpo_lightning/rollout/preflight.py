"""What a run will need, tried before its first iteration: tasks, room for their first prompts, a folder for rollouts.

Else the last stage of a curriculum, or the split that only the final test plays, would fail after hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import Task, TaskSet
from gigpo_lightning.policy.base import PromptFormat
from gigpo_lightning.policy.thought import thought_room
from gigpo_lightning.rollout.context import EpisodeContext, SegmentRule
from gigpo_lightning.rollout.evaluation import Place
from gigpo_lightning.rollout.pool import EnvPool
from gigpo_lightning.rollout.task_choice import check_classes

# Names the run whose rollouts lie in a folder, by the path of that run's own folder.
OWNER_FILE = "run.txt"


def check_places(
    places: Iterable[Place], stage_tasks: Callable[[Stage], TaskSet], check_task: Callable[[Task], None]
) -> None:
    """Try the first task of each stage and split.

    Args:
        places: The stages and splits.
        stage_tasks: The tasks of a stage.
        check_task: Raises `ValueError` for a task that cannot be played.

    Raises:
        ValueError: A place has no task, or none that can be played; the message names stage and split.
    """
    for stage, split in places:
        try:
            tasks = stage_tasks(stage)
            task = _first_task(tasks, split)
            check_task(task)
            if split == "train":
                check_classes(stage, task, tasks.len(split))
        except ValueError as error:
            raise ValueError(f"stage {stage.name!r}, split {split!r}: {error}") from error


def _first_task(tasks: TaskSet, split: str) -> Task:
    if split not in tasks.splits:
        raise ValueError(
            f"the task set has no such split (splits: {', '.join(tasks.splits)}); training plays `train`, validate and "
            "predict play `unseen`; trainer.limit_val_batches=0 trains without validation"
        )
    if tasks.len(split) < 1:
        raise ValueError("there is no task in it")
    return tasks.get(split, 0)


def check_first_prompt(pool: EnvPool, prompt: PromptFormat, rule: SegmentRule, answer_tokens: int, task: Task) -> None:
    """Refuse a task whose first prompt leaves no room for an answer of `answer_tokens`.

    A failure of the environment is passed over: the collection counts those.

    Raises:
        ValueError: There is no room for one, or none in it for a thought; the message names the option to raise.
    """
    (state,) = pool.reset([0], [task])
    if state.error is not None:
        return
    context = EpisodeContext(prompt, rule, state.instruction, state.observation, state.admissible, anchor=state.anchor)
    context.require_room(answer_tokens, task.id)
    if prompt.reasons and state.admissible is not None:
        longest = max(len(prompt.action_ids(action)) for action in state.admissible)
        room = thought_room(prompt, longest, answer_tokens)
        if room < 1:
            raise ValueError(
                f"data.max_action_tokens={answer_tokens} leaves no room for a thought: tags and an action of task "
                f"{task.id} take {answer_tokens - room} tokens; raise it, 256 is usual"
            )


def claim_folder(folder: Path, run: Path, resumed: bool) -> None:
    """Make `folder` and mark it as this run's: a run removes old rollouts, and must not remove those of another.

    Args:
        folder: `data.rollout_dir`.
        run: The run's own folder.
        resumed: Whether the run goes on from a checkpoint, perhaps in a new folder: it then takes over.

    Raises:
        ValueError: The folder holds another run's rollouts or cannot be written.
    """
    mark, own = folder / OWNER_FILE, str(run.absolute())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resumed:
            mark.write_text(own, encoding="utf-8")
        elif not any(folder.glob("iteration_*.arrow")):
            with suppress(FileExistsError), mark.open("x", encoding="utf-8") as file:  # of two runs only one makes it
                file.write(own)
        owner = mark.read_text(encoding="utf-8") if mark.exists() else "an unknown run"
    except OSError as error:
        raise ValueError(
            f"data.rollout_dir={folder}: cannot be written: {error.strerror}; choose another folder, or leave it out"
        ) from error
    if owner != own:
        raise ValueError(
            f"data.rollout_dir={folder}: holds the rollouts of {owner}; choose another folder, delete that one, or "
            "leave it out"
        )
