"""docs/how-to/ray.md: each of its commands is accepted as it is written. tests/cluster/test_ray.py runs the first one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import ray_world
from tests.conftest import TORCH, FakeSlurm, accept, hpcenv, make_python

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "ray.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(text) for kind, text in BLOCKS if kind == "sh"]
# Stand-ins for the three projects. A console script of `ray` has the name of vLLM's.
MODULES = {"verl/trainer/main_ppo.py": "", "openrlhf/cli/train_ppo_ray.py": ""}


def locked(folder: Path, version: str) -> Path:
    files = {**TORCH, **MODULES, **(ray_world.stand_in(version) if version else {})}
    for name in files:
        files[name] += "vllm = ray.cli:main\n" if name.endswith("entry_points.txt") else ""
    python = make_python(folder / "venv", files)
    (python.parent / "vllm").write_text(f"#!{python}\n")
    (python.parent / "vllm").chmod(0o755)
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text("import ray\nray.init()\nprint('TRAINS', len(ray.nodes()))\n")
    (project / "hpcenv.toml").write_text(
        f'image = "host"\npython = "{python}"\n[submit]\nassume-shared = true\n[env]\nSEEN = "{folder}"\n'
    )
    accept(project)
    done = hpcenv("lock", cwd=project)
    assert done.status == 0, done.stderr
    return project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return locked(tmp_path_factory.mktemp("ray"), "2.60.0")


def test_the_page_has_what_is_tested() -> None:
    assert [kind for kind, _ in BLOCKS] == ["python", "sh", "sh", "sh", "sh"]
    assert BLOCKS[0][1].startswith("# train.py\n")
    assert all("--launcher ray" in " ".join(words) for words in COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[2] if words[2] != "-m" else words[3])
def test_its_commands_are_accepted(project: Path, words: list[str], fake_slurm: FakeSlurm) -> None:
    end = words.index("--") if "--" in words else len(words)
    # The torch of this environment is for CPUs.
    done = hpcenv(
        *words[1:end], "--dry-run", "--allow-cpu-torch", *words[end:], cwd=project, environ=fake_slurm.environ
    )
    assert done.status == 0, done.stdout + done.stderr


def test_two_emulated_nodes_have_one_ray(project: Path) -> None:
    words = ("--launcher", "ray", "--nodes", "2", "--gpus", "0", "--cluster", "local", "--name", "two", "--wait")
    done = hpcenv("submit", "train.py", *words, cwd=project, timeout=100)
    assert done.status == 0, done.stdout + done.stderr
    run = project / "runs" / "two"
    said = done.stdout + done.stderr + (run / "job.log").read_text()
    assert "hpcenv: Ray has 2 nodes: " in said
    assert "TRAINS 2" in said
    assert [path.name for path in (run / "env").glob("ray-*")] == [next((run / "env").glob("ray-*.ended")).name]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--nproc", "2"), "`--nproc` and `--launcher ray` contradict each other"),
        (("--seed", "3"), "`--launcher ray` and `--seed 3` contradict each other"),
        (("--determinism", "bitwise"), "`--launcher ray` and `--determinism bitwise` contradict each other"),
        (("--trace-steps", "1:2"), "`--trace-steps` and `--launcher ray` contradict each other"),
        (("--torchrun-args", "--max-restarts=1"), "`--torchrun-args` and `--launcher ray` contradict each other"),
    ],
)
def test_what_ray_cannot_do_is_refused(project: Path, words: tuple[str, ...], what: str) -> None:
    done = hpcenv("submit", "train.py", "--launcher", "ray", "--gpus", "0", *words, "--cluster", "local", cwd=project)
    assert done.status == 2
    assert what in done.stderr


@pytest.mark.parametrize(
    ("version", "what"),
    [("", "`--launcher ray`: the environment has no Ray"), ("2.51.2", "`--launcher ray`: Ray 2.51.2 is too old")],
)
def test_an_environment_that_cannot_start_ray_is_refused(tmp_path: Path, version: str, what: str) -> None:
    project = locked(tmp_path, version)
    done = hpcenv("submit", "train.py", "--launcher", "ray", "--gpus", "0", "--cluster", "local", cwd=project)
    assert done.status == 2
    assert what in done.stderr
