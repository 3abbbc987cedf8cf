"""The first node looks at the run's copy of the code again before the first rank: the check was a while ago."""

import dataclasses

import pytest

from hpcenv.records.code_listing import Listing, content_of, digest_of
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Source
from hpcenv.records.outcome import NodeExit
from hpcenv.records.verdict import NodeSettings, Verdict

from .test_loaded_libraries import sif_run, trained  # noqa: F401  (a fixture)


@pytest.fixture
def copied(sif_run):  # noqa: F811
    """A run with a copy of its code."""
    source = sif_run.folder.source
    source.mkdir()
    for name in ("train.py", "helper.py", "base.yaml"):
        (source / name).write_text("VALUE = 1\n")
    files = {f"source/{path.name}": content_of(str(path)) for path in source.iterdir()}
    save_record(Listing(schema=SCHEMA, files=files), sif_run.folder.listing)
    sif_run.save(source=Source(root="/project", folder=str(source), commit="", digest=digest_of(files)))
    return sif_run


def written_meanwhile(run, name):
    """Let somebody write a file of the copy after the check: while torch is imported."""
    path = run.folder.source / name
    (run.base / "site" / "torch" / "__init__.py").write_text(f"open({str(path)!r}, 'w').write('VALUE = 2')\n")


def with_launcher(run, launcher):
    run.save(launch=dataclasses.replace(run.manifest.launch, launcher=launcher))


def test_a_copy_that_is_still_as_it_was_checked_trains(copied):
    assert trained(copied) == (0, "")
    assert (copied.base / "trained").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("helper.py", "changed: helper.py"), ("base.yaml", "changed: base.yaml"), ("new.yaml", "added: new.yaml")],
)
def test_a_file_that_changes_after_the_check_stops_the_run_before_a_rank(copied, name, said):
    written_meanwhile(copied, name)
    status, output = trained(copied)
    assert status == 90
    assert f"error[node-rejected]: the run's copy of the code is not what the check found: {said}" in output
    assert not (copied.base / "trained").exists()
    assert load_record(NodeExit, copied.folder.exit_of("n1")).differences[0].field == "code.digest"
    assert copied.step("finish", "90").returncode == 0
    verdict = load_record(Verdict, copied.folder.verdict)
    assert [(f.field, f.severity, f.found) for f in verdict.findings] == [("code.digest", "must", said)]


def test_only_the_first_node_looks_again(copied, monkeypatch):
    written_meanwhile(copied, "helper.py")
    open_gate = copied.open_gate

    def as_second_node():
        open_gate()
        settings = load_record(NodeSettings, copied.folder.env_of("n1"))
        save_record(dataclasses.replace(settings, node_rank=1), copied.folder.env_of("n1"))

    monkeypatch.setattr(copied, "open_gate", as_second_node)
    assert trained(copied)[0] == 0


def test_what_ranks_of_other_nodes_may_write_at_once_is_no_change_without_torchrun(copied):
    with_launcher(copied, "tasks")
    written_meanwhile(copied, "metrics.json")
    assert "the run's copy of the code" not in trained(copied)[1]
