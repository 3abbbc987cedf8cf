"""runtime: which program starts containers, what it is, and in what the two programs differ."""

import pytest

from hpcenv.container import runtime
from hpcenv.errors import HpcenvError, ToolFailed, ToolMissing
from hpcenv.facts.probe import run_probe
from hpcenv.records.manifest import Environment
from hpcenv.submission.locked_container import notes_on_sif


def program(folder, name, said):
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)
    return str(path)


def test_apptainer_is_found_before_singularity_and_singularity_alone(tmp_path):
    with pytest.raises(ToolMissing, match="neither `apptainer` nor `singularity`"):
        runtime.find(str(tmp_path))
    with pytest.raises(ToolMissing, match="`apptainer` is not on PATH"):
        runtime.find_builder(str(tmp_path))
    singularity = program(tmp_path, "singularity", "singularity-ce version 4.5.1")
    assert runtime.find(str(tmp_path)) == singularity
    apptainer = program(tmp_path, "apptainer", "apptainer version 1.4.5")
    assert runtime.find(str(tmp_path)) == runtime.find_builder(str(tmp_path)) == apptainer


# What the programs print: Apptainer 1.4.5-2 of Debian and SingularityCE 4.5.1 were run, the others are in their sources.
@pytest.mark.parametrize(
    ("name", "said", "kind", "text", "usable"),
    [
        ("apptainer", "apptainer version 1.4.5", "apptainer", "Apptainer 1.4.5", True),
        ("singularity", "apptainer version 1.4.5-2.el9", "apptainer", "Apptainer 1.4.5-2.el9", True),
        ("apptainer", "apptainer version 1.1.9", "apptainer", "Apptainer 1.1.9", False),
        ("singularity", "singularity-ce version 4.5.1", "singularity-ce", "SingularityCE 4.5.1", True),
        ("singularity", "singularity-ce version 4.1.3-150500.10.7", "singularity-ce", "SingularityCE 4.1.3", True),
        ("singularity", "singularity-ce version 3.11.4-focal", "singularity-ce", "SingularityCE 3.11.4", False),
        ("singularity", "singularity-pro version 4.1.5-1.el8", "singularity-pro", "SingularityPRO 4.1.5", True),
        ("singularity", "singularity version 3.8.7", "singularity", "Singularity 3.8.7", False),
    ],
)
def test_programs_are_told_apart_by_what_they_print_not_by_their_name(tmp_path, name, said, kind, text, usable):
    found = runtime.identify(program(tmp_path, name, said), {})
    assert (found.kind, str(found).startswith(text), found.unusable == "") == (kind, True, usable)
    if not usable:
        assert "SingularityCE 4.0" in found.unusable


@pytest.mark.parametrize("said", ["hello", "", "apptainer", "docker version 27.1.1", "apptainer version x"])
def test_another_program_is_refused(tmp_path, said):
    with pytest.raises(ToolFailed, match="does not name a version"):
        runtime.identify(program(tmp_path, "apptainer", said), {})
    with pytest.raises(ToolMissing):
        runtime.identify(str(tmp_path / "none"), {})


def starter(folder, version, says):
    """What fails to start a container: the version that it prints, and its words then."""
    path = folder / "apptainer"
    path.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && {{ echo '{version}'; exit 0; }}\n{says} >&2; exit 255\n")
    path.chmod(0o755)
    return Environment(kind="sif", python="python3", sif="/a.sif", apptainer=str(path))


NO_NAMESPACES = "echo 'FATAL:   while running: Failed to create user namespace: not allowed to create user namespace'"


@pytest.mark.parametrize(
    ("version", "says", "what", "why"),
    [
        (
            "apptainer version 1.0.3",
            "echo 'Error: unknown flag: --no-eval'",
            "is apptainer 1.0.3; hpcenv needs",
            "no-eval",
        ),
        ("singularity version 3.5.2", "echo unknown flag", "is singularity 3.5.2; hpcenv needs", "unknown flag"),
        ("garbage", "echo unknown flag", "does not name a version: it prints 'garbage", "unknown flag"),
        ("apptainer version 1.4.5", NO_NAMESPACES, "does not let you create user namespaces", "FATAL"),
        (
            "apptainer version 1.4.5",
            "echo 'FATAL: something else'",
            "`apptainer` ended with status 255",
            "something else",
        ),
    ],
)
def test_a_container_that_does_not_start_says_why_on_login_node_and_nodes(tmp_path, version, says, what, why):
    environment = starter(tmp_path, version, says)
    with pytest.raises(HpcenvError) as error:
        run_probe(environment, {}, probe="", level="full", seconds=30)
    assert what in error.value.what and why in error.value.why


def test_a_submission_names_a_program_that_is_too_old(tmp_path):
    old = starter(tmp_path, "apptainer version 1.1.9", "true")
    (note,) = notes_on_sif(old, {})
    assert note.endswith("or later: the check of the nodes would fail") and "apptainer 1.1.9" in note
    assert notes_on_sif(starter(tmp_path, "apptainer version 1.2.0", "true"), {}) == ()
