"""Which site profile a run uses, and what comes of it in the plan."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import HpcenvError
from hpcenv.project import site_files
from hpcenv.project.context import Context
from hpcenv.project.site_profile import profile
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.submission import choose_site, early_checks
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions

ROOT = Path(__file__).resolve().parents[3]
SEED = ROOT / "tests" / "fuzz" / "seeds" / "lockfile" / "host.lock.toml"
MATCH = 'name = "{name}"\n[match]\ncluster = "jura"\n'


@pytest.fixture
def project(project: Path) -> Path:
    """The tiny project; tests run in /tmp, which hpcenv knows not to be shared."""
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    return project


@pytest.fixture
def here(project: Path, tmp_path: Path, fake_slurm: Any) -> dict[str, str]:
    """An environment on cluster `jura`, with folders for profiles of a user's own."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=jura\n")
    return {
        **fake_slurm.environ,
        "SLURM_CONF": str(conf),
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "c"),
        "HPCENV_SITES": str(tmp_path / "machine"),
    }


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    path = folder / f"{name}.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def planned(project: Path, environ: Mapping[str, str], **words: Any) -> Plan:
    options = SubmitOptions(script="train.py", **{"nproc": 1, "assume_shared": True, "name": "a", **words})
    context = Context(environ=environ, cwd=project, now=time.localtime(0), token="beef", command=("hpcenv",))
    return plan_job(open_workspace(project), options, context)


def site_notes(plan: Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith("site profile")]


def test_without_profiles_nobody_asks_for_the_clusters_name(
    project: Path, here: dict[str, str], fake_slurm: Any
) -> None:
    plan = planned(project, {**here, "SLURM_CONF": "/nonexistent"})
    assert site_notes(plan) == []
    assert fake_slurm.calls("scontrol") == []
    assert len(fake_slurm.calls("sinfo")) == 1


def test_the_nearest_profile_that_fits_is_used(project: Path, here: dict[str, str]) -> None:
    machine = Path(here["HPCENV_SITES"])
    write(machine, "theirs", MATCH.format(name="theirs"))
    assert site_notes(planned(project, here)) == [f"site profile theirs ({machine}/theirs.toml)"]
    write(project / "sites", "ours", MATCH.format(name="ours"))
    assert site_notes(planned(project, here)) == [f"site profile ours ({project}/sites/ours.toml)"]
    users = Path(here["XDG_CONFIG_HOME"]) / "hpcenv" / "sites"
    write(users, "other", 'name = "other"\n[match]\ncluster = "alps"\n')
    write(users, "mine", MATCH.format(name="mine").replace("jura", "JURA"))
    assert site_notes(planned(project, here)) == [f"site profile mine ({users}/mine.toml)"]
    assert site_notes(planned(project, here, site="none")) == []
    assert site_notes(planned(project, here, site="other")) == [f"site profile other ({users}/other.toml)"]


def test_a_flag_wins_over_the_variable_and_that_over_the_file(
    project: Path, here: dict[str, str], tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / "p", name, f'name = "{name}"\n')
    (project / "hpcenv.toml").write_text(f'site = "{tmp_path}/p/c.toml"\n' + (project / "hpcenv.toml").read_text())
    with_variable = {**here, "HPCENV_SITE": f"{tmp_path}/p/b.toml"}
    assert "profile c " in site_notes(planned(project, here))[0]
    assert "profile b " in site_notes(planned(project, with_variable))[0]
    assert "profile a " in site_notes(planned(project, with_variable, site=f"{tmp_path}/p/a.toml"))[0]


def test_an_administrators_folder_is_the_one_of_the_documentation(tmp_path: Path) -> None:
    always = (tmp_path / ".config/hpcenv/sites", Path("/etc/xdg/hpcenv/sites"), Path("/etc/hpcenv/sites"))
    home = {"HOME": str(tmp_path)}
    assert site_files.folders(None, home) == always
    assert site_files.folders(None, {**home, "XDG_CONFIG_DIRS": ""}) == always
    chosen = site_files.folders(None, {**home, "XDG_CONFIG_DIRS": "/opt/etc:relative"})
    assert chosen == (always[0], Path("/opt/etc/hpcenv/sites"), always[2])


def test_a_shipped_example_is_used_by_name_only(project: Path, here: dict[str, str]) -> None:
    plan = planned(project, here, site="slingshot")
    setting = next(s for s in plan.manifest.settings if s.name == "NCCL_SOCKET_IFNAME")
    assert (setting.origin, setting.value) == ("site profile slingshot", "hsn0,hsn1,hsn2,hsn3")
    assert "shs-ccl-docs, ccl_env.sh, version 1437748, of 2026-04-10, checked" in setting.reason
    assert "--network=disable_rdzv_get" in next(
        line for line in plan.script.splitlines() if "launch" in line and "srun" in line
    )
    assert any(one.startswith("--srun network=disable_rdzv_get (") for one in plan.requested)
    own = planned(project, here, site="slingshot", srun={"network": "mine"})
    assert "--network=mine" in own.script and "disable_rdzv_get" not in own.script


