"""The launch step that starts together with the check: it waits, and nothing of the user runs before the release."""

import _ctypes
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcenv.node.check import sif_check
from hpcenv.node.container import proved_sif
from hpcenv.node.launch import early_start
from hpcenv.node.this_node import find_this_node
from hpcenv.records.facts import Facts, Network
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Bind, Environment, Expectation, Setting
from hpcenv.records.outcome import NodeExit
from hpcenv.records.verdict import Verdict

# Stands for apptainer: it shows the binds at their sources, gives the variables, and starts the command.
APPTAINER = """\
#!{python}
import os, re, shlex, sys
words = sys.argv[1:]
command = words[words.index("--pwd") + 3:]
binds = dict(reversed(re.findall(r'"source=(.*?)","destination=(.*?)"', word)[0]) for word in words if '"source=' in word)
inside = dict(word.split("=", 1) for word in shlex.split(open(words[words.index("--env-file") + 1]).read()))
command = [binds.get(word, word) for word in command]
command[0] = sys.executable
open({started!r}, "a").write("x")
os.execve(command[0], command, {{"PYTHONPATH": {site!r}, **inside}})
"""
TORCHRUN = (
    "import os\ndef main(args): open({trained!r}, 'w').write(os.environ['NCCL_DEBUG'] + str(os.environ.get('TOKEN')))\n"
)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 60 s"
        time.sleep(0.02)


