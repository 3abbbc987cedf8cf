"""Each reason why a lockfile is stale, as a tiny project folder: tests/stale/REASON/."""

from __future__ import annotations

import os
import typing
from pathlib import Path

import pytest
from lock_world import check_project

from hpcenv.errors import LockfileStale
from hpcenv.project import stale
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.records.manifest import OverlayUse
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions

FOLDERS = Path(__file__).resolve().parents[2] / "stale"

# What the reason says after its name.
SAYS = {
    "image-changed": "locked docker://registry.example/team/torch:2.13.0, now docker://registry.example/team/torch:2.14.0",
    "platform-changed": "locked linux/amd64, now linux/arm64",
    "python-changed": "locked the default, now /opt/conda/bin/python",
    "policy-changed": "locked no overrides, now torch.version = info",
    "gpu-changed": "locked a100, now h100",
    "gpu-memory-changed": "locked any, now 40 GB",
    "profile-changed": "locked off, now bitwise",
    "env-changed": "locked OMP_NUM_THREADS = 4, no WANDB_API_KEY, now OMP_NUM_THREADS = 8, WANDB_API_KEY = (value not recorded)",
    "bind-changed": "locked no binds, now /data (read-only)",
    "overlay-changed": "locked an overlay at /opt/extra, now extra:/opt/other",
    "overlay-missing": f"locked sha256:{'5' * 64}, now ",
    "overlay-differs": f"locked sha256:{'5' * 64}, now sha256:",
    "overlay-form": "locked a folder at /opt/extra, now only a squashfs at a path of the container is mounted",
    "edited": "(the file was changed by hand or by a merge)",
    "sif-missing": f"locked {'3' * 64}, now no ",
    "sif-differs": f"locked {'3' * 64}, now ",
    "environment-differs": "locked packages.torch 2.13.0+cpu, now absent",
    "environment-unreadable": "locked readable, now ",
}


@pytest.fixture
def environ(request: pytest.FixtureRequest, python_without_torch: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of this machine, for the two reasons that look at one."""
    if request.node.callspec.params["reason"] == "environment-unreadable":
        program = tmp_path / "bin" / "python"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
        program.chmod(0o755)
        return {"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(tmp_path)}
    return {"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(python_without_torch.parents[1])}


def test_every_reason_has_its_folder() -> None:
    assert {path.name for path in FOLDERS.iterdir()} == set(typing.get_args(stale.Name)) == set(SAYS)


@pytest.mark.parametrize("reason", SAYS)
def test_the_check_names_the_reason(reason: str, environ: dict[str, str]) -> None:
    result = check_project(FOLDERS / reason, environ)
    assert not result.fresh
    assert {found.name for found in result.reasons} == {reason}
    assert any(str(found).startswith(f"{reason}: ") and SAYS[reason] in str(found) for found in result.reasons)


# What hpcenv.toml or the lockfile alone shows.
SEEN_AT_ONCE = [
    reason
    for reason in SAYS
    if not reason.startswith(("environment-", "sif-", "overlay-missing", "overlay-differs", "overlay-form"))
]


@pytest.mark.parametrize("reason", SEEN_AT_ONCE)
def test_submit_refuses_what_can_be_seen_without_looking_inside(
    reason: str, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    context = Context(
        environ=environ, cwd=tmp_path, now=__import__("time").localtime(0), token="0", command=("hpcenv",)
    )
    with pytest.raises(LockfileStale) as caught:
        plan_job(open_workspace(FOLDERS / reason), SubmitOptions(script="train.py", nproc=1, cluster="local"), context)
    assert SAYS[reason] in str(caught.value.why)
    wanted = (
        f"git checkout -- {FOLDERS / reason / 'lockfiles' / 'default.lock.toml'}"
        if reason == "edited"
        else "hpcenv lock"
    )
    assert wanted in str(caught.value.hint)


def test_an_overlay_of_an_older_lockfile_is_packed_again() -> None:
    reason = stale.StaleReason(name="overlay-form", locked="a folder at /opt/extra", found="only a squashfs")
    hint = " ".join(map(str, stale.hint([reason], path=Path("x.lock.toml"), name="default")))
    assert "mksquashfs DIR x.sqsh" in hint and hint.endswith("hpcenv lock")


@pytest.mark.parametrize(
    ("use", "target", "words"),
    [
        ("layer", None, "a folder over the whole image"),
        ("venv", None, "a folder at its own path"),
        ("packages", "/opt/extra", "an overlay at /opt/extra"),
    ],
)
def test_an_overlay_without_a_target_is_named_by_where_it_is(use: OverlayUse, target: str | None, words: str) -> None:
    folder = Path(__file__).parents[2] / "stale" / "overlay-changed"
    workspace = open_workspace(folder)
    locked = read_lockfile(workspace.lockfile_path("default"))
    assert locked.container is not None and locked.container.overlay is not None
    changed = locked.container.overlay.model_copy(update={"use": use, "target": target})
    found = stale.compare_spec(
        workspace.project,
        locked.model_copy(update={"container": locked.container.model_copy(update={"overlay": changed})}),
    )
    assert [reason.locked for reason in found if reason.name == "overlay-changed"] == [words]
