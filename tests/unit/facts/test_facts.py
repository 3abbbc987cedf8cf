"""What one node finds: each part alone, and a reason for whatever cannot be read."""

import dataclasses
import hashlib
import json
import os

import pytest

from hpcenv.errors import ToolFailed
from hpcenv.facts import facts, probe
from hpcenv.facts.facts import compare_packages
from hpcenv.identity import sif_check
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.facts import Difference, Staged
from hpcenv.records.files import save_record
from hpcenv.records.manifest import Environment, Expectation, Overlay, PackageExpectation, SifIdentity, StageRequest

PLACE = ThisNode(node="n1", nodes=("n1",), attempt=1, job_id="77")


def gather(manifest, environ=None):
    return facts.gather(manifest, PLACE, environ or {"PATH": os.environ["PATH"]}, probe="the probe")


def answer(**changes):
    found = {"schema": 1, "level": "full", "values": {}, "unknown": {}, "packages": []}
    return json.dumps(found | {"mountinfo": "1 0 0:1 / / rw - overlay overlay rw"} | changes)


# -- a node on the host's environment -----------------------------------------------------


def test_a_node_tells_who_it_is_and_what_it_found(run):
    found = gather(run.manifest)
    assert (found.run, found.node, found.attempt) == ("r1", "n1", 1)
    assert found.values["python.version"] == "3.11.7"
    assert found.values["host.machine"] == os.uname().machine
    assert found.values["host.cpus"] == len(os.sched_getaffinity(0))
    assert found.values["code.script-sha256"] == run.manifest.script_sha256
    assert (found.unknown, found.differences, found.sif) == ({}, (), None)
    assert sorted(found.seconds) == ["fabric", "host", "network", "probe", "script"]


def test_a_script_that_is_not_there_is_unknown(run):
    os.unlink(run.manifest.script)
    found = gather(run.manifest)
    assert found.unknown == {"code.script-sha256": f"cannot read {run.manifest.script}: No such file or directory"}


def test_the_probe_gets_its_source_level_and_the_ranks_variables(run):
    run.probe(
        '''printf '{"schema": 1, "level": "full", "values": {"argv": "%s", "debug": "%s"}, "unknown": {}, "packages": []}' "$*" "$NCCL_DEBUG"'''
    )
    run.save(settings=(facts_setting("NCCL_DEBUG", "TRACE"),))
    found = gather(run.manifest)
    python = run.manifest.environment.python
    argv = f"-B --check-hash-based-pycs always - --python {python} --revision 1 --level full"
    assert (found.values["argv"], found.values["debug"]) == (argv, "TRACE")


def facts_setting(name, value):
    from hpcenv.records.manifest import Setting

    return Setting(name=name, value=value, origin="--env")


INSIDE = {
    "ATEN_CPU_CAPABILITY": "default", "SCRATCH_OF": "/scratch/n1/x", "API_TOKEN": "hunter2", "CUDA_VERSION": "13.0",
    "NCCL_DEBUG": "INFO", "MKL_CBWR": "AVX2", "PATH": "/bin", "APPTAINER_NAME": "a.sif", "SHLVL": "1", "LANG": "C",
    "SLURM_JOB_ID": "7", "PYTHONNOUSERSITE": "1", "LD_LIBRARY_PATH": "/x",
}  # fmt: skip


def test_variables_that_neither_hpcenv_nor_the_image_has_set_are_reported(run):
    told = answer(environ=INSIDE, **{"image-variables": ["CUDA_VERSION"]})
    run.probe(f"echo '{told}'")
    run.save(settings=(facts_setting("NCCL_DEBUG", "TRACE"), facts_setting("MKL_CBWR", "AVX2")))
    found = gather(run.manifest)
    seen = {name: value for name, value in found.values.items() if name.startswith("env.")}
    assert seen == {
        "env.ATEN_CPU_CAPABILITY": "default", "env.SCRATCH_OF": "/scratch/NODE/x", "env.CUDA_VERSION": "13.0",
        "env.API_TOKEN": "(value not recorded)", "env.NCCL_DEBUG": "INFO", "env.MKL_CBWR": "AVX2",
    }  # fmt: skip
    origin = "seen in the environment; hpcenv did not set it"
    assert [v.name for v in found.variables if v.origin == origin] == [
        "API_TOKEN", "ATEN_CPU_CAPABILITY", "NCCL_DEBUG", "SCRATCH_OF",
    ]  # fmt: skip