def start(run):
    return subprocess.Popen(
        run.argv("task-on-release"),
        env=run.environ(),
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def waits(run):
    wait_for(run.folder.launch_waits.exists)


def test_the_line_starts_the_training(run):
    run.torchrun(f"echo $$ > {run.base}/started; exit 7")
    child = start(run)
    waits(run)
    time.sleep(0.3)
    assert not (run.base / "started").exists()
    run.open_gate()
    child.communicate(early_start.RELEASE, timeout=60)
    assert child.returncode == 7
    assert load_record(NodeExit, run.folder.exit_of("n1")).status == 7


def test_the_end_of_the_input_ends_it_and_nothing_ran(run):
    run.torchrun(f"echo $$ > {run.base}/started")
    child = start(run)
    waits(run)
    output, _ = child.communicate(b"", timeout=60)
    assert (child.returncode, output) == (0, b"")
    assert not (run.base / "started").exists()
    assert not run.folder.exits.exists()


def test_another_line_is_no_release(run):
    run.torchrun(f"echo $$ > {run.base}/started")
    run.open_gate()
    child = start(run)
    waits(run)
    child.communicate(b"stop\n", timeout=60)
    assert child.returncode == 0
    assert not (run.base / "started").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_asks_for_the_end_ends_it_without_a_record(run, number):
    child = start(run)
    waits(run)
    child.send_signal(number)
    assert child.wait(timeout=60) == 128 + number
    assert not run.folder.exits.exists()
    child.stdout.close()
    child.stdin.close()


def test_a_released_step_without_a_verdict_starts_nothing(run):
    run.torchrun(f"echo $$ > {run.base}/started")
    child = start(run)
    output, _ = child.communicate(early_start.RELEASE, timeout=60)
    assert child.returncode == 91
    assert output.startswith(b"error[record-invalid]: cannot read ")
    assert not (run.base / "started").exists()


# -- a SIF --------------------------------------------------------------------------------


@pytest.fixture
def sif_run(run):
    """A run in a file that stands for a SIF. What stands for apptainer starts the agent on the host."""
    site = run.base / "site"
    package = site / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(TORCHRUN.format(trained=str(run.base / "trained")))
    (site / "sitecustomize.py").write_text(f"open({str(run.base / 'site-ran')!r}, 'w').close()")
    apptainer = run.bin / "apptainer"
    text = APPTAINER.format(python=sys.executable, started=str(run.base / "started"), site=str(site))
    apptainer.write_text(text)
    apptainer.chmod(0o755)
    image = run.base / "a.sif"
    image.write_bytes(b"image")
    run.save(environment=Environment(kind="sif", python="python3", sif=str(image), apptainer=str(apptainer)))
    return run


def checked(run, **changes):
    descriptor = os.open(run.base / "a.sif", os.O_RDONLY)
    found = sif_check.check(descriptor, path=str(run.base / "a.sif"), staged=False, known=None, records=None)
    os.close(descriptor)
    return dataclasses.replace(found, lasting=True, **changes)


def tell(run, record):
    place = find_this_node(run.environ(), cluster="slurm")
    with proved_sif.telling([proved_sif.address_of("r1", place)]) as send:
        send(record)
        wait_for((run.base / "started").exists)


def write_facts(run, record):
    facts = Facts(
        schema=1, run="r1", node="n1", attempt=0, values={}, unknown={}, network=Network(first_node="n1"), sif=record
    )
    save_record(facts, run.folder.facts_of("n1"))


def test_a_proved_container_starts_early_and_is_the_one_that_trains(sif_run):
    record = checked(sif_run)
    child = start(sif_run)
    tell(sif_run, record)
    time.sleep(0.3)
    # What stands for the container has the mounts of this machine, which nothing explains: it loads nothing.
    assert not (sif_run.base / "site-ran").exists()
    write_facts(sif_run, record)
    sif_run.open_gate()
    output, _ = child.communicate(early_start.RELEASE, timeout=60)
    assert (child.returncode, output) == (0, b"")
    # A setting of the gate, which is not known when the container starts.
    assert (sif_run.base / "trained").read_text() == "WARNNone"
    assert (sif_run.base / "started").read_text() == "x", "one container"
    assert os.listdir(sif_run.tmp) == []


def test_a_container_that_is_not_released_ends_and_loads_nothing(sif_run):
    child = start(sif_run)
    tell(sif_run, checked(sif_run))
    output, _ = child.communicate(b"", timeout=60)
    assert (child.returncode, output) == (0, b"")
    assert not (sif_run.base / "site-ran").exists()
    assert not (sif_run.base / "trained").exists()
    assert os.listdir(sif_run.tmp) == []


def test_where_the_verdict_is_about_another_file_the_container_is_started_anew(sif_run):
    child = start(sif_run)
    tell(sif_run, checked(sif_run, sha256="0" * 64))
    write_facts(sif_run, checked(sif_run))
    sif_run.open_gate()
    child.communicate(early_start.RELEASE, timeout=60)
    assert child.returncode == 0
    assert (sif_run.base / "started").read_text() == "xx"


def test_a_sif_that_is_replaced_while_it_waits_is_rejected(sif_run):
    record = checked(sif_run)
    child = start(sif_run)
    tell(sif_run, record)
    write_facts(sif_run, record)
    other = sif_run.base / "b.sif"
    other.write_bytes(b"image")
    os.replace(other, sif_run.base / "a.sif")
    sif_run.open_gate()
    output, _ = child.communicate(early_start.RELEASE, timeout=60)
    assert child.returncode == 90, output
    assert not (sif_run.base / "trained").exists()
    assert load_record(NodeExit, sif_run.folder.exit_of("n1")).refused


# -- what torch has loaded ----------------------------------------------------------------


def with_a_library(run, origin):
    """Let the environment load a library of the host named libnccl; the lockfile says where it is."""
    library = run.base / "host" / "libnccl.so.2"
    library.parent.mkdir()
    shutil.copyfile(_ctypes.__file__, library)
    with open(run.base / "site" / "sitecustomize.py", "a") as file:
        file.write(f"\nimport ctypes; ctypes.CDLL({str(library)!r})\n")
    locked = Expectation(field="libs.nccl.origin", value=origin.format(library=library), severity="must")
    run.save(expectations=(*run.manifest.expectations, locked))
    return library


def trained(run):
    record = checked(run)
    child = start(run)
    tell(run, record)
    write_facts(run, record)
    run.open_gate()
    output, _ = child.communicate(early_start.RELEASE, timeout=60)
    return child.returncode, output.decode()


def test_a_library_of_the_host_over_the_locked_one_stops_the_node_before_a_rank(sif_run):
    library = with_a_library(sif_run, "prefix:lib/libnccl.so.2")
    status, output = trained(sif_run)
    assert status == 90
    assert f"node n1: loaded.nccl (must): locked prefix:lib/libnccl.so.2, loaded {library}; a file from" in output
    assert (
        "error[node-rejected]: torch has loaded other libraries on node n1 than the locked ones: loaded.nccl" in output
    )
    assert not (sif_run.base / "trained").exists()
    record = load_record(NodeExit, sif_run.folder.exit_of("n1"))
    assert (record.refused, [d.field for d in record.differences]) == (True, ["loaded.nccl"])
    # The last step of the batch script writes it into the verdict.
    assert sif_run.step("finish", "90").returncode == 0
    verdict = load_record(Verdict, sif_run.folder.verdict)
    assert (verdict.result, [(f.field, f.severity) for f in verdict.findings]) == (
        "mismatch", [("loaded.nccl", "must")]
    )  # fmt: skip


def test_the_locked_library_lets_the_training_start(sif_run):
    with_a_library(sif_run, "other:{library}")
    assert trained(sif_run) == (0, "")
    assert (sif_run.base / "trained").exists()


def test_what_torch_has_loaded_is_unknown_where_torch_cannot_be_imported(sif_run):
    with_a_library(sif_run, "other:{library}")
    (sif_run.base / "site" / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    status, output = trained(sif_run)
    assert status == 91
    assert "torch cannot be imported: ImportError: libcudart.so.12: no such file" in output
    assert load_record(NodeExit, sif_run.folder.exit_of("n1")).differences[0].unknown


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": Environment(kind="host", python="/env/bin/python")},
        {"expectations": (Expectation(field="container.bind-content", value=("/x 0",), severity="must"),)},
        {"settings": (Setting(name="LD_LIBRARY_PATH", value="/x", origin="--env"),)},
        {"settings": (Setting(name="PYTHONPATH", value="/x", origin="--env"),)},
        {"settings": (Setting(name="PATH", value="/x", origin="--env"),)},
        {"pass_env": ("LD_PRELOAD",)},
    ],
)
def test_what_could_bring_code_from_outside_the_image_starts_no_container_early(make_manifest, changes):
    sif = Environment(kind="sif", python="python3", sif="/a.sif", apptainer="/apptainer")
    manifest = make_manifest(environment=sif)
    assert early_start.can_begin(manifest, {"LD_PRELOAD": "x"})
    assert not early_start.can_begin(dataclasses.replace(manifest, **changes), {"LD_PRELOAD": "x"})


