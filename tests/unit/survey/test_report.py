"""`hpcenv doctor`: what three releases of Slurm said, what is unknown, and the profile made of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import EnvironmentUnreadable, WouldOverwrite
from hpcenv.project import document, site_files
from hpcenv.project.context import Context
from hpcenv.project.store_config import StorePlace
from hpcenv.survey.report import UNKNOWN, Diagnosis, doctor
from hpcenv.survey.site_profile import write


def looking(fake_slurm: Any, tmp_path: Path, **more: str) -> tuple[Diagnosis, Context]:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=testbed\n")
    environ = {**fake_slurm.environ, "HOME": str(tmp_path), "SLURM_CONF": str(conf), **more}
    context = Context(environ=environ, cwd=tmp_path, now=time.gmtime(0), token="beef", command=("hpcenv",))
    return doctor(context, store=StorePlace(root=tmp_path / "store", origin="HPCENV_STORE")), context


def replay(fake_slurm: Any, version: str) -> None:
    names = {
        "scontrol-config": "scontrol-config", "scontrol-partition": "scontrol-partitions", "sinfo": "sinfo-offers",
        "sbatch---version": "sbatch-version", "sacct": "sacct-answers", "sacctmgr": "sacctmgr-mine",
    }  # fmt: skip
    for tool, name in names.items():
        fake_slurm.replays(tool, name, version)


@pytest.mark.parametrize(
    ("version", "full", "parameter"),
    [
        ("22.05", "22.05.8", "SlurmctldParameters"),
        ("24.11", "24.11.5", "PreemptParameters"),
        ("26.05", "26.05.5", "PreemptParameters"),
    ],
)
def test_what_a_release_says(fake_slurm: Any, tmp_path: Path, version: str, full: str, parameter: str) -> None:
    replay(fake_slurm, version)
    found, context = looking(fake_slurm, tmp_path)
    assert found.value("version") == full
    assert found.value("process tracking") == "proctrack/linuxproc"
    assert (found.value("kill on bad exit"), found.value("requeue"), found.value("largest array")) == ("0", "1", "1001")
    assert found.value("task plugin") in ("none", "task/none")
    assert (found.value("signal before preemption"), parameter in found.how("signal before preemption")) == (
        "yes",
        True,
    )
    assert found.value("credential lifetime") == "20 s"
    assert (found.value("GPU request"), found.value("GPU types")) == ("gpus-per-node", "none named")
    assert (found.value("accounting"), found.accounts) == ("yes", ("research",))
    low = next(part for part in found.partitions if part.name == "low")
    assert (low.nodes, low.cpus, low.memory, low.gpus, low.max_time, low.preempt_mode, low.grace_time) == (2, "16", "8000", "8", "1-00:00:00", "REQUEUE", 10)  # fmt: skip
    path = write(found, context, path=None, force=False)
    site, refusal = site_files.read(path)
    assert path == tmp_path / ".config" / "hpcenv" / "sites" / "testbed.toml"
    assert refusal is None
    assert (site.name, site.match and site.match.cluster) == ("testbed", "testbed")
    assert document.plain(site.submit, defaults=False) == {"gpu-request": "gpus-per-node"}
    assert {part.name for part in site.slurm.partition} == {part.name for part in found.partitions}


def test_accounting_that_is_off_is_known_to_be_off(fake_slurm: Any, tmp_path: Path) -> None:
    replay(fake_slurm, "24.11")
    fake_slurm.replays("sacct", "sacct-no-accounting")
    found, context = looking(fake_slurm, tmp_path)
    assert found.value("accounting") == "no"
    assert "Slurm accounting storage is disabled" in found.how("accounting")
    assert found.value("your accounts") == UNKNOWN
    assert any(trouble.what == "sacct does not answer" for trouble in found.troubles)


def test_a_silent_slurmctld_makes_values_unknown_with_the_reason(fake_slurm: Any, tmp_path: Path) -> None:
    fake_slurm.replays("sbatch---version", "sbatch-version")
    for tool in ("scontrol", "sinfo", "sacct", "sacctmgr"):
        fake_slurm.answers(tool, err="slurm_load_ctl_conf error: Unable to contact slurm controller", status=1)
    found, context = looking(fake_slurm, tmp_path)
    assert found.value("version") == "24.11.5"
    for name in ("process tracking", "kill on bad exit", "accounting", "GPU request", "partitions"):
        assert found.value(name) == UNKNOWN
    assert "Unable to contact slurm controller" in found.how("process tracking")
    text = write(found, context, path=str(tmp_path / "x.toml"), force=False).read_text()
    assert "# gpu-request: unknown (" in text
    assert "# partition: unknown (`sinfo` ended with status 1: slurm_load_ctl_conf error: Unable" in text
    site, _ = site_files.read(tmp_path / "x.toml")
    assert site.submit.gpu_request is None


def test_without_slurm_that_is_the_first_trouble_and_there_is_no_profile(fake_slurm: Any, tmp_path: Path) -> None:
    found, context = looking(fake_slurm, tmp_path, PATH="/nonexistent", SLURM_CONF="/nonexistent")
    assert found.troubles[0].blocking
    assert "there is no Slurm here" in [trouble.what for trouble in found.troubles if trouble.blocking]
    with pytest.raises(EnvironmentUnreadable, match="nothing to make a site profile of"):
        write(found, context, path=None, force=False)


def test_a_profile_is_replaced_by_force_only(fake_slurm: Any, tmp_path: Path) -> None:
    replay(fake_slurm, "24.11")
    found, context = looking(fake_slurm, tmp_path)
    path = write(found, context, path=str(tmp_path), force=False)
    assert path == tmp_path / "testbed.toml"
    path.write_text("mine")
    with pytest.raises(WouldOverwrite):
        write(found, context, path=str(path), force=False)
    assert path.read_text() == "mine"
    write(found, context, path=str(path), force=True)
    assert site_files.read(path)[0].name == "testbed"


def test_what_slurm_says_cannot_write_keys_or_reach_the_terminal(fake_slurm: Any, tmp_path: Path) -> None:
    replay(fake_slurm, "24.11")
    said = 'ProctrackType = evil"\x1b[31m\nSelectType = a"b\\c\nGresTypes = gpu,x"y\nJobRequeue = \x07\n'
    fake_slurm.answers("scontrol-config", said)
    fake_slurm.answers("sinfo", 'p\x1b]0;x"\\*|up|infinite|1-infinite|1|idle|1|1|gpu:"]:1|(null)|n1\n')
    found, context = looking(fake_slurm, tmp_path)
    assert all(fact.value.isprintable() and fact.how.isprintable() for fact in found.facts)
    site, _ = site_files.read(write(found, context, path=str(tmp_path), force=False))
    assert site.slurm.partition == ()


def test_preemption_without_warning_is_told(fake_slurm: Any, tmp_path: Path) -> None:
    replay(fake_slurm, "24.11")
    text = (fake_slurm.folder / "scontrol-config.out").read_text().replace("send_user_signal", "(null)")
    (fake_slurm.folder / "scontrol-config.out").write_text(text)
    found, _ = looking(fake_slurm, tmp_path)
    assert found.value("signal before preemption") == "no"
    assert any("jobs in low can be preempted without their signal" in trouble.what for trouble in found.troubles)


def test_doctor_prints_at_most_80_columns_and_says_how(
    hpcenv: Any, project: Path, fake_slurm: Any, tmp_path: Path
) -> None:
    replay(fake_slurm, "26.05")
    environ = {**fake_slurm.environ, "HOME": str(tmp_path)}
    done = hpcenv("doctor", cwd=project, environ=environ)
    assert done.status == 0
    assert "  version                   26.05.5  [sbatch --version]\n" in done.stdout
    assert "  batch*     2      16    8000  8     1-00:00:00  OFF      0\n" in done.stdout
    # A path is never broken.
    assert [line for line in done.stdout.splitlines() if len(line) > 80 and "/" not in line] == []
    data = hpcenv("doctor", "--json", cwd=project, environ=environ).envelope["data"]
    assert {"facts", "partitions", "troubles", "cluster", "accounts", "checks", "written"} == set(data)
    assert all(fact["how"] for fact in data["facts"])
