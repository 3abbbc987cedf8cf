"""What the cluster's own commands say, recorded from three releases of Slurm, and damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.cluster import estimate, node_types
from hpcenv.errors import SubmitRejected, ToolFailed

RECORDED = Path(__file__).resolve().parents[2] / "fakes" / "outputs"
VERSIONS = ("22.05", "24.11", "26.05")
SCRIPT = "#!/bin/bash\nsleep 1\n"


@pytest.mark.parametrize("version", VERSIONS)
def test_partitions_and_nodes(fake_slurm: Any, version: str) -> None:
    fake_slurm.replays("sinfo", "sinfo-offers", version)
    found = node_types.offers(fake_slurm.environ)
    batch = found[0]
    assert {offer.partition for offer in found} >= {"batch", "low", "high"}
    assert (batch.partition, batch.default, batch.available) == ("batch", True, "up")
    assert (batch.max_minutes, batch.no_limit, batch.max_nodes) == (1440, False, None)
    assert (batch.nodes, batch.cpus, batch.memory, batch.gpus, batch.hosts) == (2, 16, 8000, {"": 8}, "n[1-2]")
    assert batch.usable
    assert [offer.default for offer in found].count(True) == 1


def test_a_drained_node_is_told_apart(fake_slurm: Any) -> None:
    fake_slurm.replays("sinfo", "sinfo-drained", "26.05")
    low = [offer for offer in node_types.offers(fake_slurm.environ) if offer.partition == "low"]
    assert sorted((offer.hosts, offer.usable) for offer in low) == [("n1", True), ("n2", False)]


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("gpu*|up|infinite|1-4|3|mixed|64+|1000+|gpu:h100:8(S:0-1),nvme:1|a,b|g[1-3]", (None, True, 4, None, None, {"h100": 8})),
        ("p|up|30:00|2-infinite|3|idle*|64|1000|gpu:a:2,gpu:b:3(S:0)|(null)|x", (30.0, False, None, 64, 1000, {"a": 2, "b": 3})),
        ("p|down|n/a|1-infinite|3|idle|64|1000|(null)|(null)|x", (None, False, None, 64, 1000, {})),
        ("p|up|1-00:00:00|1|3|idle|64|1000|gpu:tesla:many|(null)|x", (1440.0, False, 1, 64, 1000, {})),
    ],
)  # fmt: skip
def test_forms_of_sinfo(line: str, read: tuple[Any, ...]) -> None:
    (offer,) = node_types.parse_offers(line)
    assert (offer.max_minutes, offer.no_limit, offer.max_nodes, offer.cpus, offer.memory, offer.gpus) == read


@given(st.text())
def test_damage_is_never_a_crash(text: str) -> None:
    node_types.parse_offers(text)
    node_types.parse_configuration(text)
    node_types.parse_partition_rules(text)
    estimate.parse_estimate(text)


@pytest.mark.parametrize(
    ("version", "key"),
    [("22.05", "slurmctldparameters"), ("24.11", "preemptparameters"), ("26.05", "preemptparameters")],
)
def test_the_configuration(fake_slurm: Any, version: str, key: str) -> None:
    fake_slurm.replays("scontrol-config", "scontrol-config", version)
    found = node_types.configuration(fake_slurm.environ, seconds=10)
    assert found["clustername"] == "testbed"
    assert found["proctracktype"] == "proctrack/linuxproc"
    assert found["prologflags"] == ""
    assert "send_user_signal" in found[key]


@pytest.mark.parametrize("version", VERSIONS)
def test_rules_of_partitions(fake_slurm: Any, version: str) -> None:
    fake_slurm.replays("scontrol-partition", "scontrol-partitions", version)
    low = node_types.partition_rules(fake_slurm.environ, seconds=10)["low"]
    assert (low["gracetime"], low["preemptmode"], low["maxtime"]) == ("10", "REQUEUE", "1-00:00:00")


# -- the cluster's name -------------------------------------------------------------------


def test_the_name_is_read_from_a_file_where_there_is_one(tmp_path: Path, fake_slurm: Any) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("# ClusterName=old\n  clustername = Jura \nSlurmctldHost=x\n")
    found = node_types.cluster_name({**fake_slurm.environ, "SLURM_CONF": str(conf)})
    assert (found.value, found.how) == ("jura", str(conf))
    assert fake_slurm.calls("scontrol") == []


@pytest.mark.skipif(os.path.exists("/etc/slurm/slurm.conf"), reason="this machine has a cluster of its own")
def test_without_a_file_slurm_is_asked_once_a_day(tmp_path: Path, fake_slurm: Any) -> None:
    fake_slurm.replays("scontrol-config", "scontrol-config")
    for _ in range(2):
        assert node_types.cluster_name(fake_slurm.environ, cache=tmp_path / "cache").value == "testbed"
    assert len(fake_slurm.calls("scontrol")) == 1


@pytest.mark.skipif(os.path.exists("/etc/slurm/slurm.conf"), reason="this machine has a cluster of its own")
def test_a_name_that_cannot_be_found_has_its_reason(fake_slurm: Any) -> None:
    fake_slurm.answers("scontrol", err="slurm_load_ctl_conf error: Unable to contact slurm controller", status=1)
    found = node_types.cluster_name(fake_slurm.environ)
    assert found.value == ""
    assert "scontrol" in found.how


# -- when a job would start ---------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_an_estimate(fake_slurm: Any, version: str) -> None:
    fake_slurm.replays("sbatch---test-only", "sbatch-test-only", version)
    found = estimate.estimate_start(SCRIPT, fake_slurm.environ)
    assert found.start == "2026-11-20T15:55:59"
    assert (found.processors, found.nodes, found.partition) == (2, "n[1-2]", "batch")
    (call,) = fake_slurm.calls("sbatch")
    assert call.argv == ("--test-only",)
    assert call.script == SCRIPT


@pytest.mark.parametrize("version", VERSIONS)
def test_no_estimate_for_what_slurm_refuses(fake_slurm: Any, version: str) -> None:
    fake_slurm.replays("sbatch---test-only", "sbatch-test-only-refused", version)
    with pytest.raises(SubmitRejected, match="would not start") as caught:
        estimate.estimate_start(SCRIPT, fake_slurm.environ)
    assert "Node count specification invalid" in str(caught.value.why)


def test_silence_is_no_estimate(fake_slurm: Any) -> None:
    fake_slurm.answers("sbatch---test-only", "")
    with pytest.raises(SubmitRejected, match="gave no estimate"):
        estimate.estimate_start(SCRIPT, fake_slurm.environ)


def test_a_slurm_that_hangs_is_given_up(fake_slurm: Any) -> None:
    fake_slurm.hangs("sinfo")
    with pytest.raises(ToolFailed, match="did not answer"):
        node_types.offers(fake_slurm.environ, seconds=0.3)
