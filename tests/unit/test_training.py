"""hpcenv.training: in a run, and outside of one. Its collective is shown in tests/cluster/test_stop.py."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcenv import training

SOURCE = Path(training.__file__)


@pytest.fixture
def fresh(monkeypatch):
    """What one process knows of its stop, as at its start."""
    for name, value in (("requested", False), ("handles_term", False), ("looked", float("-inf")), ("calls", 0)):
        monkeypatch.setattr(training._State, name, value)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("HPCENV_CHECKPOINTS", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("HPCENV_STOP_FOLDER", str(tmp_path / "stop"))
    monkeypatch.setenv("HPCENV_NODE", "n1")
    return tmp_path


def ask(run):
    (run / "stop").mkdir(exist_ok=True)
    (run / "stop" / "n1.json").write_text("{}")
    training._State.looked = float("-inf")


def test_outside_of_a_run_everything_answers_harmlessly(fresh, tmp_path, monkeypatch):
    for name in ("HPCENV_CHECKPOINTS", "HPCENV_STOP_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert training.stop_requested() is False
    assert training.resume_path() is None
    assert training.checkpoint_path(3) is None
    assert training.save({}, 3) is None
    with training.saving(3) as path:
        assert path is None
    training.saved()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_for_this_node_is_seen_and_stays(run):
    assert training.stop_requested() is False
    (run / "stop").mkdir()
    (run / "stop" / "n2.json").write_text("{}")
    training._State.looked = float("-inf")
    assert training.stop_requested() is False
    ask(run)
    assert training.stop_requested() is True
    (run / "stop" / "n1.json").unlink()
    assert training.stop_requested() is True


def test_it_looks_at_most_once_a_second(run):
    assert training.stop_requested() is False
    (run / "stop").mkdir()
    (run / "stop" / "n1.json").write_text("{}")
    assert training.stop_requested() is False


def test_only_each_nth_call_asks(run):
    ask(run)
    assert [training.stop_requested(every=3) for _ in range(5)] == [True, False, False, True, False]


def test_term_is_a_request_and_a_scripts_own_handler_stays(run):
    assert training.stop_requested() is False
    os.kill(os.getpid(), signal.SIGTERM)
    assert training.stop_requested() is True
    training._State.handles_term, training._State.requested = False, False
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    training.stop_requested()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_checkpoint_counts_when_it_is_complete(run):
    assert training.resume_path() is None
    with pytest.raises(ZeroDivisionError), training.saving(1) as path:
        path.write_text("half")
        raise ZeroDivisionError
    assert training.resume_path() is None
    for step in (9, 10, 2):
        with training.saving(step) as path:
            path.write_text(str(step))
    assert training.resume_path() == run / "checkpoints" / "step-00000010.pt"
    assert training.resume_path() == training.checkpoint_path(10)
    with training.saving(10) as path:
        path.write_text("again")
    assert training.resume_path().read_text() == "again"
    (run / "checkpoints" / "step-00000099.pt.tmp").write_text("")
    (run / "checkpoints" / "step-11").mkdir()
    assert training.resume_path() == run / "checkpoints" / "step-11"
    assert not list((run / "checkpoints").glob(".*"))


def test_a_folder_is_a_checkpoint_too(run):
    for content in ("one", "two"):
        with training.saving(5) as path:
            path.mkdir()
            (path / "rank-0").write_text(content)
    assert training.resume_path() == run / "checkpoints" / "step-00000005"
    assert (training.resume_path() / "rank-0").read_text() == "two"


def test_only_a_checkpoint_after_the_request_says_saved(run):
    with training.saving(1) as path:
        path.write_text("")
    assert not (run / "stop").exists()
    ask(run)
    with training.saving(2) as path:
        path.write_text("")
    assert (run / "stop" / "saved-n1").exists()


def test_it_needs_nothing_but_the_standard_library_and_says_what_python_3_8_says():
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 8))
    at_top = {n.names[0].name if isinstance(n, ast.Import) else n.module for n in tree.body if hasattr(n, "names")}
    assert at_top <= {
        "__future__",
        "contextlib",
        "errno",
        "os",
        "re",
        "shutil",
        "signal",
        "sys",
        "time",
        "collections.abc",
        "pathlib",
        "typing",
    }
    code = "import sys; sys.path.insert(0, sys.argv[1]); import training; assert not any('hpcenv' in m for m in sys.modules)"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(SOURCE.parent)], check=True, timeout=30)
