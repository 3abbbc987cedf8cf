"""What environment modules set: read from the environment before and after they are loaded."""

from __future__ import annotations

import base64
import shlex
import subprocess
import sys
from typing import Any

import pytest

from hpcenv.container.modules import Loaded, effects_of, read_report
from hpcenv.records.files import load_record
from hpcenv.records.modules import ModuleEffects


def effects(before: dict[str, str], after: dict[str, str], *, in_container: bool = True) -> Any:
    return effects_of([Loaded(name="fabric/1", before=before, after=after)], in_container=in_container)


def shown(found: Any) -> dict[str, str]:
    return {setting.name: setting.value for setting in found.settings}


def line(when: str, name: str, *entries: str) -> str:
    return f"{when} {name} {base64.b64encode(chr(0).join((*entries, '')).encode()).decode()}\n"


def test_a_report_has_the_environment_before_and_after_each_module() -> None:
    text = line("before", "x", "A=1") + line("after", "x", "A=1", "B=2=3", "LOADEDMODULES=x/1")
    text += line("before", "y", "A=0", "LOADEDMODULES=x/1:y/2") + line("after", "y", "A=2", "LOADEDMODULES=x/1:y/2")
    text += line("before", "z") + line("after", "z", "C=1\n2")
    loaded = read_report(text)
    assert [(one.name, one.changed) for one in loaded] == [
        ("x", {"B": "2=3", "LOADEDMODULES": "x/1"}),
        ("y", {"A": "2"}),
        ("z", {"C": "1\n2"}),
    ]
    assert [one.was_there for one in loaded] == [False, True, False]
    assert [one.has_failed for one in loaded] == [False, False, True]
    assert effects_of(loaded, in_container=True).notes == (
        "module y: its settings for the ranks are not known: it was loaded before the job, and cannot be unloaded",
    )


def test_variables_for_the_container_and_for_communication_are_taken() -> None:
    found = effects(
        {"FI_OLD": "1", "PATH": "/bin"},
        {"FI_OLD": "1", "FI_NEW": "2", "NCCL_NET": "OFI", "HSA_X": "1", "PATH": "/m:/bin", "LD_LIBRARY_PATH": "/host",
         "APPTAINERENV_LD_LIBRARY_PATH": "/fabric", "SINGULARITYENV_A": "old", "APPTAINERENV_A": "new",
         "SINGULARITYENV_B": "b"},
    )  # fmt: skip
    assert shown(found) == {
        "FI_NEW": "2", "NCCL_NET": "OFI", "HSA_X": "1", "LD_LIBRARY_PATH": "/fabric", "A": "new", "B": "b",
    }  # fmt: skip
    assert {setting.origin for setting in found.settings} == {"module fabric/1"}


def test_what_olcfs_own_apptainer_would_append() -> None:
    """Its modules set APPTAINER_WRAPPER_*; the other variables of that kind are told."""
    mpi = {"APPTAINER_WRAPPER_LD_LIBRARY_PATH": "/opt/cray/lib64", "APPTAINER_WRAPPER_BINDPATH": "/opt/cray"}
    gpu = {**mpi, "APPTAINER_WRAPPER_LD_LIBRARY_PATH": "/opt/rocm/lib:/opt/cray/lib64", "APPTAINER_WRAPPER_OTHER": "1"}
    own = {**gpu, "APPTAINERENV_LD_LIBRARY_PATH": "/mine"}
    loaded = [
        Loaded(name=name, before=before, after=after)
        for name, before, after in (("mpi", {}, mpi), ("gpu", mpi, gpu), ("own", gpu, own))
    ]
    found = effects_of(loaded[:2], in_container=True)
    assert [(s.name, s.value, s.origin) for s in found.settings] == [
        ("LD_LIBRARY_PATH", "/opt/rocm/lib:/opt/cray/lib64", "module gpu")
    ]
    assert [(b.source, b.origin) for b in found.binds] == [("/opt/cray", "module mpi")]
    assert found.notes == ("module gpu: APPTAINER_WRAPPER_OTHER is not used; hpcenv itself makes this setting",)
    assert shown(effects_of(loaded, in_container=True)) == {"LD_LIBRARY_PATH": "/mine:/opt/rocm/lib:/opt/cray/lib64"}
    assert shown(effects_of(loaded, in_container=False)) == {}


def test_on_the_host_nothing_for_containers_is_taken() -> None:
    found = effects({}, {"NCCL_NET": "OFI", "APPTAINERENV_A": "1", "APPTAINER_BIND": "/a"}, in_container=False)
    assert (shown(found), found.binds, found.notes) == ({"NCCL_NET": "OFI"}, (), ())