def test_a_program_around_python_that_sets_nothing_gives_no_variable(run):
    quiet = {name: INSIDE[name] for name in ("PATH", "SHLVL", "LANG", "SLURM_JOB_ID", "APPTAINER_NAME")}
    run.probe(f"echo '{answer(environ=quiet)}'")
    found = gather(run.manifest)
    assert [name for name in found.values if name.startswith("env.")] == []


def test_lists_become_tuples_as_they_will_be_read(run):
    run.probe(f"echo '{answer(values={'python.sys-path': ['/a', '/b']})}'")
    assert gather(run.manifest).values["python.sys-path"] == ("/a", "/b")


def test_a_probe_that_read_nothing_is_one_reason_and_no_package_is_absent(run):
    """As from an interpreter whose json cannot be imported."""
    unknown = dict.fromkeys(
        ("python.version", "packages.count", "packages.env-digest", "torch.version"), "SyntaxError: x"
    )
    run.probe(f"echo '{answer(unknown=unknown)}'")
    facts = gather(run.manifest)
    assert facts.unknown == {"probe": "nothing inside could be read: SyntaxError: x"}
    assert facts.differences == ()


def test_packages_that_could_not_be_read_are_not_called_absent():
    locked = (PackageExpectation(name="numpy", version="2.1"),)
    assert (
        compare_packages(locked, {"packages": [], "unknown": {"packages.count": "PermissionError"}}, level="full") == []
    )
    assert [d.found for d in compare_packages(locked, {"packages": [], "unknown": {}}, level="full")] == ["absent"]


def test_why_no_content_could_be_read_is_the_reason_for_each_package():
    locked = tuple(PackageExpectation(name=name, version="1", content_sha256="0" * 64) for name in ("a", "b"))
    installed = [
        {"name": "a", "version": "1"},
        {"name": "b", "version": "1", "reason": "its own", "content-sha256": None},
    ]
    broken = {"packages": installed, "unknown": {"packages.content-digest": "ImportError: threading"}}
    found = compare_packages(locked, broken, level="full")
    assert [(d.unknown, d.found) for d in found] == [(True, "ImportError: threading"), (True, "its own")]


def test_an_interpreter_that_does_not_start_is_told_in_its_own_words(run):
    said = r"""Python path configuration:
  PYTHONHOME = (not set)
Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding
ModuleNotFoundError: No module named 'encodings'

Current thread 0x00007f (most recent call first):
  <no Python frame>"""
    run.probe(f"cat >&2 <<'END'\n{said}\nEND\nexit 1")
    reason = gather(run.manifest).unknown["probe"]
    assert "Fatal Python error: init_fs_encoding: failed to get the Python codec" in reason
    assert reason.endswith("ModuleNotFoundError: No module named 'encodings'")


def test_what_the_probe_could_not_read_is_unknown_with_its_reason(run):
    run.probe(f"echo '{answer(unknown={'torch.version': 'no torch'})}'")
    assert gather(run.manifest).unknown == {"torch.version": "no torch"}


def test_the_environment_does_not_speak_for_the_host(run):
    run.probe(f"echo '{answer(values={'host.machine': 'fake', 'code.script-sha256': 'fake'})}'")
    found = gather(run.manifest)
    assert found.values["host.machine"] == os.uname().machine
    assert found.values["code.script-sha256"] == run.manifest.script_sha256


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo 'no such module' >&2; exit 1", "`python` ended with status 1: no such module"),
        ("exit 1", "`python` ended with status 1"),
        ("kill -9 $$", "`python` ended with status -9"),
        ("true", "ValueError: the probe answered ''"),
        ("echo hello", "ValueError: the probe answered 'hello'"),
        (f"echo '{answer()[:-5]}'", f"ValueError: the probe answered {answer()[:-5]!r}"),
        ("echo '[1]'", "ValueError: the probe answered '[1]'"),
        (f"echo '{answer(schema=2)}'", f"ValueError: the probe answered {answer(schema=2)!r}"),
        (f"echo '{answer(level='record')}'", f"ValueError: the probe answered {answer(level='record')!r}"),
        (f"echo '{answer(values=None)}'", "ValueError: the probe's answer has no usable values"),
        (f"echo '{answer(packages={}, unknown=[])}'", "ValueError: the probe's answer has no usable unknown, packages"),
        (f"echo '{answer(values={'a': None})}'", "ValueError: not a fact: None"),
    ],
)
def test_a_probe_that_fails_or_says_nonsense_is_unknown_and_the_rest_goes_on(run, program, reason):
    run.probe(program)
    found = gather(run.manifest)
    assert found.unknown == {"probe": reason}
    assert "python.version" not in found.values
    assert found.values["code.script-sha256"] == run.manifest.script_sha256


