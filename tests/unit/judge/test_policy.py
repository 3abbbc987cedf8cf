"""[policy]: for every field, a key changes what the gate or `diff` decides, or it is refused with the reason."""

import dataclasses
from pathlib import Path

import pytest

from hpcenv.errors import SpecError
from hpcenv.judge import decide
from hpcenv.judge.checks.check_table import BY_ID
from hpcenv.judge.compat.compat_table import PACKAGED
from hpcenv.locking import difference, same_tree
from hpcenv.project import lockfile, severities, toml_files
from hpcenv.project.fields import FIELDS, Field
from hpcenv.project.lockfile import DirectUrlTable, Lockfile, OverlayTable
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.checks import CheckOutcome, NodeChecks
from hpcenv.records.facts import Difference, Facts
from hpcenv.records.manifest import Environment, PackageExpectation, RecordedData, Source
from hpcenv.submission.locked import gate_severities, gpu_needs, host_expectations

TESTS = Path(__file__).resolve().parents[2]
SEEDS = TESTS / "fuzz" / "seeds" / "lockfile"
# The command that judges it is tested with that command.
ELSEWHERE = {
    "container.sif.tree": "cluster/test_policy.py",
    # Judged when the launch step has started torchrun's process, after the decision.
    "loaded.*": "unit/facts/test_loaded.py",
    "packages.*.wheel-proof": "unit/locking/test_required_hashes.py",
}
FREE = [field for field in FIELDS if not field.fixed and field.name not in ELSEWHERE]
GATE = [field for field in FREE if field.judged_by]
DIFF = [field for field in FREE if not field.judged_by]
FIXED = [field for field in FIELDS if field.fixed]


def name_of(field: Field) -> str:
    """A name that belongs to the field: itself, or a member of the family."""
    return next(iter(field.members), field.name.replace("*", "numpy"))


def locked(field: Field, policy: dict[str, str]) -> Lockfile:
    """A real lockfile of a CUDA build, with this field in it and nothing else of the environment."""
    kind = "sif" if field.name.startswith("container") else "host"
    base = read_lockfile(SEEDS / f"{kind}.lock.toml")
    facts = {"torch.cuda": "12.8", "torch.arch-list": ("sm_90",), "torch.version": "2.8", "python.version": "3.11"}
    if "lockfile" in field.judged_by and field.name.partition(".")[0] in lockfile.FACT_TABLES:
        facts[name_of(field)] = "locked"
    source = DirectUrlTable(commit_id="a", dirty=False, diff_sha256="none", files_sha256="a")
    dist = base.packages.dist[0].model_copy(update={"name": "numpy", "direct_url": source})
    packages = base.packages.model_copy(
        update={
            "dist": (dist,),
            "count": 1,
            "content_digest": "sha256:0",
            "conda_digest": "c",
            "conda_content_digest": "c",
        }
    )
    container = base.container
    if container is not None and field.name.startswith("container.overlay."):
        overlay = OverlayTable(form="squashfs", use="packages", target="/opt/site", sha256="0" * 64)
        container = container.model_copy(update={"overlay": overlay})
    memory = "80 GB" if field.name == "host.gpu-memory" else None
    host = base.host.model_copy(
        update={"gpu": "h100", "gpu_memory": memory, "nvidia_require": {"NVIDIA_REQUIRE_CUDA": "cuda>=12.8"}}
    )
    changed = {"facts": facts, "packages": packages, "container": container, "host": host}
    return base.model_copy(update={**changed, "policy": policy, "unknown": {}})


