"""The run record: what it has, what it leaves out, and that it is read from the folder alone."""

from __future__ import annotations

import json

import pytest

from hpcenv.errors import RecordInvalid
from hpcenv.records.codec import decode_record, encode_record
from hpcenv.records.facts import Facts, Network
from hpcenv.records.files import save_record
from hpcenv.records.manifest import Secret, Setting
from hpcenv.reproduction.run_record import RunRecord, read_record
from tests import measured_runs, run_folders


def test_the_record_of_a_run(tmp_path):
    run = measured_runs.make(tmp_path, "first", gpus_per_node=2)
    measured_runs.read_back(run, 0, {"torch.threads": "1"})
    facts = Facts(
        schema=1, run="first", node="n1", attempt=0, values={"host.kernel": "6.1"}, unknown={"host.rdma": "no"},
        network=Network(first_node="n1"),
    )  # fmt: skip
    save_record(facts, run.facts_of("n1"))
    found = read_record(run.path)
    assert found.outcome == "completed" and found.shape.world_size == 2
    assert [(node.node, node.values, node.unknown) for node in found.nodes] == [
        ("n1", {"host.kernel": "6.1"}, {"host.rdma": "no"})
    ]
    assert found.determinism["0"]["torch.threads"] == "1"
    losses = [one for one in found.metrics if one.name == "loss"]
    assert [(one.rank, one.count, one.last_step, one.last) for one in losses] == [
        (0, 3, 3, (2.25).hex()), (1, 3, 3, (2.25).hex()),
    ]  # fmt: skip
    assert losses[0].digest == losses[1].digest and len(losses[0].digest) == 64
    assert [one.rank for one in found.parameters] == [0, 1]
    # Submitted at 1, begun at 1, launched at 1, nodes ended at 2, the batch script at 90.
    assert (found.timings.queue, found.timings.check, found.timings.training) == (0.0, 0.0, 1.0)
    assert found.gpu_hours == pytest.approx(89 * 2 / 3600)
    assert found.energy.joules is None and found.lock is None
    assert any("lockfile" in note for note in found.notes)


def test_the_record_survives_its_file(tmp_path):
    run = measured_runs.make(tmp_path, "first")
    found = read_record(run.path)
    assert decode_record(RunRecord, encode_record(found), origin="record.json") == found


def test_no_value_of_a_credential_is_in_it(tmp_path):
    settings = (Setting(name="MY_TOKEN", value="sesame", origin="--env"), Setting(name="A", value="1", origin="--env"))
    run = measured_runs.make(
        tmp_path, "first", settings=settings, secrets=(Secret(name="WANDB", source="env:X", origin="--secret"),),
        command=("hpcenv", "submit", "--env", "MY_TOKEN=sesame", "t.py"),
    )  # fmt: skip
    run.verdict.unlink()
    found = read_record(run.path)
    assert "sesame" not in encode_record(found)
    assert found.environment["A"] == "1" and found.secrets == ("WANDB",)


def test_the_attempts_of_a_preempted_run(tmp_path):
    run = measured_runs.make(tmp_path, "first", gpus_per_node=1)
    first = type(run)(run.attempts / "0")
    run_folders.write(first.started, attempt=0, nodes=["n1", "n2"], job_id="7", time=10.0)
    run_folders.write(first.finished, status=143, time=20.0, stopped="preemption", again=True)
    run_folders.write(run.started, attempt=1, nodes=["n1"], job_id="7", time=50.0)
    found = read_record(run.path)
    assert [one.outcome for one in found.attempts] == ["stopped and queued again", "completed"]
    assert found.timings.requeues == 1 and found.timings.queue == (10 - 1) + (50 - 20)
    assert found.gpu_hours == pytest.approx((10 * 2 + 40) / 3600)


def test_what_is_not_known_is_not_zero(tmp_path):
    run = measured_runs.make(tmp_path, "first", gpus_per_node=1)
    run.finished.unlink()
    found = read_record(run.path)
    assert found.gpu_hours is None and found.outcome == "has not ended"
    run.started.unlink()
    found = read_record(run.path)
    assert found.outcome == "never started" and found.timings.queue is None


def test_a_damaged_manifest_is_an_error_and_other_damage_a_note(tmp_path):
    run = measured_runs.make(tmp_path, "first")
    run.facts.mkdir()
    run.facts_of("n1").write_text("{")
    run.finished.write_text(json.dumps({"status": 0, "time": 1e400}))
    found = read_record(run.path)
    assert any("n1.json" in note for note in found.notes) and found.attempts[0].ended is None
    run.manifest.write_text("[]")
    with pytest.raises(RecordInvalid):
        read_record(run.path)