def test_packages_of_an_unknown_shape_are_unknown(run):
    run.probe(f"echo '{answer(packages=[{}])}'")
    assert gather(run.manifest).unknown == {"probe": "KeyError: 'name'"}


def test_a_probe_that_does_not_end_is_stopped(run):
    run.probe("exec sleep 60")
    run.save(check_seconds=1)
    assert gather(run.manifest).unknown == {"probe": "`python` did not answer within 1 s"}


def test_lines_that_the_environment_prints_first_do_not_count(run):
    run.probe(f"echo 'a .pth says hello'; echo; echo '{answer(values={'a': '1'})}'")
    assert gather(run.manifest).values["a"] == "1"


def test_an_interpreter_that_is_missing_or_not_executable_is_unknown(run):
    (run.bin / "python").chmod(0o644)
    assert gather(run.manifest).unknown["probe"] == f"`{run.bin}/python` cannot be started: Permission denied"
    (run.bin / "python").unlink()
    assert gather(run.manifest).unknown["probe"].startswith(f"`{run.bin}/python` cannot be started: ")


def test_the_probes_folder_is_removed_whatever_happens(run):
    run.probe("exit 1")
    before = os.environ.get("TMPDIR")
    done = run.step("check")
    assert done.returncode == 0, done.stderr
    assert os.listdir(run.tmp) == []
    assert os.environ.get("TMPDIR") == before


# -- a SIF --------------------------------------------------------------------------------


@pytest.fixture
def sif_run(run):
    """A run on a file that stands for a SIF, and a program that stands for apptainer."""
    image = run.base / "a.sif"
    image.write_bytes(b"image")
    digest = hashlib.sha256(b"image").hexdigest()
    apptainer = run.bin / "apptainer"
    # The last words are the command: the fake Python knows them.
    apptainer.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "apptainer version 1.4.5" && exit\n'
        f'echo "$@" > {run.base}/argv\nwhile [ "$1" != -B ]; do shift; done\nexec {run.bin}/python "$@"\n'
    )
    apptainer.chmod(0o755)
    run.save(
        environment=Environment(kind="sif", python="python3", sif=str(image), apptainer=str(apptainer)),
        expectations=(Expectation(field="container.sif.sha256", value=digest, severity="must"),),
    )
    run.image = image
    return run


def test_the_file_that_was_hashed_is_the_one_that_starts(sif_run):
    found = gather(sif_run.manifest)
    assert found.unknown == {}
    assert found.values["container.sif.sha256"] == hashlib.sha256(b"image").hexdigest()
    assert found.sif.file.inode == sif_run.image.stat().st_ino
    assert " /proc/self/fd/" in (sif_run.base / "argv").read_text()
    assert str(sif_run.image) not in (sif_run.base / "argv").read_text()


def test_another_sif_is_never_started(sif_run):
    sif_run.image.write_bytes(b"evil!")
    found = gather(sif_run.manifest)
    assert found.values["container.sif.sha256"] == hashlib.sha256(b"evil!").hexdigest()
    assert found.unknown == {"probe": "not read: the SIF is not the locked one"}
    assert not (sif_run.base / "argv").exists()


SQUASHFS = b"hsqs" + bytes(4092)


@pytest.fixture
def overlay_run(sif_run):
    """A run with a squashfs over its SIF."""
    place = sif_run.base / "extra.sqsh"
    place.write_bytes(SQUASHFS)
    field, value = "container.overlay.sha256", hashlib.sha256(SQUASHFS).hexdigest()
    overlay = Overlay(source=str(place), use="packages", target="/opt/extra")
    expected = Expectation(field=field, value=value, severity="must")
    sif_run.save(
        environment=dataclasses.replace(sif_run.manifest.environment, overlay=overlay),
        expectations=(*sif_run.manifest.expectations, expected),
    )
    sif_run.place, sif_run.field = place, field
    return sif_run


def test_the_overlay_is_checked_before_it_is_mounted(overlay_run):
    found = gather(overlay_run.manifest)
    assert found.unknown == {}
    assert found.values[overlay_run.field] == overlay_run.manifest.expectations[-1].value
    assert str(overlay_run.place) in (overlay_run.base / "argv").read_text()


def test_nothing_of_an_overlay_with_a_changed_byte_is_started(overlay_run):
    content = overlay_run.place.read_bytes()
    overlay_run.place.write_bytes(content[:-1] + b"2")
    found = gather(overlay_run.manifest)
    assert found.values["container.sif.sha256"] == hashlib.sha256(b"image").hexdigest()
    assert found.values[overlay_run.field] != overlay_run.manifest.expectations[-1].value
    assert found.unknown == {"probe": "not read: the overlay is not the locked one"}
    assert not (overlay_run.base / "argv").exists()


