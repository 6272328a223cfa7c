"""Stages, the promotion rule, and what a bad curriculum file is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.curriculum import Stage, decide, load_stages
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.resources import shipped_files

GOOD = """\
stages:
  - name: small
    difficulty: {steps: [3, 5]}
    max_turns: 15
    promote: 0.8
  - name: large
    promote: 0.9
    window: 2
    min_iterations: 4
    rehearsal: 0.2
    demote: 0.1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_all_options_in_order(tmp_path: Path) -> None:
    small, large = load_stages(written(tmp_path, GOOD))
    assert small == Stage("small", {"steps": [3, 5]}, max_turns=15, promote=0.8)
    assert large == Stage("large", {}, promote=0.9, window=2, min_iterations=4, rehearsal=0.2, demote=0.1)


@pytest.mark.parametrize("name", shipped_files("curricula"))
def test_shipped_curricula_are_good(name: str) -> None:
    assert len(load_stages(name)) >= 1


def test_alfworld_ends_with_the_full_house() -> None:
    stages = load_stages("alfworld")
    assert stages[0].difficulty["steps"] == [3, 5]
    assert stages[-1].max_turns == 50
    assert stages[-1].difficulty == {"receptacles": 18}
    played = GeneratedTasks().narrow(stages[-1].difficulty)
    assert len({played.get("unseen", i).difficulty["type"] for i in range(60)}) == 6


def test_working_folder_comes_before_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alfworld.yaml").write_text("stages: [{name: mine}]")
    monkeypatch.chdir(tmp_path)
    assert [stage.name for stage in load_stages("alfworld.yaml")] == ["mine"]


