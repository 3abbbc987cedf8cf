"""The program that starts a container, and what the site's profile adds to its environment."""

import dataclasses
import time
from pathlib import Path

import pytest

from hpcenv.errors import ToolMissing, UsageError
from hpcenv.project import site_files
from hpcenv.project.context import Context
from hpcenv.project.site_profile import Profile, profile
from hpcenv.project.site_when import RunFacts
from hpcenv.records.manifest import Environment, Overlay
from hpcenv.submission.early_checks import places_of_nodes
from hpcenv.submission.locked_container import program_of, with_wrapper
from hpcenv.submission.plan import Call
from hpcenv.submission.request import CopiedCode, SubmitOptions

SIF = Environment(kind="sif", python="python3", sif="/a.sif", apptainer="/bin/apptainer")


def site(folder: Path, text: str) -> Profile:
    path = folder / "jura.toml"
    path.write_text(f'name = "jura"\n{text}')
    path.chmod(0o600)
    found, _ = site_files.read(path)
    return profile(found, str(path)).for_run(RunFacts(nodes=1))


def runtime(kind: str, more: str = "") -> str:
    return f'{more}\n[runtime]\nkind = "{kind}"\nreason = "it is there"\n'


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "bin" / "singularity"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return {"PATH": str(program.parent)}


def test_the_user_wins_over_the_site_and_the_site_over_the_path(tmp_path: Path, environ: dict[str, str]) -> None:
    of_site = site(tmp_path, runtime("singularity") + 'program = "/opt/ce/bin/singularity"\n')
    assert program_of("/my/apptainer", of_site, environ) == "/my/apptainer"
    assert program_of(None, of_site, environ) == "/opt/ce/bin/singularity"
    assert program_of(None, None, environ) == program_of(None, site(tmp_path, ""), environ) == ""


def test_the_kind_of_a_site_is_the_name_of_its_program(tmp_path: Path, environ: dict[str, str]) -> None:
    assert program_of(None, site(tmp_path, runtime("singularity")), environ) == f"{environ['PATH']}/singularity"
    with pytest.raises(ToolMissing, match="`apptainer` is not on PATH") as caught:
        program_of(None, site(tmp_path, runtime("apptainer")), environ)
    assert "[runtime] in" in str(caught.value)
    # A module may bring it, on the nodes only.
    assert program_of(None, site(tmp_path, runtime("apptainer", 'modules = ["apptainer"]')), environ) == "apptainer"


@pytest.mark.parametrize("named", ["./apptainer", "bin/apptainer", "-x"])
def test_a_program_of_the_project_folder_is_refused(named: str, environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="is no program"):
        program_of(named, None, environ)


def test_the_wrapper_of_the_site_says_who_asks_for_it(tmp_path: Path) -> None:
    text = '[entry-wrapper]\ncommand = ["/host/adapt.sh"]\nreason = "the host\'s fabric"\nsource = "ticket 7"\n'
    found = with_wrapper(SIF, site(tmp_path, text))
    assert found.wrapper == ("/host/adapt.sh",)
    assert found.wrapper_origin == "site profile jura, the host's fabric (ticket 7)"
    assert with_wrapper(SIF, site(tmp_path, "")) == with_wrapper(SIF, None) == SIF
    assert dataclasses.replace(found, wrapper=(), wrapper_origin="") == SIF


def test_every_node_must_see_the_overlay(tmp_path: Path) -> None:
    context = Context(environ={}, cwd=tmp_path, now=time.localtime(0), token="beef", command=("hpcenv", "submit"))
    options = SubmitOptions(script="train.py", nproc=1)
    with_it = dataclasses.replace(SIF, overlay=Overlay(source="/s/x.sqsh", use="packages", target="/opt/x"))
    assert places_of_nodes(tmp_path, options, context, with_it, None)["the overlay"] == Path("/s")
    assert "the overlay" not in places_of_nodes(tmp_path, options, context, SIF, None)


def test_a_copy_of_a_runs_code_is_read_on_the_login_node_only(tmp_path: Path) -> None:
    """compare --explain-op and reproduce --copy submit from one; on many clusters /tmp is a disk of the login node."""
    context = Context(
        environ={}, cwd=tmp_path / "copy", now=time.localtime(0), token="beef", command=("hpcenv", "submit")
    )
    options = SubmitOptions(script="train.py", nproc=1)
    copied = dataclasses.replace(options, copied=CopiedCode(root=context.cwd, files=("train.py",)))
    there = {context.cwd}
    assert there <= set(places_of_nodes(tmp_path, options, context, SIF, None).values())
    assert there.isdisjoint(places_of_nodes(tmp_path, copied, context, SIF, None).values())
    live = dataclasses.replace(copied, workdir="live")
    assert there <= set(places_of_nodes(tmp_path, live, context, SIF, None).values())


def test_the_folder_of_an_executor_is_a_place_that_nodes_must_see(tmp_path: Path) -> None:
    context = Context(environ={}, cwd=tmp_path, now=time.localtime(), token="", command=())
    call = Call(name="c", script="s", files={}, spec={}, folder=Path("/tmp/jobs"))
    places = places_of_nodes(tmp_path, SubmitOptions(script=None, call=call), context, SIF, None)
    assert places["the folder of the executor"] == Path("/tmp/jobs")
