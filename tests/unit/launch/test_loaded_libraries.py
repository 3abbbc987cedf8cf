"""The agent of a SIF loads torch and waits; what the loader took is judged before the first rank starts."""

import _ctypes
import os
import shutil
import sys

import pytest

from hpcenv.identity import sif_check
from hpcenv.records.facts import Facts, Network
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Environment, Expectation
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
os.execve(command[0], command, {{"PYTHONPATH": {site!r}, **inside}})
"""
TORCHRUN = (
    "import os\ndef main(args): open({trained!r}, 'w').write(os.environ['NCCL_DEBUG'] + str(os.environ.get('TOKEN')))\n"
)


@pytest.fixture
def sif_run(run):
    """A run in a file that stands for a SIF. What stands for apptainer starts the agent on the host."""
    site = run.base / "site"
    package = site / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(TORCHRUN.format(trained=str(run.base / "trained")))
    apptainer = run.bin / "apptainer"
    text = APPTAINER.format(python=sys.executable, site=str(site))
    apptainer.write_text(text)
    apptainer.chmod(0o755)
    image = run.base / "a.sif"
    image.write_bytes(b"image")
    run.save(environment=Environment(kind="sif", python="python3", sif=str(image), apptainer=str(apptainer)))
    return run


def trained(run):
    """Check the SIF, let the verdict match, and launch; return the status and what was printed."""
    descriptor = os.open(run.base / "a.sif", os.O_RDONLY)
    record = sif_check.check(descriptor, path=str(run.base / "a.sif"), staged=False, known=None, records=None)
    os.close(descriptor)
    facts = Facts(
        schema=1, run="r1", node="n1", attempt=0, values={}, unknown={}, network=Network(first_node="n1"), sif=record
    )
    save_record(facts, run.folder.facts_of("n1"))
    run.open_gate()
    done = run.step("task")
    return done.returncode, done.stdout + done.stderr


def test_the_container_of_the_checked_sif_trains_with_the_settings_of_the_verdict(sif_run):
    assert trained(sif_run) == (0, "")
    assert (sif_run.base / "trained").read_text() == "WARNNone"
    assert os.listdir(sif_run.tmp) == []


def with_a_library(run, origin):
    """Let the environment load a library of the host named libnccl; the lockfile says where it is."""
    library = run.base / "host" / "libnccl.so.2"
    library.parent.mkdir()
    shutil.copyfile(_ctypes.__file__, library)
    with open(run.base / "site" / "sitecustomize.py", "w") as file:
        file.write(f"import ctypes; ctypes.CDLL({str(library)!r})\n")
    locked = Expectation(field="libs.nccl.origin", value=origin.format(library=library), severity="must")
    run.save(expectations=(*run.manifest.expectations, locked))
    return library


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
