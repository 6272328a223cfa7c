"""Episodes as text for people: what was read, what was done, and what each turn earned."""

from __future__ import annotations

from collections.abc import Sequence

from gigpo_lightning.trajectory import Episode


def transcript(episode: Episode, notes: Sequence[str] | None = None) -> str:
    """The episode turn by turn, `notes[i]` beside the action of turn i; an answer that says more stands above it."""
    lines = [f"task: {episode.instruction}  [{episode.task_id}]", ""]
    for number, turn in enumerate(episode.turns):
        flags = "" if turn.valid else "  (invalid)"
        flags += "" if turn.well_formed else "  (ill-formed)"
        note = f"    | {notes[number]}" if notes else f"    | reward {turn.reward:g}" if turn.reward else ""
        answer = [f"     : {line}" for line in turn.answer.splitlines()]
        lines += [turn.observation, *answer, f"  {number + 1:>2} > {turn.action}{flags}{note}"]
    age = f", borrowed from {episode.age} iterations ago" if episode.age else ""
    lines.append(f"[{'won' if episode.won else 'not won'}, {episode.end.value}, {len(episode.turns)} turns{age}]")
    return "\n".join(lines)


def credit_notes(
    episode: Episode, step_groups: Sequence[int], group_sizes: Sequence[int], advantages: Sequence[float]
) -> list[str]:
    """For each turn its reward, step group with its size, and advantage."""
    return [
        f"reward {turn.reward:g}  step group {group} ×{size}  advantage {advantage:+.3f}"
        for turn, group, size, advantage in zip(episode.turns, step_groups, group_sizes, advantages, strict=True)
    ]
