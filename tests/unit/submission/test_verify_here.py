"""`hpcenv verify` on this machine, with a small real environment: every outcome has its status."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from lock_world import lock_project
from probe_world import Venv

from hpcenv.errors import FileUnusable, LockfileMissing, LockfileStale
from hpcenv.judge.decide import DIFFERS_BETWEEN_NODES
from hpcenv.project import lockfile as lock_model
from hpcenv.project.workspace import Workspace, open_workspace
from hpcenv.records.manifest import Severity
from hpcenv.records.verdict import Finding, Result, Verdict
from hpcenv.submission.verify_here import outcome, verify

from ...conftest import TORCH, make_python  # noqa: TID252

ENVIRON = {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "project"
    files = {**TORCH, "extra.py": "x = 1\n", "extra-1.0.dist-info/METADATA": "Name: extra\nVersion: 1.0\n"}
    make_python(folder / "env", files)
    (folder / "hpcenv.toml").write_text('image = "host"\npython = "env/bin/python"\n')
    lock_project(folder, ENVIRON)
    return folder


@pytest.fixture
def own(made_once: Path, tmp_path: Path) -> Path:
    """A locked project with an environment of its own, which a test may change."""
    folder = tmp_path / "own"
    shutil.copytree(made_once, folder, symlinks=True)
    return folder


def site(folder: Path) -> Path:
    return next(folder.glob("env/lib/python*/site-packages"))


def edit(folder: Path, *path: str, value: Any) -> None:
    """Change the lockfile as if something else had been locked."""
    file = folder / "lockfiles" / "default.lock.toml"
    data = tomlkit.parse(file.read_text()).unwrap()
    table = data
    for part in path[:-1]:
        table = table.setdefault(part, {})
    table[path[-1]] = value
    data["fingerprint"] = lock_model.fingerprint(data)
    file.write_text(tomlkit.dumps(data))


def fields(verdict: Verdict) -> list[str]:
    return [finding.field for finding in verdict.findings if finding.severity == "must"]


# -- match --------------------------------------------------------------------------------


def test_what_was_locked_matches(hpcenv: Any, own: Path) -> None:
    done = hpcenv("verify", cwd=own)
    assert done.status == 0, done.stdout
    assert done.stdout.startswith("hpcenv verdict: match: 1 node as lockfiles/default.lock.toml says\n")
    assert "match, in " in done.stderr


def test_as_json(hpcenv: Any, own: Path) -> None:
    done = hpcenv("verify", "--json", cwd=own)
    assert (done.status, done.envelope["ok"]) == (0, True)
    data = done.envelope["data"]
    assert set(data) == {"outcome", "verdict", "seconds", "imports"}
    assert data["outcome"] == "match"
    assert data["verdict"]["nodes"][0]["compared"] > 20
    (parts,) = data["seconds"].values()
    assert parts["probe"] > 0


@pytest.mark.parametrize("level", ["record", "full"])
def test_a_lockfile_matches_at_every_level(own: Path, level: Any) -> None:
    verdict, *_ = verify(open_workspace(own), environ=ENVIRON, level=level)
    assert verdict.result == "match", verdict.findings


def test_nothing_is_written(own: Path) -> None:
    before = sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts)
    verify(open_workspace(own), environ=ENVIRON)
    assert sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts) == before


# -- imports ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A locked project with three packages: one that is imported, one that fails, one without a module."""
    folder = tmp_path_factory.mktemp("imports") / "project"
    made = Venv(folder / "env")
    for name, modules in {"good": {"good.py": b""}, "bad": {"bad.py": b"import gone"}, "empty": {}}.items():
        made.install(name, modules)
    spec = 'image = "host"\npython = "env/bin/python"\n[policy]\n"torch.version" = "info"\n'
    (folder / "hpcenv.toml").write_text(spec)
    lock_project(folder, ENVIRON)
    return folder


def test_a_locked_package_that_cannot_be_imported_is_named(hpcenv: Any, with_modules: Path) -> None:
    done = hpcenv("verify", "--imports", cwd=with_modules)
    assert done.status == 90, done.stdout + done.stderr
    assert "imports: 1 of 3 locked packages can be imported" in done.stdout
    assert "  bad (module bad) cannot be imported: ModuleNotFoundError: No module named 'gone'\n" in done.stdout
    assert "  without a module to import: empty\n" in done.stdout
    assert "imports-fail, in " in done.stderr
    done = hpcenv("verify", "--imports", "--json", cwd=with_modules)
    assert (done.status, done.envelope["ok"], done.envelope["data"]["outcome"]) == (90, False, "imports-fail")
    found = {one["name"]: one["state"] for one in done.envelope["data"]["imports"]}
    assert found == {"bad": "failed", "empty": "no-module", "good": "imported"}


