"""`hpcenv net`: the explanation of a run, the comparison of two, and machines from files."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import run_folders as folders

from hpcenv.errors import RecordInvalid, RunNotFound, UsageError, WouldOverwrite
from hpcenv.judge.network import rendezvous
from hpcenv.machine.network.recording import MachineRecording, fabric_of, networks_of
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Environment, Manifest, Setting
from hpcenv.records.network import FabricVersion
from hpcenv.records.verdict import NodeVerdict, Verdict
from hpcenv.runs.network import diff_networks, explain_run
from hpcenv.survey import machine as machines

MACHINES = Path(__file__).resolve().parents[2] / "machines"
NODES = ("n1", "n2")


def ended_run(tmp_path, name, kind, *, settings=(), result="match", network=True, change=lambda fabric: fabric):
    """Write a run of two nodes as the gate leaves it."""
    (tmp_path / "hpcenv.toml").write_text('image = "host"\n')
    folder = folders.make_run(
        tmp_path / "runs", name, nodes=2, backend="nccl", gpus_per_node=8, settings=settings,
        environment=Environment(kind="sif", python="python3"),
    )  # fmt: skip
    recording = load_record(MachineRecording, MACHINES / f"{kind}.json")
    fabric = change(fabric_of(recording))
    networks = networks_of(recording.addressed, NODES)
    facts = {
        node: Facts(
            schema=1, run=name, node=node, attempt=0, values={}, unknown={}, network=networks[node], fabric=fabric
        )
        for node in NODES
    }
    for node, found in facts.items():
        save_record(found, folder.facts_of(node))
    manifest = load_record(Manifest, folder.manifest)
    decision = rendezvous.choose(manifest, NODES, facts, job_id="7", attempt=0).network
    verdict = Verdict(
        schema=1, run=name, attempt=0, result=result, findings=(), rendezvous=None, settings={},
        nodes=tuple(NodeVerdict(node=node, result=result, compared=1) for node in NODES),
        network=decision if network else None,
    )  # fmt: skip
    save_record(verdict, folder.verdict)
    return folder


def test_a_run_is_explained_from_its_verdict(tmp_path, hpcenv):
    ended_run(tmp_path, "a", "ib-h100", settings=(Setting(name="NCCL_ALGO", value="Ring", origin="--env"),))
    found = explain_run(tmp_path, "a")
    assert (found.of, found.how, found.decision.profile) == ("a", "recorded", "ib")
    done = hpcenv("net", "explain", "a", cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert "SET    NCCL_NET = IB  [detected, verbs.net]\n" in done.stdout
    assert "GIVEN  NCCL_ALGO = Ring  [--env]\n" in done.stdout
    assert "[lint.avoid]" in done.stdout
    data = hpcenv("net", "explain", "a", "--json", cwd=tmp_path).envelope["data"]
    assert data["decision"]["profile"] == "ib"
    assert {row["rule"] for row in data["decision"]["rows"]} >= {"verbs.net", "base.debug"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"network": False}, "it was written by an hpcenv that did not record it"),
        (
            {"network": False, "result": "mismatch"},
            "the verdict is `mismatch`, and settings are decided for nodes that match",
        ),
    ],
)
def test_a_run_without_a_decision_says_why(tmp_path, changes, why):
    ended_run(tmp_path, "a", "ib-h100", **changes)
    with pytest.raises(RecordInvalid) as error:
        explain_run(tmp_path, "a")
    assert error.value.why == why


def test_two_equal_runs_have_no_difference(tmp_path, hpcenv):
    for name in ("a", "b"):
        ended_run(tmp_path, name, "efa-p5")
    assert diff_networks(tmp_path, "a", "b").changes == ()
    assert hpcenv("net", "diff", "a", "b", cwd=tmp_path).stdout == "a and b: no difference\n"


def test_what_changed_since_it_was_fast_is_listed(tmp_path, hpcenv):
    ended_run(tmp_path, "fast", "ib-h100")

    def slower(fabric):
        ports = tuple(replace(port, state="DOWN") for port in fabric.ports)
        versions = tuple(replace(v, version="25.1") if v.name == "mlx5_core" else v for v in fabric.versions)
        return replace(
            fabric, ports=ports, gpudirect="", versions=(*versions, FabricVersion(name="efa", version="1", path="/x"))
        )

    ended_run(
        tmp_path,
        "slow",
        "ib-h100",
        settings=(Setting(name="NCCL_PROTO", value="Simple", origin="--env"),),
        change=slower,
    )
    found = {(c.kind, c.name): (c.left, c.right) for c in diff_networks(tmp_path, "fast", "slow").changes}
    assert found["profile", "profile"][0].startswith("ib (")
    assert found["variable", "NCCL_NET"] == ("IB (detected)", "absent")
    assert found["variable", "NCCL_PROTO"] == ("absent", "Simple (--env)")
    assert found["hardware", "GPUDirect RDMA"] == ("nvidia_peermem", "none")
    assert found["version", "efa (/x)"] == ("absent", "1")
    assert found["version", "mlx5_core (/sys/module/mlx5_core/version)"] == ("24.10-0.7.0", "25.1")
    done = hpcenv("net", "diff", "fast", "slow", cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert "other settings:\n" in done.stdout
    assert "  NCCL_PROTO: absent -> Simple (--env)\n" in done.stdout


def test_what_a_run_did_not_record_is_not_compared_and_said(tmp_path):
    ended_run(tmp_path, "a", "ib-h100")
    old = ended_run(tmp_path, "b", "ib-h100", network=False)
    for path in old.facts.iterdir():
        path.unlink()
    found = diff_networks(tmp_path, "a", "b")
    assert found.changes == ()
    assert found.not_compared == (
        "settings of b: it was written by an hpcenv that did not record it",
        "hardware of b: no facts of it",
    )
    with pytest.raises(RunNotFound):
        diff_networks(tmp_path, "a", "nosuch")


# -- machines -------------------------------------------------------------------------------


def test_facts_of_a_run_are_explained_offline(tmp_path, hpcenv):
    folder = ended_run(tmp_path, "a", "slingshot-gh200")
    done = hpcenv("net", "explain", "--from", str(folder.facts_of("n1")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert done.stdout.startswith("n1 (facts of a run): computed\nprofile  slingshot  (")
    assert "SRUN   --network=disable_rdzv_get" in done.stdout


def test_a_recording_is_explained_with_given_variables(tmp_path, hpcenv):
    words = ("net", "explain", "--from", str(MACHINES / "ib-h100.json"), "--nodes", "1", "--env", "NCCL_NET=IB")
    done = hpcenv(*words, cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert "[lint.contradiction]" in done.stdout


def test_this_node_is_explained(tmp_path, hpcenv):
    done = hpcenv("net", "explain", "--here", "--nodes", "1", cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert done.stdout.startswith("this node (this node): computed\nprofile  single")
    assert f" {len(os.sched_getaffinity(0))} CPUs for 1 rank on a node" in done.stdout, "counted, not assumed"


def test_this_machine_is_recorded_without_its_addresses_and_explained(tmp_path, hpcenv):
    done = hpcenv("doctor", "--record", "mine.json", cwd=tmp_path)
    assert done.status == 0, done.stderr
    text = (tmp_path / "mine.json").read_text()
    assert json.loads(text)["label"] == "recorded"
    mac = next(iter(Path("/sys/class/net").glob("e*/address")), None)
    assert mac is None or mac.read_text().strip() not in text
    assert hpcenv("net", "explain", "--from", "mine.json", "--nodes", "1", cwd=tmp_path).status == 0
    again = hpcenv("doctor", "--record", "mine.json", "--json", cwd=tmp_path)
    assert again.envelope["error"]["code"] == WouldOverwrite.code
    assert hpcenv("doctor", "--record", "mine.json", "--force", "--json", cwd=tmp_path).envelope["ok"]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1, "files": {}}', '{"schema": 9, "files": {}}', "{}"])
def test_a_file_that_is_neither_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RecordInvalid):
        machines.seen_in_file(tmp_path / "x.json")


def test_pairs_without_a_value_and_two_subjects_are_refused(tmp_path, hpcenv):
    with pytest.raises(UsageError):
        machines.given_settings({}, ["NCCL_DEBUG"])
    assert hpcenv("net", "explain", "a", "--here", cwd=tmp_path).status == 2
    assert hpcenv("doctor", "--record", "--write", cwd=tmp_path).status == 2
