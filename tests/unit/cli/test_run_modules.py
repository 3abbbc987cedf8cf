"""`hpcenv run` with a site profile: its modules are loaded as in a job, or the command is not started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# As the init script of environment modules: a shell function.
INIT = """
module() {
  case $1 in
    use) export MODULEPATH=$2 ;;
    load)
      [ "$2" = missing ] && { echo "Unable to locate a modulefile for '$2'" >&2; return 1; }
      export LOADEDMODULES="${LOADEDMODULES:+$LOADEDMODULES:}$2" NCCL_MIN_NCHANNELS=4 FI_MR_CACHE_MONITOR=userfaultfd
      export FROM_MODULE="$2 of $MODULEPATH" ;;
  esac
}
"""
# Defaults and options of jobs are for jobs.
PROFILE = """
name = "here"
[submit]
gpu-request = "gres"
cpus = 64
mem = "200G"
spare = 1
time = "1:00:00"
partition = "gpu"
account = "lab"
launcher = "srun"
preflight = "full"
[[option]]
program = "srun"
name = "network"
value = "single_node_vni"
reason = "fabric"
[[module]]
name = "{module}"
use = "/appl/modules"
reason = "fabric"
[env.FI_MR_CACHE_MONITOR]
unset = true
reason = "the library's default is right"
"""
SAYS = "import os; print({n: os.environ.get(n) for n in ('NCCL_MIN_NCHANNELS', 'FI_MR_CACHE_MONITOR')})"


@pytest.fixture
def with_modules(project: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a user on a machine with environment modules."""
    init = tmp_path / "modules" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text(INIT)
    return {"PATH": "/usr/bin:/bin", "HOME": str(project), "MODULESHOME": str(tmp_path / "modules")}


def profile(tmp_path: Path, module: str) -> str:
    path = tmp_path / "profiles" / "here.toml"
    path.parent.mkdir(mode=0o755)
    path.write_text(PROFILE.format(module=module))
    path.chmod(0o600)
    return str(path)


def test_what_modules_set_reaches_the_command_and_the_verdict_names_them(
    hpcenv: Any, project: Path, tmp_path: Path, python_with_torch: Path, with_modules: dict[str, str]
) -> None:
    words = ("--", str(python_with_torch), "-c", SAYS)
    site = ("run", "--site", profile(tmp_path, "fabric"))
    done = hpcenv(*site, *words, cwd=project, environ=with_modules)
    assert done.status == 0, done.stderr
    assert done.stdout == "{'NCCL_MIN_NCHANNELS': '4', 'FI_MR_CACHE_MONITOR': None}\n"
    [run] = (project / "runs").glob("run-*")
    report = hpcenv("report", run.name, cwd=project, environ=with_modules)
    assert "NCCL_MIN_NCHANNELS = 4 (module fabric" in " ".join(report.stdout.split())
    done = hpcenv(*site, "--env", "NCCL_MIN_NCHANNELS=9", *words, cwd=project, environ=with_modules)
    assert done.stdout == "{'NCCL_MIN_NCHANNELS': '9', 'FI_MR_CACHE_MONITOR': None}\n", done.stderr
    done = hpcenv("run", "--site", "none", *words, cwd=project, environ=with_modules)
    assert done.stdout == "{'NCCL_MIN_NCHANNELS': None, 'FI_MR_CACHE_MONITOR': None}\n", done.stderr
    assert "FROM_MODULE" not in "".join(path.read_text() for path in (project / "runs").glob("run-*/*.json"))


@pytest.mark.parametrize(
    ("module", "has", "why"),
    [
        ("missing", True, "cannot load the module missing"),
        pytest.param(
            "fabric",
            False,
            "has no command `module`",
            marks=pytest.mark.skipif(
                any(os.path.exists(f"/etc/profile.d/{name}.sh") for name in ("lmod", "modules", "z00_lmod")),
                reason="NOT RUN: this machine has environment modules",
            ),
        ),
    ],
)
def test_modules_that_cannot_be_loaded_stop_the_command(
    hpcenv: Any, project: Path, tmp_path: Path, with_modules: dict[str, str], module: str, has: bool, why: str
) -> None:
    environ = with_modules if has else {**with_modules, "MODULESHOME": "/nowhere"}
    done = hpcenv("run", "--site", profile(tmp_path, module), "--", "touch", "started", cwd=project, environ=environ)
    assert done.status == 91, done.stderr
    assert "the command was not started: the modules of the site profile cannot be loaded here" in done.stderr
    assert why in done.stderr
    assert "hint: --site none" in done.stderr
    assert not (project / "started").exists()
    (listed,) = hpcenv("list", "--json", cwd=project).envelope["data"]["runs"]
    assert listed["exit_status"] == 91