def test_nothing_is_imported_without_the_option_or_where_the_environment_differs(
    hpcenv: Any, with_modules: Path
) -> None:
    assert "imports:" not in hpcenv("verify", cwd=with_modules).stdout
    target = site(with_modules) / "good-1.0.dist-info" / "METADATA"
    before = target.read_text()
    target.write_text("Name: good\nVersion: 2.0\n")
    done = hpcenv("verify", "--imports", cwd=with_modules)
    target.write_text(before)
    assert done.status == 90
    assert "imports:" not in done.stdout


def test_nodes_import_nothing(hpcenv: Any, with_modules: Path) -> None:
    done = hpcenv("verify", "--imports", "--nodes", "2", cwd=with_modules)
    assert done.status == 2
    assert "`--imports` does not go with `--nodes`" in done.stderr


# -- mismatch -----------------------------------------------------------------------------


def changes(folder: Path, what: str) -> None:
    place = site(folder)
    if what == "file":
        (place / "extra.py").write_text("x = 2\n")
    elif what == "package":
        (place / "extra-1.0.dist-info" / "METADATA").write_text("Name: extra\nVersion: 1.1\n")
    elif what == "gone":
        (place / "extra-1.0.dist-info" / "RECORD").unlink()
    elif what == "unlisted":
        (place / "dropped.py").write_text("")
    elif what == "pth":
        (place / "zz.pth").write_text("import os\n")
    elif what == "torch":
        (place / "torch" / "version.py").write_text(TORCH["torch/version.py"].replace("cf30153c", "00000000"))


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ("file", "packages.extra.content-sha256"),
        ("package", "packages.extra"),
        ("unlisted", "packages.unlisted-digest"),
        ("pth", "python.startup-files"),
        ("torch", "torch.git-version"),
    ],
)
def test_a_change_is_named(own: Path, what: str, field: str) -> None:
    changes(own, what)
    verdict, *_ = verify(open_workspace(own), environ=ENVIRON)
    assert verdict.result == "mismatch"
    assert field in fields(verdict)


def test_a_mismatch_ends_with_90(hpcenv: Any, own: Path) -> None:
    changes(own, "file")
    done = hpcenv("verify", cwd=own)
    assert done.status == 90
    assert "packages.extra.content-sha256" in done.stdout
    assert "extra.py" in done.stdout
    as_json = hpcenv("verify", "--json", cwd=own)
    assert (as_json.status, as_json.envelope["ok"], as_json.envelope["data"]["outcome"]) == (90, False, "mismatch")


def test_what_the_level_does_not_read_is_not_claimed(own: Path) -> None:
    """Level record trusts RECORD: it says nothing of a changed byte, level full finds it."""
    changes(own, "file")
    assert verify(open_workspace(own), environ=ENVIRON, level="record")[0].result == "match"
    assert verify(open_workspace(own), environ=ENVIRON, level="full")[0].result == "mismatch"


def test_the_policy_loosens_it(own: Path) -> None:
    changes(own, "unlisted")
    spec = own / "hpcenv.toml"
    spec.write_text(spec.read_text() + '[policy]\n"packages.unlisted-digest" = "info"\n')
    edit(own, "policy", value={"packages.unlisted-digest": "info"})
    assert verify(open_workspace(own), environ=ENVIRON)[0].result == "match"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "2", "--sif", "other.sif"), "`--sif` does not go with `--nodes`"),
        (("--partition", "gpu"), "`--partition` goes with `--nodes` only"),
        (("--time", "5"), "`--time` goes with `--nodes` only"),
        (("--preflight", "full"), "`--preflight` goes with `--nodes` only"),
    ],
)
def test_a_flag_that_would_not_be_heeded_is_refused(words: tuple[str, ...], said: str, hpcenv: Any, own: Path) -> None:
    done = hpcenv("verify", *words, cwd=own)
    assert (done.status, done.stdout) == (2, "")
    assert f"error[usage]: {said}" in done.stderr


# -- warnings -----------------------------------------------------------------------------


@pytest.fixture
def warned(own: Path) -> Path:
    """Something differs that the policy only warns of."""
    spec = own / "hpcenv.toml"
    spec.write_text(spec.read_text() + '[policy]\n"system.glibc" = "warn"\n')
    edit(own, "policy", value={"system.glibc": "warn"})
    edit(own, "system", "glibc", value="2.99")
    return own


def test_a_warning_is_a_match(hpcenv: Any, warned: Path) -> None:
    done = hpcenv("verify", cwd=warned)
    assert done.status == 0
    assert "also different, not blocking" in done.stdout


def test_but_not_with_strict(hpcenv: Any, warned: Path) -> None:
    done = hpcenv("verify", "--strict", "--json", cwd=warned)
    assert (done.status, done.envelope["ok"], done.envelope["data"]["outcome"]) == (92, False, "warned")
    findings = done.envelope["data"]["verdict"]["findings"]
    assert ("system.glibc", "warn") in [(finding["field"], finding["severity"]) for finding in findings]