def test_values_of_a_profile_are_for_some_runs(project: Path, here: dict[str, str]) -> None:
    text = """
[[env.A]]
value = "one"
reason = "r"
when = {partition = "gpu", nodes = "1"}
[[env.A]]
value = "two"
reason = "r"
when = {partition = "gpu", nodes = ">=2"}
[env.B]
value = "amd"
reason = "r"
when = {gpu-vendor = "amd"}
[env.C]
value = "new"
reason = "r"
when = {gpu = "h100*"}
[[module]]
name = "fabric"
use = "/appl/m m"
reason = "r"
[env.MPI]
unset = true
reason = "r"
"""
    write(project / "sites", "ours", MATCH.format(name="ours") + text)
    one, two = (planned(project, here, nodes=nodes, partition="gpu") for nodes in (1, 2))
    assert [{s.name: s.value for s in plan.manifest.settings} for plan in (one, two)] == [{"A": "one"}, {"A": "two"}]
    unknown = "site profile ours: C is not set: it is for gpu h100*, and gpu is not known here"
    assert unknown in one.notes
    assert ". \"$run/code/modules.sh\" --use '/appl/m m' fabric\n" in one.script
    assert "unset -v MPI\n" in one.script


def test_a_feature_of_the_nodes_with_a_condition(project: Path, here: dict[str, str], fake_slurm: Any) -> None:
    """`constraint` is an option of hpcenv's own table; [[option]] gives it a reason and a condition."""
    text = """
[[option]]
program = "sbatch"
name = "constraint"
value = "thp_never&nvidia_vboost_enabled"
reason = "r"
when = {nodes = ">=2"}
[[option]]
program = "sbatch"
name = "segment"
value = 2
reason = "r"
"""
    path = write(project / "sites", "ours", MATCH.format(name="ours") + text)
    with pytest.raises(HpcenvError, match=r"has no nodes with `thp_never") as refused:
        planned(project, here, nodes=2)
    assert f"comes from [[option]] in {path}" in (refused.value.why or "")
    fake_slurm.answers("sinfo", err="no answer", status=1)
    one, two = (planned(project, here, nodes=nodes) for nodes in (1, 2))
    line = "#SBATCH --constraint=thp_never&nvidia_vboost_enabled\n"
    assert (line in one.script, line in two.script) == (False, True)
    assert "#SBATCH --segment=2\n" in one.script
    typed = planned(project, here, nodes=2, constraint="gpu")
    assert "#SBATCH --constraint=gpu\n" in typed.script and line not in typed.script
    assert f"--sbatch constraint=thp_never&nvidia_vboost_enabled ({path})" in two.requested


def test_conditions_ask_the_lockfile(tmp_path: Path) -> None:
    """NCCL, ROCm, vendor and type of the GPUs are those that were locked; a typed type wins."""
    conditions = ("gpu-vendor = 'nvidia'", "nccl = '>=2.27'", "rocm = '>=6'", "gpu = 'h100*'", "gpu-vendor = 'amd'")
    tables = "".join(
        f"[[env.V{number}]]\nvalue = '1'\nreason = 'r'\nwhen = {{{one}}}\n" for number, one in enumerate(conditions)
    )
    site, _ = site_files.read(write(tmp_path, "x", f'name = "x"\n{tables}'))

    def chosen(facts: dict[str, Any], *, gpu: str = "", typed: str | None = None) -> list[str]:
        base = read_lockfile(SEED)
        locked = base.model_copy(update={"facts": facts, "host": base.host.model_copy(update={"gpu": gpu or None})})
        found = choose_site.for_run(profile(site, "x"), locked, nodes=1, gpu_type=typed)
        return [setting.name for setting in found.settings]

    cuda = {"torch.cuda": "12.8", "torch.hip": "none", "libs.nccl.version": "2.28.9"}
    hip = {"torch.cuda": "none", "torch.hip": "7.0.51831", "libs.nccl.version": "2.26.6"}
    assert chosen(cuda) == ["V0", "V1"]
    assert chosen(cuda, gpu="h100") == ["V0", "V1", "V3"]
    assert chosen(cuda, gpu="a100", typed="h100_sxm") == ["V0", "V1", "V3"]
    assert chosen(hip) == ["V2", "V4"]


