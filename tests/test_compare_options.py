"""The command line of `compare` and its files of variants: what they mean, and what is refused with which words."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from gigpo_lightning import __main__
from gigpo_lightning.compare.options import Budget, parse, parse_budget, parse_seeds
from gigpo_lightning.compare.variants import collect, edit_callbacks, read_variants
from gigpo_lightning.resources import find_file, shipped_files


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20m", Budget(seconds=1200)),
        ("1.5h", Budget(seconds=5400)),
        ("90s", Budget(seconds=90)),
        ("300000steps", Budget(env_steps=300_000)),
        ("300_000 steps", Budget(env_steps=300_000)),
        ("2.5ksteps", Budget(env_steps=2500)),
    ],
)
def test_a_budget_is_a_time_or_a_number_of_steps(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text",
    ["", "20", "m", "0m", "-5m", "0steps", "0.1steps", "20 minutes", "5km", "infm", "99999999999h", "9" * 400 + "s"],
)
def test_a_bad_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--budget .*give a positive time, 20m"):
        parse_budget(text)


def test_seeds_are_a_number_or_a_list() -> None:
    assert (parse_seeds("3"), parse_seeds("7,3"), parse_seeds("4,")) == ((0, 1, 2), (7, 3), (4,))


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "", "3,x", "99999999", "1,4294967296"])
def test_bad_seeds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--seeds"):
        parse_seeds(text)


def test_what_is_not_ours_goes_to_fit() -> None:
    options = parse(["--config", "a.yaml", "--variants=lambda", "--data.groups", "4", "--seeds", "2", "--model.lr=-1"])
    assert options.fit == ("--config", "a.yaml", "--data.groups", "4", "--model.lr=-1")
    assert (options.variants, options.seeds, options.jobs, options.budget) == (("lambda",), (0, 1), 1, Budget())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to compare: give --algorithms"),
        (["--algorithms", "a", "--alogrithms", "b"], "unknown option --alogrithms; did you mean --algorithms?"),
        (["--algorithms", "a", "--data.seed=3"], "--data.seed: not for compare: --seeds chooses the seeds"),
        (["--algorithms", "a", "--seed_everything", "3"], "--seed_everything: not for compare"),
        (["--algorithms", "a", "--trainer.default_root_dir=x"], "--out chooses the folder"),
        (["--algorithms", "a", "--ckpt_path=last"], "goes on when the same command is given again"),
        (["--algorithms", "a,,b"], "--algorithms a,,b: a name is missing"),
        (["--algorithms", "a,b,a"], "--algorithms a,b,a: a is given twice"),
        (["--algorithms", "a", "--jobs", "0"], "--jobs 0: must be a whole number of at least 1"),
        (["--algorithms", "a", "--checks", "some"], "--checks some: must be a whole number"),
        (["--algorithms", "a", "--threshold", "1.5"], "--threshold 1.5: must be a success rate"),
        (["--algorithms", "a", "--threshold", "nan"], "--threshold nan: must be a success rate"),
        (["--algorithms"], "--algorithms: expected one argument"),
        (["--algorithms", "a", "--seeds", "0"], "--seeds 0: give how many, at least 1"),
        (["--algorithms", "a", "--seeds="], "--seeds : give how many, at least 1"),
    ],
)
def test_bad_command_lines_are_refused_in_one_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        __main__.main(["compare", *args])
    said = capsys.readouterr().err
    assert end.value.code == 2 and message in said and said.startswith("error: ") and said.count("\n") == 1


def test_an_unknown_algorithm_lists_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"--algorithms: 'gripo' is unknown.*there are: .*algorithm/gripo.yaml"):
        collect(["gripo"], [])
    with pytest.raises(ValueError, match=r"--algorithms: '\.\./policy/smollm2-135m' is unknown"):
        collect(["../policy/smollm2-135m"], [])  # a file that there is
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("data: {members: 4}\n")
    (variant,) = collect(["mine"], [])
    assert (variant.name, variant.options) == ("mine", ("--config=algorithm/mine.yaml",))


@pytest.mark.parametrize("name", shipped_files("configs/ablations"))
def test_every_shipped_ablation_has_at_least_two_variants(name: str) -> None:
    assert len(read_variants(find_file("configs/ablations", name.removesuffix(".yaml")))) >= 2


def test_ablations_are_not_configurations_of_fit() -> None:
    assert not [name for name in shipped_files("configs") if "ablations" in name]


def test_the_forms_of_a_variant(tmp_path: Path) -> None:
    path = tmp_path / "v.yaml"
    path.write_text(
        "plain:\n"
        "list: [--data.members=4]\n"
        "whole:\n"
        "  label: all of it\n"
        "  configs: [algorithm/grpo.yaml]\n"
        "  options: {data.lam: 0.5, data.engine: null, data.constrain: true, data.evaluation.stages: [a, b]}\n"
        "  callbacks: {LambdaDecay: null, Curriculum: {start: 1}}\n"
    )
    plain, listed, whole = read_variants(path)
    assert (plain.name, plain.label, plain.options, plain.callbacks) == ("plain", "plain", (), {})
    assert listed.options == ("--data.members=4",)
    assert whole.label == "all of it" and whole.callbacks == {"LambdaDecay": None, "Curriculum": {"start": 1}}
    assert whole.options == (
        "--config=algorithm/grpo.yaml",
        "--data.lam=0.5",
        "--data.engine=null",
        "--data.constrain=true",
        "--data.evaluation.stages=[a, b]",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {option: [x]}", "a: unknown key option; did you mean options?"),
        ("a: 3", "a: expected label, configs, options, callbacks"),
        ("0.5: {}", "0.5: the name of a variant"),
        ("../a: {}", "the name of a variant"),
        ("a: {options: [3]}", "lists of texts"),
        ("a: {callbacks: [LambdaDecay]}", "callbacks are class names with their options"),
        ("[a]", "expected `key: value` lines"),
        ("a: [", "not readable as YAML"),
        ("a: {}\nb: {}\na: {options: {data.members: 4}}", "v.yaml:3: `a` is given twice"),
        ("a: {options: {data.members: 4, data.members: 8}}", "`data.members` is given twice"),
        ("a: {options: {data.seed: 4}}", "a: --data.seed: not for compare: --seeds chooses"),
        ("a: [--seed_everything=4]", "a: --seed_everything: not for compare"),
        ("a: {options: {trainer.default_root_dir: x}}", "--out chooses the folder"),
        ("a: [--print_config]", "a: --print_config: not for compare"),
        ("a: [--help]", "a: --help: not for compare"),
        ("plan.json: {}", "plan.json: the comparison has a file of that name"),
    ],
)
def test_bad_variants_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "v.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"--variants .*v\.yaml") as error:
        read_variants(path)
    assert message in str(error.value)


def test_two_variants_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text("same: {}\n")
    with pytest.raises(ValueError, match="two variants of the name same"):
        collect([], [str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml")])
    with pytest.raises(ValueError, match=r"--variants lamda: no such file.*did you mean lambda.yaml"):
        collect([], ["lamda"])


def test_callbacks_are_changed_added_and_left_out() -> None:
    listed: list[dict[str, Any]] = [
        {"class_path": "x.Curriculum", "init_args": {"curriculum": "a", "start": 0}},
        {"class_path": "x.LambdaDecay"},
        {"class_path": "x.TensorBoardViews", "init_args": {}},
        {"class_path": "x.IterationCheckpoint"},
    ]
    edited = edit_callbacks(listed, {"Curriculum": {"start": 2}, "LambdaDecay": None, "y.StepBudget": {"env_steps": 5}})
    assert edited == [
        {"class_path": "x.Curriculum", "init_args": {"curriculum": "a", "start": 2}},
        {"class_path": "y.StepBudget", "init_args": {"env_steps": 5}},  # before those that use what others decide
        {"class_path": "x.TensorBoardViews", "init_args": {}},
        {"class_path": "x.IterationCheckpoint"},
    ]
    assert listed[0]["init_args"] == {"curriculum": "a", "start": 0}  # untouched
    assert edit_callbacks(listed, {"LambdaDecay": {"start": 1.0}})[1]["init_args"] == {"start": 1.0}
    assert edit_callbacks([], {"A": {}}) == [{"class_path": "A", "init_args": {}}]
    with pytest.raises(
        ValueError, match=r"LambdaDecai is to be left out.*did you mean LambdaDecay\? \(there are: Curr"
    ):
        edit_callbacks(listed, {"LambdaDecai": None})


def test_the_page_shows_commands_variants_and_columns_that_are_there(tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "compare.md"
    if not page.is_file():
        pytest.skip("needs the source checkout")
    text = page.read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("python -m gigpo_lightning compare")]
    options = parse(shlex.split(line)[4:])
    assert collect(options.algorithms, options.variants) and options.budget == Budget(env_steps=300_000)
    (variants,) = re.findall(r"^```\n(half:.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "v.yaml").write_text(variants, encoding="utf-8")
    half, short = read_variants(tmp_path / "v.yaml")
    assert (half.label, short.options) == ("λ = 0.5", ("--data.members=4",)) and half.callbacks["AnchorLibrary"] is None
    (shipped,) = re.findall(r"among the shipped ones:\n(.*?)\. Several", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", shipped)) == {
        name.removesuffix(".yaml") for name in shipped_files("configs/ablations")
    }