def test_strict_minds_what_could_not_be_read_when_it_was_locked(hpcenv: Any, own: Path) -> None:
    """This torch has no libraries: nothing of them was locked, so nothing of them is verified."""
    done = hpcenv("verify", "--strict", cwd=own)
    assert done.status == 92
    assert "unknown when it was locked" in done.stdout


NEWER = (
    "revision 3 of `default.lock.toml` is newer than this hpcenv's 2: 2 keys are not known here "
    "(expect, packages.dist.sbom), and whether it was edited was not checked"
)


@pytest.fixture
def newer(own: Path) -> Path:
    """A lockfile of a later hpcenv."""
    data = tomlkit.parse((own / "lockfiles" / "default.lock.toml").read_text()).unwrap()
    edit(own, "packages", "dist", value=[{**dist, "sbom": "x"} for dist in data["packages"]["dist"]])
    edit(own, "expect", value={"loss": 1})
    edit(own, "revision", value=3)
    return own


def test_what_is_not_known_of_a_newer_lockfile_is_a_warning(hpcenv: Any, newer: Path) -> None:
    done = hpcenv("verify", cwd=newer)
    assert done.status == 0
    assert NEWER in " ".join(done.stdout.split())
    done = hpcenv("verify", "--strict", "--json", cwd=newer)
    assert (done.status, done.envelope["data"]["outcome"]) == (92, "warned")
    (finding,) = (f for f in done.envelope["data"]["verdict"]["findings"] if f["field"] == "lockfile.revision")
    assert (finding["severity"], finding["locked"], finding["found"]) == ("warn", "3", "2")


def test_and_is_said_when_it_is_overwritten(newer: Path) -> None:
    notes = lock_project(newer, ENVIRON).notes
    assert [note for note in notes if note.startswith(f"about the old lockfile: {NEWER}")]


@pytest.mark.parametrize("words", [("lock", "--check"), ("submit", "train.py", "--nproc", "1", "--dry-run")])
def test_and_is_said_once_by_who_else_reads_it(words: tuple[str, ...], hpcenv: Any, newer: Path) -> None:
    (newer / "train.py").write_text("")
    done = hpcenv(*words, cwd=newer)
    assert done.status == 0, done.stderr
    assert done.stderr.count(f"note: {NEWER}") == 1


@pytest.fixture
def older(own: Path) -> Path:
    """A lockfile of an hpcenv that knew nothing of interpreter and programs."""
    path = own / "lockfiles" / "default.lock.toml"
    text = path.read_text().replace("revision = 2\n", "revision = 0\n")
    lines = [line for line in text.splitlines() if not line.startswith(OLD_LACKS)]
    path.write_text("\n".join(lines) + "\n")
    edit(own, "schema", value=1)  # with a fingerprint that fits
    return own


OLD_LACKS = ("binary-sha256", "libpython-sha256", "launcher-sha256", "system = ", "unlisted = ", "ld-so-preload")
OLDER = "revision 0 of `default.lock.toml` is older than this hpcenv's 2: not locked, and not compared: "


def test_what_an_older_lockfile_does_not_lock_is_a_warning(hpcenv: Any, older: Path) -> None:
    done = hpcenv("verify", cwd=older)
    assert done.status == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert OLDER + "python.binary-sha256" in text and "hpcenv lock adds them" in text
    assert "not covered: code outside of the environment that its links lead to;" in text
    assert "[[data]]" not in text and "binds" not in text, "this project has neither"
    assert hpcenv("verify", "--strict", cwd=older).status == 92
    notes = lock_project(older, ENVIRON).notes
    assert not [note for note in notes if "older than" in note]
    assert "older than" not in hpcenv("verify", cwd=older).stdout


# -- could not tell -----------------------------------------------------------------------


def test_an_environment_that_does_not_answer_is_unknown_and_ends_with_91(hpcenv: Any, own: Path) -> None:
    python = own / "env" / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    python.chmod(0o755)
    done = hpcenv("verify", "--json", cwd=own)
    assert (done.status, done.envelope["data"]["outcome"]) == (91, "unknown")
    (finding,) = done.envelope["data"]["verdict"]["findings"]
    assert finding["field"] == "environment"
    assert "broken" in finding["found"]


def test_a_package_that_cannot_be_read_is_unknown_not_fine(own: Path) -> None:
    changes(own, "gone")
    verdict, *_ = verify(open_workspace(own), environ=ENVIRON)
    assert verdict.result != "match"
    assert any(field.startswith("packages.extra") for field in fields(verdict))


# -- nothing to compare with --------------------------------------------------------------