ON_NODE = "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
MOUNTS = """\
1 0 0:1 / / rw - overlay overlay rw
2 1 0:2 / /proc rw - proc proc rw
3 1 8:1 /tmp/x /tmp rw - ext4 /dev/sda rw
4 1 8:1 /job /job rw - ext4 /dev/sda rw
5 1 8:1 /runs/r1 /runs/r1 rw - ext4 /dev/sda rw
6 1 8:1 /tmp/gate /hpcenv/start-gate ro - ext4 /dev/sda rw
"""
CODE = ["/usr/lib", "/usr/lib/python3.11", "/usr/bin"]


@pytest.mark.parametrize(
    ("more", "code", "binds", "allowed"),
    [
        ("", CODE, (), True),
        ("7 1 8:1 /opt/x /usr/lib/python3.11/x rw - ext4 /dev/sda rw\n", CODE, (), False),
        # An administrator's bind, wherever it is: what it hides is found out by the check.
        ("7 1 8:1 /scratch /scratch rw - ext4 /dev/sda rw\n", CODE, (), False),
        ("7 1 8:1 /scratch /scratch rw - ext4 /dev/sda rw\n", CODE, ("/scratch",), True),
        ("7 1 8:1 /usr/lib/x /usr/lib/x rw - ext4 /dev/sda rw\n", CODE, ("/usr/lib/x",), False),
        # Python would find modules in the project.
        ("", [*CODE, "/job/lib"], (), False),
        ("", [*CODE, "/"], (), False),
        # Asked for, and not mounted.
        ("", CODE, ("/scratch",), False),
        ("broken\n", CODE, (), False),
        ("", None, (), False),
    ],
)
def test_a_container_loads_its_code_only_where_no_mount_covers_it(make_manifest, more, code, binds, allowed):
    environment = Environment(
        kind="sif", python="python3", sif="/a.sif", apptainer="/apptainer",
        binds=tuple(Bind(source=path, target=path) for path in binds),
    )  # fmt: skip
    manifest = make_manifest(environment=environment)
    place = find_this_node({"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, cluster="slurm")
    found = early_start.may_load(manifest, place, {"mountinfo": MOUNTS + more, "code": code}, ON_NODE)
    assert (found is not None) == allowed
    assert found is None or set(found) == {"/job", "/runs/r1", *binds}


def test_another_user_cannot_say_what_was_proved(tmp_path):
    """The kernel says who is at the other end; a message that is no record counts for nothing."""
    import socket

    place = find_this_node(
        {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": str(os.getpid()), "SLURMD_NODENAME": "n1"}, cluster="slurm"
    )
    address = proved_sif.address_of("r1", place)
    listener = proved_sif.Listener(address)
    try:
        with pytest.raises(OSError, match="in use"):
            proved_sif.Listener(address)
        for message in (b"", b"{}", b"\xff" * 70000):
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(address)
                end.sendall(message) if message else None
                end.shutdown(socket.SHUT_WR)
                assert listener.receive() is None
        if os.geteuid() == 0:
            program = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1].replace('@', chr(0))); s.sendall(b'x')"
            subprocess.run([sys.executable, "-c", program, address.replace("\0", "@")], check=True)
            assert listener.receive() is None
    finally:
        listener.close()
    assert Path("/proc/net/unix").read_text().count(address[1:]) == 0
