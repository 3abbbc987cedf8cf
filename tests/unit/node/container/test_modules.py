"""What environment modules set: read from the environment before and after they are loaded."""

from __future__ import annotations

from typing import Any

from hpcenv.node.container.modules import Loaded, effects_of, read_report


def effects(before: dict[str, str], after: dict[str, str], *, in_container: bool = True) -> Any:
    return effects_of([Loaded(name="fabric/1", before=before, after=after)], [], in_container=in_container)


def shown(found: Any) -> dict[str, str]:
    return {setting.name: setting.value for setting in found.settings}


def test_a_report_is_parted_by_its_marks() -> None:
    entries = ["base", "A=1", "module x", "A=1", "B=2=3", "base", "A=0", "kept y", "A=0", ""]
    loaded, unseen = read_report(entries)
    assert [(one.name, one.changed) for one in loaded] == [("x", {"B": "2=3"})]
    assert unseen == ["y"]


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
    found = effects_of(loaded[:2], [], in_container=True)
    assert [(s.name, s.value, s.origin) for s in found.settings] == [
        ("LD_LIBRARY_PATH", "/opt/rocm/lib:/opt/cray/lib64", "module gpu")
    ]
    assert [(b.source, b.origin) for b in found.binds] == [("/opt/cray", "module mpi")]
    assert found.notes == ("module gpu: APPTAINER_WRAPPER_OTHER is not used; hpcenv sets what it decides",)
    assert shown(effects_of(loaded, [], in_container=True)) == {
        "LD_LIBRARY_PATH": "/mine:/opt/rocm/lib:/opt/cray/lib64"
    }
    assert shown(effects_of(loaded, [], in_container=False)) == {}


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
         "NCCL_NET_PLUGIN": "/opt/aws/libnccl-net.so"},
    )  # fmt: skip
    # Without a value: hpcenv sets nothing, and the job's own value does not reach the container either.
    assert shown(found) == {"NCCL_NET_PLUGIN": ""}
    assert found.binds == ()
    text = "\n".join(found.notes)
    assert "hush" not in text + repr(found)
    for part in (
        "`x.sqsh:/sw:image-src=/` is not used: `image-src=/` is no mode",
        "`rel` is not used: a path is not absolute",
        "API_TOKEN looks like a credential",
        "APPTAINER_NV is not used",
        "/opt/aws/libnccl-net.so is a library of the host, which the container does not see",
    ):
        assert part in text
    seen = effects({}, {"APPTAINER_BIND": "/opt/aws", "NCCL_NET_PLUGIN": "/opt/aws/libnccl-net.so"})
    assert shown(seen) == {"NCCL_NET_PLUGIN": "/opt/aws/libnccl-net.so"}


def test_a_module_that_was_there_before_is_told() -> None:
    assert effects_of([], ["old"], in_container=True).notes == (
        "module old: what it sets for the ranks is not known: it was loaded before the job, and cannot be unloaded",
    )