def test_an_overlay_that_is_not_on_this_node_is_unknown(overlay_run):
    overlay_run.place.rename(overlay_run.base / "elsewhere")
    found = gather(overlay_run.manifest)
    assert sorted(found.unknown) == [overlay_run.field, "probe"]
    assert found.unknown[overlay_run.field].startswith(f"cannot read {overlay_run.place}: ")
    assert not (overlay_run.base / "argv").exists()


def test_a_bind_below_an_overlay_is_a_mount_that_must_not_be(overlay_run):
    # Of a module, or an administrator's: neither is known at submission. The image has nothing at either path.
    root = "1 0 0:1 / / rw - overlay overlay rw"
    lines = [root, *(f"2 1 0:9 / {path} rw - nfs x rw" for path in ("/opt/extra/lib", "/opt/other"))]
    overlay_run.probe("cat <<'END'\n" + answer(mountinfo="\n".join(lines)) + "\nEND")
    overlay_run.save(unlocked_binds=("/opt/extra/bin",))
    found = gather(overlay_run.manifest).values
    hides = (
        "/opt/extra/bin (bind), hides a part of the overlay",
        "/opt/extra/lib (nfs: /), hides a part of the overlay",
    )
    assert tuple(one for one in found["container.mounts"] if "not mounted" not in one) == hides
    assert found["container.mounts-elsewhere"] == ("/opt/other (nfs: /)",)


def test_an_overlay_that_policy_lets_differ_is_mounted(overlay_run):
    changed = dataclasses.replace(overlay_run.manifest.expectations[-1], value="other", severity="warn")
    overlay_run.save(expectations=(overlay_run.manifest.expectations[0], changed))
    assert gather(overlay_run.manifest).values["python.version"] == "3.11.7"


def test_a_sif_that_policy_lets_differ_is_looked_into(sif_run):
    sif_run.save(expectations=(Expectation(field="container.sif.sha256", value="other", severity="warn"),))
    assert gather(sif_run.manifest).values["python.version"] == "3.11.7"


def test_a_sif_that_is_not_there_says_so_for_itself_and_for_the_inside(sif_run):
    sif_run.image.unlink()
    found = gather(sif_run.manifest)
    assert found.unknown == {
        "container.sif.sha256": f"cannot open {sif_run.image}: No such file or directory",
        "probe": "not read: the SIF could not be read",
    }
    assert found.sif is None


def test_a_folder_in_the_place_of_a_sif_is_unknown(sif_run):
    sif_run.image.unlink()
    sif_run.image.mkdir()
    found = gather(sif_run.manifest)
    assert sorted(found.unknown) == ["probe", "sif"]


def test_a_container_that_does_not_start_is_the_probes_failure(sif_run):
    sif_run.probe("echo 'FATAL: no user namespaces' >&2; exit 255")
    assert gather(sif_run.manifest).unknown == {"probe": "`apptainer` ended with status 255: FATAL: no user namespaces"}


def test_a_known_sif_is_not_read_again_and_says_so(run, make_sif):
    """The identity names another hash than the bytes have. If this hash is reported, the bytes were not read."""
    image = make_sif(run.base / "known.sif")
    descriptor = os.open(image, os.O_RDONLY)
    header, offset, size = sif_check.header_of(descriptor)
    file = sif_check.identity_of(descriptor)
    os.close(descriptor)
    known = SifIdentity(
        sha256="f" * 64, inode=file.inode, size=file.size, mtime_ns=file.mtime_ns, ctime_ns=file.ctime_ns,
        header_sha256=header, partition_offset=offset, partition_size=size,
    )  # fmt: skip
    run.save(environment=Environment(kind="sif", python="python3", sif=str(image), apptainer="/nosuch"), sif=known)

    def found(level, image=known):
        manifest = dataclasses.replace(run.manifest, probe_level=level, sif=image)
        return facts.gather(manifest, PLACE, {"PATH": "/usr/bin:/bin"}, probe="", record_places=()).sif

    assert (found("record").checked, found("record").sha256) == ("identity", "f" * 64)
    real = hashlib.sha256(image.read_bytes()).hexdigest()
    for level in ("full", "deep"):
        assert (found(level).checked, found(level).sha256) == ("full", real)
    assert (found("record", None).checked, found("record", None).sha256) == ("full", real)
    image.write_bytes(image.read_bytes()[:-1] + b"!")
    assert (found("record").checked, found("record").sha256 == known.sha256) == ("full", False)