def test_a_sif_is_refused_where_nothing_starts_one(tmp_path: Path) -> None:
    path = write(tmp_path, "x", 'name = "x"\n[runtime]\nkind = "none"\nreason = "it has Podman"\n')
    site, _ = site_files.read(path)
    with pytest.raises(HpcenvError) as caught:
        choose_site.require_runtime(profile(site, str(path)))
    assert caught.value.code == "submit-rejected"
    assert "it has Podman" in str(caught.value.why)


def test_an_unknown_name_has_a_nearest_one(project: Path, here: dict[str, str]) -> None:
    with pytest.raises(HpcenvError) as caught:
        planned(project, here, site="lumni")
    assert caught.value.what == "there is no site profile `lumni`"
    assert caught.value.hint == "--site lumi"


def test_a_profile_that_fits_and_is_not_valid_is_told(project: Path, here: dict[str, str]) -> None:
    write(project / "sites", "ours", MATCH.format(name="ours") + "[submit]\npartitoin = 'x'\n")
    with pytest.raises(HpcenvError, match="is not valid") as caught:
        planned(project, here)
    assert "perhaps you meant `partition`" in str(caught.value.why)


def test_a_profile_that_fits_and_that_others_could_change_is_refused(project: Path, here: dict[str, str]) -> None:
    path = write(project / "sites", "ours", MATCH.format(name="ours"))
    path.chmod(0o666)
    with pytest.raises(HpcenvError, match="other users can change it"):
        planned(project, here)
    path.write_text(MATCH.format(name="ours").replace("jura", "elsewhere"))
    assert site_notes(planned(project, here)) == []


def test_values_of_a_profile_stand_behind_all_others(project: Path, here: dict[str, str]) -> None:
    path = write(
        project / "sites",
        "ours",
        MATCH.format(name="ours")
        + '[submit]\npartition = "gpu"\naccount = "site"\ngpu-request = "gres"\ngpu-type = "h100"\ncpus = 14\n'
        + '[env.A]\nvalue = "site"\nreason = "r"\n[env.MANY]\nvalue = "x"\nreason = "r"\nmin-nodes = 2\n',
    )
    environ = {**here, "SBATCH_ACCOUNT": "mine"}
    with pytest.raises(HpcenvError, match="no nodes with 2 GPUs of type h100"):
        planned(project, environ, gpus=2, allow_cpu_torch=True, nproc=None)
    path.write_text(path.read_text().replace('gpu-type = "h100"\n', ""))
    plan = planned(project, environ, gpus=2, allow_cpu_torch=True, nproc=None, env={"B": "flag"})
    assert "#SBATCH --gres=gpu:2\n#SBATCH --comment" in plan.script
    assert "#SBATCH --cpus-per-task=14\n" in plan.script
    assert "#SBATCH --account=mine\n" in plan.script
    assert f"partition = gpu ({path})" in plan.requested
    assert f"cpus = 14 ({path})" in plan.requested
    assert {s.name: s.value for s in plan.manifest.settings} == {"A": "site", "B": "flag"}
    plan = planned(project, environ, nodes=2, cpus=3, env={"A": "flag"})
    assert "#SBATCH --cpus-per-task=3\n" in plan.script
    assert {s.name: s.value for s in plan.manifest.settings} == {"A": "flag", "MANY": "x"}


def test_a_profile_ends_runs_that_do_nothing_unless_the_project_or_the_user_wants_otherwise(
    project: Path, here: dict[str, str], tmp_path: Path
) -> None:
    def idle_end(**words: Any) -> float | None:
        watch = planned(project, here, **words).manifest.watch
        return None if watch is None else watch.idle_end

    assert idle_end() == 0
    write(tmp_path / "machine", "jura", MATCH.format(name="jura") + '[submit]\nidle-end = "30m"\n')
    assert idle_end() == 1800
    assert idle_end(idle_end=0) == 0
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('idle-end = "1h"\n')
    assert idle_end() == 3600
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[watch]\nsample = "off"\n')
    assert idle_end(idle_end=0) is None
    with pytest.raises(HpcenvError, match="--idle-end needs samples"):
        idle_end()


@pytest.mark.parametrize("option", ['on-stall = "stop"', 'stall-after = "20m"'])
def test_an_option_for_hangs_is_refused_if_nothing_is_measured(
    project: Path, here: dict[str, str], fake_slurm: Any, option: str
) -> None:
    fake_slurm.answers("sinfo", "p*|up|infinite|1-infinite|2|idle|64|8000|(null)|(null)|n[1-2]\n")
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write(f'[watch]\nsample = "off"\n{option}\n')
    name = option.split(" ")[0]
    with pytest.raises(HpcenvError, match=f"`{name}` under .watch. needs samples") as refused:
        planned(project, here)
    assert refused.value.hint == f"leave out `sample`, or `{name}`"