GPUS = {
    "host.driver-version": "570.124.06",
    "host.cuda-driver-version": "12.8",
    "host.gpu-count": 1,
    "host.gpu-models": ("NVIDIA H100 80GB HBM3",),
    "host.gpu-brands": ("tesla",),
    "host.gpu-compute-capabilities": ("9.0",),
    "host.gpu-mig": ("disabled",),
    "host.gpu-memory-mib": ("81559",),
}
# Made for torch 2.5.1.
PACKAGES = (
    PackageExpectation(name="torchvision", version="0.20.1"),
    PackageExpectation(name="torchaudio", version="2.5.1"),
)
HOST = Environment(kind="host", python="/env/bin/python")
SIF = Environment(kind="sif", python="python3", sif="/i.sif", apptainer="apptainer")
# What must differ for a rule to notice: the value on one node.
BROKEN = {
    "container.sif.sha256": "f" * 64,
    "container.mounts": ("/usr/lib/x.py",),
    "container.nvidia-require": {"host.cuda-driver-version": "11.8"},
    "host.driver-version": "450.80.02",
    "host.gpu-count": 0,
    "host.gpu": {"host.gpu-models": ("NVIDIA H200",)},
    "host.gpu-models": ("NVIDIA H100 PCIe",),
    "host.gpu-compute-capabilities": ("7.0",),
    "host.gpu-mig": ("enabled",),
    "host.gpu-memory": {"host.gpu-memory-mib": ("40960",)},
    "compat.torch": {"torch.version": "2.99.0"},
    "compat.cudnn": {"torch.version": "2.8.0", "libs.cudnn.version": "9.1.0"},
    "compat.nccl": {"torch.version": "2.8.0", "libs.nccl.version": "2.29.7"},
    "compat.cublas": {"torch.version": "2.8.0", "libs.cublas.version": "13.1.0"},
    "compat.torchvision": {"torch.version": "2.8.0"},
    "compat.torchaudio": {"torch.version": "2.8.0"},
}


def judge(field: Field, policy: dict[str, str], make_manifest, make_facts):
    """The verdict on two nodes of which the second differs from the first in one field."""
    lock = locked(field, policy)
    expected = lockfile.expectations(lock, level="deep", origin="l")
    if field.name == "container.sif.made-again":
        expected = same_tree.expecting(expected, "e" * 64, lock)
    script = field.name.startswith("code.")
    source = Source(root="/job", folder="/runs/r1/source", commit="", digest="d")
    data = RecordedData(name="numpy", path="/data", compare="list", state="1 file")
    manifest = make_manifest(
        gpus_per_node=1,
        expectations=(*expected, *host_expectations(lock, gpus=1)),
        severities=gate_severities(lock, gpus=1),
        gpu_needs=gpu_needs(lock, gpus=1, table=toml_files.read(PACKAGED, error=SpecError)),
        script="/job/train.py" if script else "",
        environment=SIF if field.name == "container.mounts" else HOST,
        source=source if field.name == "code.digest" else None,
        start_hook_sha256="h" if field.name == "code.start-hook-sha256" else "",
        data=(data,) if field.name == "data.*" else (),
        packages=PACKAGES if field.name.startswith("compat.torch") else (),
    )
    usual = {name_of(field): "usual"} if "nodes" in field.judged_by else {}
    values = {e.field: e.value for e in reversed(expected)} | usual | GPUS | {"container.mounts": ()}
    values |= {
        "code.script-sha256": manifest.script_sha256,
        "code.digest": "d",
        "code.start-hook-sha256": "h",
        "data.numpy": "1 file",
    }
    facts = {node: make_facts(node, values=values) for node in ("n1", "n2")}
    facts["n2"] = differing(field, facts["n2"])
    verdict, _ = decide.judge(manifest, ("n1", "n2"), facts, {}, attempt=0, job_id="7")
    return verdict


def differing(field: Field, facts: Facts) -> Facts:
    name = name_of(field)
    if field.name == "container.sif.made-again":
        return facts
    if field.name == "stage":
        return dataclasses.replace(facts, not_staged=("no room",))
    if field.follows:
        return dataclasses.replace(facts, differences=(Difference(field=name, locked="1", found="2"),))
    if field.name in BY_ID:
        failed = CheckOutcome(id=field.name, state="failed", found="another")
        return dataclasses.replace(facts, checks=NodeChecks.of([failed], seconds=0))
    other = BROKEN.get(field.name, "another")
    return dataclasses.replace(facts, values=facts.values | (other if isinstance(other, dict) else {name: other}))