def test_a_sif_that_is_swapped_while_it_is_probed_is_not_taken_for_the_locked_one(sif_run):
    sif_run.probe(f"cp {sif_run.image} {sif_run.image}.new; mv {sif_run.image}.new {sif_run.image}; echo '{PROBED}'")
    found = gather(sif_run.manifest)
    assert found.values["container.sif.sha256"] == "replaced while it was checked"
    assert found.unknown == {"probe": "not read: the SIF is not the locked one"}


PROBED = answer(values={"python.version": "3.11.7"})


def staged_run(sif_run, **changes):
    sif_run.save(stage=StageRequest(folder="", limit=1, sif_sha256="00"))
    record = Staged(schema=1, run="r1", node="n1", attempt=1)
    save_record(dataclasses.replace(record, **changes), sif_run.folder.staged_of("n1"))
    return gather(sif_run.manifest)


def test_a_node_that_could_not_take_a_copy_works_from_the_shared_file_and_says_why(sif_run):
    found = staged_run(sif_run, problems=("no room",))
    assert (found.sif.path, found.sif.staged, found.not_staged) == (str(sif_run.image), False, ("no room",))
    assert found.unknown == {}


@pytest.mark.parametrize("changes", [{"attempt": 0}, {"run": "r0"}, {"node": "n2"}])
def test_copies_of_another_start_do_not_count(sif_run, changes):
    found = staged_run(sif_run, sif_path="/nowhere", **changes)
    assert (found.sif.staged, len(found.not_staged)) == (False, 1)
    sif_run.folder.staged_of("n1").unlink()
    assert "cannot read" in gather(sif_run.manifest).not_staged[0]


# -- packages -----------------------------------------------------------------------------


def locked(name="numpy", version="2.0", record="r", content="r"):
    return PackageExpectation(name=name, version=version, record_sha256=record, content_sha256=content)


def installed(name="numpy", version="2.0", record="r", content="r", **more):
    return {"name": name, "version": version, "record-sha256": record, "content-sha256": content, **more}


def compare(expected, found, level="full"):
    return facts.compare_packages(tuple(expected), {"packages": found}, level=level)


def test_the_same_packages_do_not_differ():
    assert compare([locked(), locked("torch")], [installed("torch"), installed()]) == []


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([locked()], [], Difference(field="packages.numpy", locked="2.0", found="absent")),
        ([], [installed()], Difference(field="packages.numpy", locked="absent", found="2.0")),
        ([locked()], [installed(version="2.1")], Difference(field="packages.numpy", locked="2.0", found="2.1")),
        (
            [locked()],
            [installed(record="x")],
            Difference(field="packages.numpy.record-sha256", locked="r", found="x"),
        ),
        (
            [locked()],
            [installed(content="c", modified=[{"path": "numpy/core.py"}], **{"modified-count": 1})],
            Difference(
                field="packages.numpy.content-sha256",
                locked="r",
                found="c",
                note="changed since installation: numpy/core.py",
            ),
        ),
        (
            [locked()],
            [installed(content="c", modified=[{"path": p} for p in "abcd"], **{"modified-count": 30})],
            Difference(
                field="packages.numpy.content-sha256",
                locked="r",
                found="c",
                note="changed since installation: a, b, c and 27 more",
            ),
        ),
        (
            [locked()],
            [installed(content=None, reason="Permission denied", **{"modified-count": None})],
            Difference(field="packages.numpy.content-sha256", locked="r", found="Permission denied", unknown=True),
        ),
        (
            [locked()],
            [installed(record=None, content="r")],
            Difference(field="packages.numpy.record-sha256", locked="r", found="it has no digest", unknown=True),
        ),
    ],
)
def test_a_package_that_differs_is_named_with_both_sides(expected, found, difference):
    assert compare(expected, found) == [difference]


def test_a_package_without_digests_in_the_lockfile_is_compared_by_version():
    assert compare([locked(record="", content="")], [installed(record=None, content="y")]) == []
    assert compare([locked(record="", content="")], [installed(version="3")]) != []


def test_a_package_that_got_a_digest_since_it_was_locked_has_a_row():
    """It changes the digest over all packages."""
    difference = Difference(field="packages.numpy.record-sha256", locked="absent", found="x")
    assert compare([locked(record="", content="")], [installed(record="x")]) == [difference]


def test_contents_are_not_compared_where_they_were_not_read():
    assert compare([locked()], [installed(content=None)], level="record") == []


# -- also used while locking --------------------------------------------------------------


def test_locking_sees_the_tools_own_error(run):
    run.probe("echo broken >&2; exit 3")
    with pytest.raises(ToolFailed, match="`python` ended with status 3"):
        probe.run_probe(run.manifest.environment, {"PATH": "/usr/bin:/bin"}, probe="", level="full", seconds=10)
