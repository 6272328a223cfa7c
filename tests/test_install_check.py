"""The command `check`: an installation in order passes; each broken part is named with what to do, the rest goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gigpo_lightning
from gigpo_lightning import __main__
from gigpo_lightning import cli_install_check as check
from gigpo_lightning import cli_install_devices as devices
from gigpo_lightning import cli_install_parts as installed
from gigpo_lightning.cli_install_parts import Problem

ROOT = Path(gigpo_lightning.__file__).parent.parent
ONES = torch.ones
REQUIRED = ["python", *installed.LIGHTNING, *installed.LIBRARIES, "configurations", "runs folder", "training on cpu"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the two slowest parts, for tests of the others."""
    monkeypatch.setattr(devices, "training", lambda accelerator: "left out")
    monkeypatch.setattr(devices, "four_bit", lambda: "left out")


def versions(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None]) -> None:
    """Let these distributions have another version, or None: not be there."""
    version = metadata.version

    def changed_version(name: str) -> str:
        found = changed.get(name, "") if name in changed else version(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", changed_version)


def findings(runs_dir: Path = Path("runs")) -> dict[str, check.Finding]:
    return {finding.part: finding for finding in check.examine(runs_dir)}


# -- in order ----------------------------------------------------------------------------------------------------------


def test_this_installation_is_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["check", "--runs_dir", str(tmp_path / "new" / "runs")]) == 0
    lines = [text for text in capsys.readouterr().out.splitlines() if not text.startswith(" ")]
    assert [text.split("  ")[0] for text in lines[: len(REQUIRED)]] == ["ok"] * len(REQUIRED)
    assert "2 episodes" in lines[len(REQUIRED) - 1] and "1 update" in lines[len(REQUIRED) - 1]
    assert "can train here" in lines[-1]
    assert not list(tmp_path.iterdir()), "check leaves nothing behind"


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(accelerator: str) -> str:
        print("hello from a package")
        return "left out"

    monkeypatch.setattr(devices, "training", chatty)
    assert __main__.main(["check", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is True and printed["version"] == gigpo_lightning.__version__
    assert [part["part"] for part in printed["parts"] if part["required"]] == REQUIRED
    assert {"part", "state", "detail", "advice", "required", "seconds"} == set(printed["parts"][0])
    optional = [part["part"] for part in printed["parts"] if not part["required"]]
    assert [name for name in optional if name != "training on gpu"] == [
        "gpu",
        "bitsandbytes",
        "model cache",
        "alfworld games",
        "scipy",
        "matplotlib",
        "textworld",
        "vllm",
    ]


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        __main__.main(["check", "--jsn"])
    assert end.value.code == 2
    assert "check" in __main__.usage()


def test_nothing_of_other_projects_is_loaded_with_the_command() -> None:
    code = (
        "import sys, gigpo_lightning.cli_install_check\n"
        "print([name for name in ('torch', 'lightning', 'transformers', 'packaging') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- packages ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_training")
def test_a_missing_package_is_named_and_the_others_are_examined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions(monkeypatch, {"peft": None})
    assert __main__.main(["check"]) == 1
    out = capsys.readouterr().out
    assert "missing  peft                not installed\n" in out
    assert out.splitlines()[-1].endswith("cannot train here, because of: peft")
    assert "ok       rich" in out


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("error", [ImportError("no libfoo.so"), OSError("no libfoo.so"), SyntaxError("no libfoo.so")])
def test_a_package_that_cannot_be_imported_has_failed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    load = installed.import_module

    def broken(name: str) -> Any:
        if name == "transformers":
            raise error
        return load(name)

    monkeypatch.setattr(installed, "import_module", broken)
    found = findings()
    assert found["transformers"].state == "failed"
    assert found["transformers"].detail == f"{type(error).__name__}: no libfoo.so"
    assert found["transformers"].advice == installed.INSTALL
    assert found["tokenizers"].state == "ok"


@pytest.mark.parametrize(
    ("required", "state"),
    [
        (["torch>=2.5"], "ok"),
        (["torch>=99"], "failed"),
        (['torch>=99; extra == "future"'], "ok"),  # of an extra, not of the package
        (["torchvision>=99"], "ok"),
    ],
)
def test_a_version_that_is_not_allowed_has_failed(
    required: list[str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    finding = check.Part("torch", lambda: installed.library("torch", "torch")).examine()
    assert finding.state == state
    assert ("but >=99 is needed" in finding.detail) == (state == "failed")


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
def test_a_malicious_release_is_refused_without_running_it(name: str, release: str, tmp_path: Path) -> None:
    """A stand-in for the release stands first on the path; it would leave a file behind if anything imported it."""
    module = name.replace("-", "_")
    package, about = tmp_path / module, tmp_path / f"{module}-{release}.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'stolen')!r}, 'w').close()\n")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    done = subprocess.run(
        [sys.executable, "-m", "gigpo_lightning", "check", "--json"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = json.loads(done.stdout)
    assert done.returncode == 1 and printed["ok"] is False
    assert [part["part"] for part in printed["parts"]] == ["python", "lightning"]
    assert f"{name} {release} is a malicious upload" in printed["parts"][1]["detail"]
    assert "pip uninstall" in printed["parts"][1]["advice"]
    assert not (tmp_path / "stolen").exists()


def test_a_python_that_is_too_old_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    with pytest.raises(Problem) as problem:
        installed.python()
    assert problem.value.state == "failed" and problem.value.advice == "use Python 3.10 to 3.14"


def test_the_pythons_are_those_of_pyproject() -> None:
    oldest, newest = (".".join(map(str, version)) for version in installed.PYTHONS)
    following = f"3.{int(newest.split('.')[1]) + 1}"
    assert f'requires-python = ">={oldest},<{following}"' in (ROOT / "pyproject.toml").read_text()


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_has_failed(tmp_path: Path) -> None:
    """A file where the folder should be: it stops every user, root too."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Problem) as problem:
        installed.writable(tmp_path / "file" / "runs")
    assert problem.value.state == "failed"
    assert problem.value.detail.startswith(f"{tmp_path / 'file'}: cannot write here: Not a directory")
    assert "--user" in problem.value.advice


def test_a_full_disk_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(Problem, match="the disk is nearly full: 1 MB are free"):
        installed.writable(tmp_path)


def test_missing_configurations_have_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gigpo_lightning.resources._PACKAGE", tmp_path / "elsewhere")
    finding = check.Part("configurations", installed.configurations).examine()
    assert finding.state == "failed" and "missing from this installation" in finding.detail


def test_recorded_games_are_found_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(Problem) as problem:
        installed.alfworld_games()
    assert problem.value.state == "missing"
    assert problem.value.detail.endswith(f"{tmp_path / 'json_2.1.1'} does not exist")
    (tmp_path / "json_2.1.1").mkdir()
    assert installed.alfworld_games() == str(tmp_path / "json_2.1.1")


# -- devices -----------------------------------------------------------------------------------------------------------


def a_gpu(monkeypatch: pytest.MonkeyPatch, bf16: bool, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Pretend that there is one GPU, of 80 GiB."""
    properties = SimpleNamespace(name="A100", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch, "ones", lambda *shape, device: product(ONES(*shape)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize(
    ("driver", "shown"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27", ", driver 580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", ", driver 580.95.05"),
        (None, ""),
    ],
)
def test_a_gpu_is_described(driver: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch, bf16=True, product=lambda ones: ones)
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "version")
    if driver is not None:
        (tmp_path / "version").write_text(driver)
    assert devices.gpus() == f"A100, 80 GiB, bf16; CUDA 13.0{shown}"


def test_a_gpu_without_bf16_says_so_and_one_that_computes_wrongly_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch, bf16=False, product=lambda ones: ones)
    assert "80 GiB, no bf16" in devices.gpus()
    a_gpu(monkeypatch, bf16=False, product=lambda ones: ones * 2)
    with pytest.raises(Problem, match="a product of matrices is wrong"):
        devices.gpus()


@pytest.mark.usefixtures("no_training")
def test_a_gpu_is_trained_on_and_need_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def training(accelerator: str) -> str:
        if accelerator == "gpu":
            raise RuntimeError("CUDA error: no kernel image is available")
        return "left out"

    a_gpu(monkeypatch, bf16=True, product=lambda ones: ones)
    monkeypatch.setattr(devices, "training", training)
    assert __main__.main(["check"]) == 0
    assert "failed   training on gpu     RuntimeError: CUDA error: no kernel image" in capsys.readouterr().out


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(Problem, match="built for the CPU") as problem:
        devices.gpus()
    assert problem.value.state == "missing"

    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(Problem, match=r"^Found no NVIDIA driver on your system$") as problem:
        devices.gpus()
    assert "CUDA 13.0" in problem.value.advice and "--gpus all" in problem.value.advice


def test_four_bit_weights_work_are_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert devices.four_bit().endswith("4 bit works on " + ("cuda" if torch.cuda.is_available() else "cpu"))
    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", lambda layer, inputs: torch.zeros(len(inputs), 64))
    with pytest.raises(Problem, match="are 100% off"):
        devices.four_bit()
    versions(monkeypatch, {"bitsandbytes": None})
    with pytest.raises(Problem, match="not installed") as problem:
        devices.four_bit()
    assert problem.value.state == "missing"


def test_training_must_change_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: torch.optim.SGD(parameters, lr=0.0))
    with pytest.raises(Problem, match="left the weights as they were"):
        devices.training("cpu")


def test_training_must_leave_finite_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.fill_(float("nan"))

    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: Broken(parameters, lr=0.1))
    finding = check.Part("training on cpu", lambda: devices.training("cpu")).examine()
    assert finding.state == "failed" and "not finite" in finding.detail


def test_training_is_one_process_inside_a_clusters_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that started several processes has set these; Lightning would wait for the others."""
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "1", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "1 update" in devices.training("cpu")