def test_the_type_of_gpus_in_both_forms(project: Path, here: dict[str, str], fake_slurm: Any) -> None:
    fake_slurm.answers("sinfo", "p*|up|infinite|1-infinite|2|idle|64|8000|gpu:h100:8|(null)|n[1-2]\n")
    assert (
        "#SBATCH --gpus-per-node=h100:2\n"
        in planned(project, here, gpus=2, allow_cpu_torch=True, nproc=None, gpu_type="h100").script
    )
    write(project / "sites", "ours", MATCH.format(name="ours") + '[submit]\ngpu-request = "gres"\n')
    assert (
        "#SBATCH --gres=gpu:h100:2\n"
        in planned(project, here, gpus=2, allow_cpu_torch=True, nproc=None, gpu_type="h100").script
    )


def test_without_slurm_no_profile_is_used(project: Path, here: dict[str, str]) -> None:
    write(project / "sites", "ours", MATCH.format(name="ours"))
    assert site_notes(planned(project, here, cluster="local")) == []


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (
            {"err": "slurm_load_partitions: Unable to contact slurm controller", "status": 1},
            "`sinfo` ended with status 1",
        ),
        ({"out": ""}, "sinfo lists no nodes"),
        ({"out": "gpu*|gpu:h100:8\n"}, "sinfo lists no nodes"),
    ],
)
def test_a_sinfo_that_does_not_help_is_a_note(
    project: Path, here: dict[str, str], fake_slurm: Any, answer: Any, note: str
) -> None:
    fake_slurm.answers("sinfo", **answer)
    found = [line for line in planned(project, here, nodes=999, partition="nosuch").notes if "not checked" in line]
    assert len(found) == 1
    assert note in found[0]


# -- when would it start; is there room ---------------------------------------------------


def test_test_only_prints_slurms_estimate_and_leaves_nothing(
    hpcenv: Any, project: Path, here: dict[str, str], fake_slurm: Any
) -> None:
    fake_slurm.replays("sbatch---test-only", "sbatch-test-only", "26.05")
    words = ("submit", "train.py", "--nproc", "1", "--nodes", "2", "--test-only")
    before = sorted(project.rglob("*"))
    done = hpcenv(*words, cwd=project, environ=here)
    assert (
        done.stdout
        == "2 nodes x no GPU, 1 rank each = 2 ranks: would start at 2026-11-20T15:55:59 on n[1-2] in partition batch\n"
    )
    envelope = hpcenv(*words, "--json", cwd=project, environ=here).envelope
    assert (envelope["command"], envelope["data"]["estimate"]["processors"]) == ("submit", 2)
    assert [path for path in sorted(project.rglob("*")) if "__pycache__" not in str(path)] == [
        p for p in before if "__pycache__" not in str(p)
    ]
    assert all(call.argv == ("--test-only",) for call in fake_slurm.calls("sbatch"))
    assert "--test-only" not in fake_slurm.calls("sbatch")[0].script
    assert hpcenv(*words, "--dry-run", cwd=project, environ=here).status == 2
    assert hpcenv(*words, "--cluster", "local", cwd=project, environ=here).status == 2


def test_room_is_looked_for_where_the_run_folder_will_be(tmp_path: Path) -> None:
    assert early_checks.check_space(tmp_path / "not" / "yet" / "run") == []


@pytest.mark.parametrize(
    ("minutes", "grace", "is_said"),
    [(1, 6, True), (2, 60, True), (2.1, 60, False), (1, 0, False), (None, 60, False)],
)
def test_a_job_that_slurm_may_stop_as_it_begins_is_named(minutes, grace, is_said):
    said = "".join(early_checks.check_warning(minutes, grace))
    assert ("may get the stop signal as it begins" in said, f"{grace} s (--grace)" in said) == (is_said, is_said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(
    ("options", "fails", "said"),
    [
        ("size=1m", True, "MB are free"),
        ("size=200m", False, "little space"),
        ("size=2g,nr_inodes=1", True, "hold more files"),
    ],
)
def test_a_full_file_system_is_refused(tmp_path: Path, options: str, fails: bool, said: str) -> None:
    # In a mount namespace of its own: nothing of it is left, whatever happens.
    program = (
        "import sys; from pathlib import Path; from hpcenv.submission import early_checks; from hpcenv.errors import HpcenvError\n"
        "try: print(*early_checks.check_space(Path(sys.argv[1]) / 'runs' / 'a'))\n"
        "except HpcenvError as error: print(error.code, error)\n"
    )
    command = f'mount -t tmpfs -o {options} none "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", str(tmp_path), sys.executable, program],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if "mount" in done.stderr and done.returncode != 0:
        pytest.skip("NOT RUN: this machine forbids mounts")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert done.stdout.startswith("file-unusable") == fails