def keys_of(field: Field) -> list[str]:
    """The keys of [policy] that name a field: its own name, and that of its family."""
    # A property of a node that the table does not name has no key in [policy].
    return [field.name] if field.name == "host.*" else sorted({field.name, name_of(field)})


@pytest.mark.parametrize("severity", ["must", "warn", "info"])
@pytest.mark.parametrize("field", GATE, ids=lambda field: field.name)
def test_a_key_changes_what_the_gate_decides(field, severity, make_manifest, make_facts):
    reported_as = "container.sif.sha256" if field.name == "container.sif.made-again" else name_of(field)
    for key in keys_of(field):
        assert severities.problems([key]) == ()
        verdict = judge(field, {key: severity}, make_manifest, make_facts)
        found = {f.severity for f in verdict.findings if f.field == reported_as}
        assert found == {severity}, verdict.findings
        others = [f.field for f in verdict.findings if f.severity == "must" and f.field != reported_as]
        assert (verdict.result == "match") == (severity != "must" and not others)


@pytest.mark.parametrize("field", DIFF, ids=lambda field: field.name)
def test_a_key_changes_what_diff_decides(field):
    for key in keys_of(field):
        for severity in ("must", "warn", "info"):
            assert severities.problems([key]) == ()
            sides = [severities.severities({key: severity})] * 2
            (change,) = difference.compare({name_of(field): "1"}, {name_of(field): "2"}, severities=sides)
            assert change.severity == severity


@pytest.mark.parametrize("field", FIXED, ids=lambda field: field.name)
def test_a_fixed_field_is_refused_with_the_reason(field):
    for key in keys_of(field):
        if key in ("container.sif.*", "container.overlay.*"):  # as patterns, they name fields that are free, too
            continue
        assert severities.problems([key]) == (f'`policy."{key}"` cannot be changed: {field.fixed}',)
        # A lockfile of somebody else that has such a key loosens nothing.
        assert severities.severities({key: "info"}).of(key) == field.default or "*" in key


def test_without_gpus_no_field_about_gpus_stops_a_job(make_manifest, make_facts):
    policy = {field.name: "must" for field in FIELDS if field.gpus and not field.fixed}
    manifest = make_manifest(severities=severities.resolve(policy, gpus=False))
    facts = {"n1": make_facts("n1", values=GPUS), "n2": make_facts("n2", values={"host.driver-version": "1"})}
    verdict, _ = decide.judge(manifest, ("n1", "n2"), facts, {}, attempt=0, job_id="7")
    assert verdict.result == "match"
    assert {f.severity for f in verdict.findings} == {"info"}


def test_every_field_is_free_fixed_or_tested_elsewhere():
    assert {field.name for field in (*GATE, *DIFF, *FIXED)} | set(ELSEWHERE) == {field.name for field in FIELDS}
    assert all(name in (TESTS / path).read_text() for name, path in ELSEWHERE.items())
    assert len(FIXED) < 30 < len(GATE)


def test_nodes_are_not_compared_in_what_every_node_has_for_itself(make_manifest, make_facts):
    own = [field.name for field in FIXED if field.name.startswith("host.")]
    manifest = make_manifest(severities=gate_severities(locked(FIELDS[0], {"host.*": "must"}), gpus=1))
    facts = {node: make_facts(node, values=dict.fromkeys(own, node)) for node in ("n1", "n2")}
    verdict, _ = decide.judge(manifest, ("n1", "n2"), facts, {}, attempt=0, job_id="7")
    assert "host.hostname" in own
    assert verdict.findings == ()