def test_binds_that_a_module_adds() -> None:
    found = effects(
        {"APPTAINER_BIND": "/was"},
        {"APPTAINER_BIND": "/was,/a,/b:/c:ro", "SINGULARITY_BINDPATH": "/d:/e", "APPTAINER_CONTAINLIBS": "/usr/lib64/libcxi.so.1"},
    )  # fmt: skip
    assert {(b.source, b.target, b.read_only) for b in found.binds} == {
        ("/a", "/a", False),
        ("/b", "/c", True),
        ("/d", "/e", False),
        ("/usr/lib64/libcxi.so.1", "/.singularity.d/libs/libcxi.so.1", True),
    }


def test_what_is_not_taken_is_told() -> None:
    found = effects(
        {},
        {"APPTAINER_BIND": "x.sqsh:/sw:image-src=/,rel", "APPTAINERENV_API_TOKEN": "hush", "APPTAINER_NV": "1",
         "APPTAINER_NOENV": "NCCL_DEBUG", "NCCL_NET_PLUGIN": "/opt/aws/libnccl-net.so"},
    )  # fmt: skip
    # Without a value: hpcenv sets nothing, and the job's own value does not reach the container either.
    assert shown(found) == {"NCCL_NET_PLUGIN": ""}
    assert found.binds == ()
    text = "\n".join(found.notes)
    assert "hush" not in text + repr(found)
    for part in (
        "`x.sqsh:/sw:image-src=/` is not used: `image-src=/` is not a mode",
        "`rel` is not used: a path is not absolute",
        "API_TOKEN looks like a credential",
        "APPTAINER_NV is not used",
        "APPTAINER_NOENV is not used",
        "/opt/aws/libnccl-net.so is a library of the host, which the container does not see",
    ):
        assert part in text
    seen = effects({}, {"APPTAINER_BIND": "/opt/aws", "NCCL_NET_PLUGIN": "/opt/aws/libnccl-net.so"})
    assert shown(seen) == {"NCCL_NET_PLUGIN": "/opt/aws/libnccl-net.so"}


# -- steps/modules.sh --------------------------------------------------------------------------

LMOD = 'module() { [ "$2" != bad ] && export LOADEDMODULES="${LOADEDMODULES:-}:$2/9"; }\n'


@pytest.mark.parametrize(
    ("module", "loaded", "names", "status", "said"),
    [
        (LMOD, "", ["gcc/13", "cuda"], 0, "loaded :gcc/13/9:cuda/9"),
        (LMOD, "", ["gcc", "bad"], 91, "cannot load the module bad"),
        ("module() { :; }\n", "", ["gcc"], 91, "cannot load the module gcc"),
        ("module() { :; }\n", "x:gcc/13", ["gcc"], 0, "loaded x:gcc/13"),
        ("", "", ["gcc"], 91, "has no command `module`"),
        (LMOD, "", ["$(touch hacked)"], 0, "loaded :$(touch hacked)/9"),
    ],
    ids=["loads", "fails", "old version fails silently", "there already", "no modules here", "literal"],
)
def test_modules_are_loaded_or_the_job_ends(
    run: Any, module: str, loaded: str, names: list[str], status: int, said: str
) -> None:
    done = run_modules(run, module, loaded, names)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
    assert not (run.base / "hacked").exists()


def run_modules(run: Any, module: str, loaded: str, names: list[str], *, paths: tuple[str, ...] = ()) -> Any:
    """Source modules.sh as the batch script does; `module` is the text of that shell function."""
    words = shlex.join([*(word for path in paths for word in ("--use", path)), *names])
    text = f'set -u\nend() {{ exit "$1"; }}\nrun={run.folder.path}\npython={sys.executable}\n{module}'
    text += f'. "$run/code/modules.sh" {words}\necho "loaded $LOADEDMODULES"\n'
    environ = {"PATH": "/usr/bin:/bin", **({"LOADEDMODULES": loaded} if loaded else {})}
    return subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True, cwd=run.base)


def test_the_step_sees_the_environment_before_and_after_each_module(run: Any) -> None:
    module = """
module() {
  case $1 in
    use) export MODULEPATH=$2 ;;
    unload) LOADEDMODULES= ; unset NCCL_A ;;
    load) export LOADEDMODULES="${LOADEDMODULES:-}:$2" NCCL_A="$2 of $MODULEPATH
second line" ;;
  esac
}
"""
    done = run_modules(run, module, "y", ["x/1", "y"], paths=("/m m",))
    assert (done.returncode, done.stdout) == (0, "loaded :y\n"), done.stderr
    effects = load_record(ModuleEffects, run.folder.modules)
    assert [(s.name, s.value, s.origin) for s in effects.settings] == [("NCCL_A", "y of /m m\nsecond line", "module y")]
    assert effects.notes == ()


def test_a_module_that_cannot_be_loaded_anew_is_noted(run: Any) -> None:
    done = run_modules(run, "module() { :; }\n", "x:gcc/13", ["gcc"])
    assert done.returncode == 0, done.stderr
    (note,) = load_record(ModuleEffects, run.folder.modules).notes
    assert note.startswith("module gcc: its settings for the ranks are not known")