def test_a_stale_lockfile_is_not_verified(hpcenv: Any, own: Path) -> None:
    spec = own / "hpcenv.toml"
    spec.write_text(spec.read_text() + '[policy]\n"system.glibc" = "warn"\n')
    done = hpcenv("verify", cwd=own)
    assert done.status == 7
    assert "error[lockfile-stale]: `lockfiles/default.lock.toml` is stale" in done.stderr
    assert "policy-changed" in done.stderr


def test_an_edited_lockfile_is_not_verified(own: Path) -> None:
    path = own / "lockfiles" / "default.lock.toml"
    path.write_text(path.read_text().replace("cf30153c", "00000000"))
    with pytest.raises(LockfileStale) as caught:
        verify(open_workspace(own), environ=ENVIRON)
    assert "edited" in str(caught.value.why)


def test_no_lockfile(own: Path) -> None:
    with pytest.raises(LockfileMissing):
        verify(open_workspace(own), environ=ENVIRON, lock="paper")


def test_a_sif_is_no_host_environment(own: Path) -> None:
    with pytest.raises(FileUnusable, match="cannot be verified"):
        verify(open_workspace(own), environ=ENVIRON, sif=Path("/x.sif"))


# -- GPUs ---------------------------------------------------------------------------------


def cuda_build(folder: Path) -> Workspace:
    text = TORCH["torch/version.py"].replace("cuda = None", "cuda = '12.8'")
    (site(folder) / "torch" / "version.py").write_text(text)
    edit(folder, "torch", "cuda", value="12.8")
    return open_workspace(folder)


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has a GPU")
def test_a_machine_without_gpus_does_not_offer_one(own: Path) -> None:
    verdict, *_ = verify(cuda_build(own), environ=ENVIRON, gpus=1)
    assert verdict.result != "match"
    assert {"host.gpu-count", "host.driver-version", "host.gpu-compute-capabilities"} <= set(fields(verdict))


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has a GPU")
def test_the_policy_holds_for_gpus_too(own: Path) -> None:
    loosened = dict.fromkeys(("host.gpu-count", "host.driver-version", "host.gpu-compute-capabilities"), "info")
    rows = "".join(f'"{field}" = "{severity}"\n' for field, severity in loosened.items())
    spec = own / "hpcenv.toml"
    spec.write_text(spec.read_text() + f"[policy]\n{rows}")
    edit(own, "policy", value=loosened)
    verdict, *_ = verify(cuda_build(own), environ=ENVIRON, gpus=1)
    assert {"host.gpu-count", "host.driver-version", "host.gpu-compute-capabilities"}.isdisjoint(fields(verdict))


# -- the word for a verdict ---------------------------------------------------------------


def verdict(result: Result, *rows: tuple[Severity, Result, str]) -> Verdict:
    findings = tuple(
        Finding(node="n1", field="f", locked="a", found="b", result=found, severity=severity, note=note)
        for severity, found, note in rows
    )
    return Verdict(
        schema=1, run="r", attempt=0, result=result, nodes=(), findings=findings, rendezvous=None, settings={}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "strict", "said"),
    [
        (verdict("match"), True, ("match", 0)),
        (verdict("match", ("info", "mismatch", "")), True, ("match", 0)),
        (verdict("match", ("warn", "mismatch", "")), False, ("match", 0)),
        (verdict("match", ("warn", "mismatch", "")), True, ("warned", 92)),
        (verdict("unknown", ("must", "unknown", "")), False, ("unknown", 91)),
        (verdict("mismatch", ("must", "mismatch", "")), False, ("mismatch", 90)),
        (verdict("mismatch", ("must", "mismatch", DIFFERS_BETWEEN_NODES)), False, ("nodes-disagree", 93)),
        (
            verdict("mismatch", ("must", "mismatch", DIFFERS_BETWEEN_NODES), ("must", "mismatch", "")),
            False,
            ("mismatch", 90),
        ),
    ],
)
def test_every_outcome_has_its_word_and_status(given: Verdict, strict: bool, said: tuple[str, int]) -> None:
    assert outcome(given, strict=strict) == said


def test_modules_that_only_jobs_load_are_named(own: Path, tmp_path: Path, fake_slurm: Any) -> None:
    path = tmp_path / "profiles" / "here.toml"
    path.parent.mkdir(mode=0o755)
    path.write_text('name = "here"\nmodules = ["gcc/13", "fabric"]\n')
    path.chmod(0o600)
    environ = {**fake_slurm.environ, "HPCENV_SITE": str(path), "HOME": str(tmp_path)}
    verdict, *_ = verify(open_workspace(own), environ=environ)
    assert (verdict.result, verdict.notes) == (
        "match",
        ("site profile here: jobs load gcc/13, fabric; here they are not loaded: hpcenv verify --nodes N does",),
    )