def test_unknown_name_lists_and_suggests() -> None:
    with pytest.raises(ValueError, match=r"alfwrld.*did you mean alfworld\.yaml"):
        load_stages("alfwrld")


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("promote: 0.8", "promote: 1.2", 5, r"`promote` is 1.2, but must be a rate in \(0, 1\]"),
        ("promote: 0.8", "promote: 0", 5, "`promote` is 0"),
        ("promote: 0.8", "promote: true", 5, "`promote` is True"),
        ("promote: 0.8", "promot: 0.8", 5, "unknown key `promot`; did you mean `promote`"),
        ("window: 2", "window: 0", 8, "`window` is 0, but must be a whole number ≥ 1"),
        ("window: 2", "window: 2.5", 8, "`window` is 2.5"),
        ("min_iterations: 4", "min_iterations: -1", 9, "`min_iterations` is -1"),
        ("max_turns: 15", "max_turns: many", 4, "`max_turns` is 'many'"),
        ("rehearsal: 0.2", "rehearsal: 1.0", 10, r"`rehearsal` is 1.0, but must be a share in \[0, 1\)"),
        ("demote: 0.1", "demote: 0.9", 11, r"`demote` is 0.9, but must be a rate in \[0, 0.9\)"),
        ("name: large", "name: small", 6, "the name 'small' is used by an earlier stage"),
        ("name: large\n    promote", "promote", 6, "`name` is missing"),
        ("max_turns: 15", "rehearsal: 0.1", 4, "no earlier one to rehearse"),
        ("max_turns: 15", "demote: 0.1", 4, "no earlier one to go back to"),
        ("{steps: [3, 5]}", "[3, 5]", 3, r"`difficulty` is \[3, 5\], but must be a mapping"),
        ("{steps: [3, 5]}", "{steps: []}", 3, "a value or a list of values per knob"),
        ("- name: small", "- name: ''", 2, "`name` is ''"),
        (
            "- name: small",
            "- name: a/b",
            2,
            r"`name` is 'a/b', but must be 1 to 100 .*a–z, A–Z, 0–9, `-`, `_`, and `\.",
        ),
        ("promote: 0.8", "iterations: 0", 5, "`iterations` is 0, but must be a whole number ≥ 1, or null"),
        ("max_turns: 15", "iterations: 5", 4, "`iterations` and `promote` are both given"),
        ("promote: 0.9\n    window: 2", "iterations: 5", 7, "`iterations` and `min_iterations` are both given"),
        ("max_turns: 15", "start_turns: 3", 4, "`start_turns` needs `grow_iterations`, too"),
        ("max_turns: 15", "grow_iterations: 3", 4, "`grow_iterations` needs `start_turns`, too"),
        (
            "max_turns: 15",
            "max_turns: 15\n    grow_iterations: 2\n    start_turns: 15",
            6,
            r"`start_turns` is 15, but must be a whole number ≥ 1 and below `max_turns` \(15\)",
        ),
        (
            "promote: 0.8",
            "iterations: 3\n    start_turns: 5\n    grow_iterations: 4",
            7,
            r"`grow_iterations` is 4, but must be at most the stage's `iterations` \(3\)",
        ),
        ("max_turns: 15", "grow_iterations: 1.5", 4, "`grow_iterations` is 1.5, but must be a whole number"),
        ("max_turns: 15", "task_choice: best", 4, "`task_choice` is 'best', but must be `uniform` or `signal`"),
        ("max_turns: 15", "signal_by: [type]", 4, "`signal_by` does nothing without `task_choice: signal`"),
        ("max_turns: 15", "signal_by: type\n    task_choice: signal", 4, "`signal_by` is 'type', but must be a list"),
        ("max_turns: 15", "signal_by: []\n    task_choice: signal", 4, r"`signal_by` is \[\], but must be a list"),
        ("- name: small", "- name: ../../../evil", 2, "`name` is '../../../evil'"),
        ("- name: small", "- name: .hidden", 2, "`name` is '.hidden'"),
        ("- name: small", "- name: two words", 2, "`name` is 'two words'"),
        ("- name: small", r'- name: "a\n"', 2, r"`name` is 'a\\n'"),
        ("- name: small", "- name: " + "a" * 101, 2, "`name` is 'aaa"),
    ],
)
def test_a_bad_option_is_named_with_file_and_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"c\.yaml:{line}: stage \d: .*{message}"):
        load_stages(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one key, `stages:`"),
        ("stages: []", "the curriculum is empty"),
        ("stages:", "the curriculum is empty"),
        ("levels: []", "expected one key, `stages:`"),
        ("stages: [{name: a}]\nmore: 1", "expected one key, `stages:`"),
        ("stages: [3]", "stage 1: expected `key: value` lines"),
        ("stages: [", r"not readable as YAML[\s\S]*line 1"),
        ("stages: [{name: !!python/object/apply:os.getcwd []}]", "not readable as YAML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"c\.yaml[\s\S]*{message}"):
        load_stages(written(tmp_path, text))


def test_a_yaml_merge_may_be_overridden(tmp_path: Path) -> None:
    text = "stages:\n- &base\n  name: a\n  promote: 0.5\n- <<: *base\n  name: b\n"
    assert [(stage.name, stage.promote) for stage in load_stages(written(tmp_path, text))] == [("a", 0.5), ("b", 0.5)]


@pytest.mark.parametrize("name", ["a", "first-steps", "v1.2_b", "_", "-", "0", "a" * 100])
def test_names_that_can_be_file_names_are_good(name: str) -> None:
    assert Stage(name).name == name


STAGE = Stage("s", promote=0.8, window=2, min_iterations=2, demote=0.2)


@pytest.mark.parametrize(
    ("history", "promote", "demote", "average"),
    [
        ([], False, False, None),
        ([(0, 0)], False, False, None),
        ([(10, 10)], False, False, 1.0),  # one iteration of at least two
        ([(10, 10), (6, 10)], True, False, 0.8),  # 16 / 20: the threshold itself passes
        ([(10, 10), (5, 10)], False, False, 0.75),
        ([(10, 10), (10, 10), (5, 10)], False, False, 0.75),  # the first has left the window
        ([(10, 10), (0, 1)], True, False, 10 / 11),  # pooled; the mean of the two rates would be 0.5
        ([(10, 10), (0, 0)], True, False, 1.0),  # an iteration without own episodes changes nothing
        ([(2, 10), (2, 10)], False, False, 0.2),  # demotion needs less than the threshold
        ([(2, 10), (1, 10)], False, True, 0.15),
    ],
)
def test_decision(history: list[tuple[int, int]], promote: bool, demote: bool, average: float | None) -> None:
    decision = decide(STAGE, history)
    assert (decision.promote, decision.demote, decision.average) == (promote, demote, average)
    assert decision.why


def test_without_demote_a_stage_is_never_left_downwards() -> None:
    assert not decide(Stage("s", min_iterations=1), [(0, 10)] * 9).demote


def test_a_fixed_schedule_asks_for_iterations_only() -> None:
    stage = Stage("s", iterations=3)
    assert [decide(stage, [(10, 10)] * n).promote for n in (1, 2, 3, 4)] == [False, False, True, True]
    assert decide(stage, [(0, 0)] * 3).promote  # not one episode of the stage


def test_the_turn_limit_grows_to_its_full_length_and_no_further() -> None:
    # 30 − 10 = 20 turns in 8 iterations: 2.5 each, rounded down
    stage = Stage("s", max_turns=30, start_turns=10, grow_iterations=8)
    assert [stage.turn_limit(n) for n in range(11)] == [10, 12, 15, 17, 20, 22, 25, 27, 30, 30, 30]
    assert Stage("s", max_turns=30).turn_limit(0) == 30


def test_a_horizon_that_still_grows_is_no_reason_for_a_demotion() -> None:
    stage = Stage("s", window=2, min_iterations=1, demote=0.2, max_turns=9, start_turns=3, grow_iterations=3)
    # The iterations 0, 1 and 2 are shortened; from the fifth on the two that count are not.
    assert [decide(stage, [(0, 10)] * n).demote for n in range(1, 7)] == [False] * 4 + [True] * 2
    assert decide(stage, [(10, 10)] * 2).promote  # what is won in few turns counts


counts = st.lists(st.integers(0, 20).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=8)


@given(counts, counts)
def test_only_the_window_decides_once_the_minimum_is_met(
    older: list[tuple[int, int]], recent: list[tuple[int, int]]
) -> None:
    stage = Stage("s", window=3, min_iterations=1, demote=0.1)
    tail = [*recent, (1, 2), (1, 2), (1, 2)][-3:]
    assert decide(stage, older + tail) == decide(stage, tail)


@given(counts)
def test_winning_more_never_undoes_a_promotion(history: list[tuple[int, int]]) -> None:
    stage = Stage("s", promote=0.6, window=4, min_iterations=2)
    better = [(min(won + 1, played), played) for won, played in history]
    assert decide(stage, better).promote >= decide(stage, history).promote
