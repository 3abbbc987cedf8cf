"""[policy] on a real cluster: the gate, `verify` and `diff` follow it, for fields of every kind.

The nodes are made to differ from the lockfile and from each other, in all fields of a test at once. One round for
each severity sets it for all of them. The long form (HPCENV_TEST_LONG=1) has more fields, and an image.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from .conftest import HOST_PYTHON, IMAGE, OTHER_IMAGE, STORE, Cluster, Project, copy_examples

pytestmark = pytest.mark.cluster
LONG = bool(os.environ.get("HPCENV_TEST_LONG"))

SITE = "/shared/hostenv/lib/python3.11/site-packages"
DIFFERENT, REJECTED, WARNED = 26, 90, 92


@dataclass(frozen=True)
class Changed:
    """A file that one node sees changed.

    Attributes:
        keys: what [policy] must name for this one change.
        fields: the fields that report it.
        path: the file; `{folder}` is the project's.
        script: how the changed copy is made of it, as shell: `$1` is the file.
        in_diff: a run that used it differs from the lockfile in these.
    """

    keys: tuple[str, ...]
    fields: tuple[str, ...]
    path: str
    script: str
    in_diff: tuple[str, ...] = ()


KERNEL = Changed(("host.kernel",), ("host.kernel",), "/proc/sys/kernel/osrelease", "echo 5.5.5-other")
CONTENT = Changed(
    ("packages.*.content-sha256",),
    ("packages.numpy.content-sha256",),
    f"{SITE}/numpy/version.py",
    'cat "$1"; echo "# changed"',
    ("packages.numpy.content-sha256",),
)
SCRIPT = Changed(
    ("code.script-sha256",), ("code.script-sha256",), "{folder}/examples/train.py", 'cat "$1"; echo "# changed"'
)
VERSION = Changed(
    ("packages.jinja2",),
    ("packages.jinja2",),
    f"{SITE}/jinja2-3.1.6.dist-info/METADATA",
    'sed "s/^Version: .*/Version: 3.1.7/" "$1"',
    ("packages.jinja2",),
)
LIBRARY = Changed(
    ("libs.*.sha256", "packages.torch.content-sha256"),
    ("libs.libtorch.sha256",),
    f"{SITE}/torch/lib/libtorch.so",
    'cat "$1"; echo changed',
    ("libs.libtorch.sha256",),
)
RELEASE = Changed(
    ("system.os-release",), ("system.os-release",), "/etc/os-release", "echo ID=other", ("system.os-release",)
)
# Set by `--env` of the submission: all nodes differ from the lockfile.
VARIABLES = {"libs.ld-library-path": ("LD_LIBRARY_PATH", "/nowhere")}

FILES = [KERNEL, CONTENT, SCRIPT, *([VERSION, LIBRARY, RELEASE] if LONG else [])]


@contextmanager
def small_shm(cluster: Cluster) -> Iterator[None]:
    """n1 has a small /dev/shm: `host.shm-mib` differs between the nodes."""
    size = cluster.must("stat", "-f", "-c", "%b %S", "/dev/shm", node="n1", user="root").split()
    cluster.must("mount", "-o", "remount,size=64m", "/dev/shm", node="n1", user="root")
    try:
        yield
    finally:
        whole = f"remount,size={int(size[0]) * int(size[1])}"
        cluster.must("mount", "-o", whole, "/dev/shm", node="n1", user="root")


@contextmanager
def changed_on_n1(cluster: Cluster, project: Project, change: Changed) -> Iterator[None]:
    path = change.path.format(folder=project.folder)
    copy = f"/run/policy-{uuid.uuid4().hex[:6]}"
    make = f'({change.script}) > "$2" && chmod 755 "$2" && mount --bind "$2" "$1"'
    cluster.must("sh", "-c", make, "sh", path, copy, node="n1", user="root")
    try:
        yield
    finally:
        cluster.must("umount", path, node="n1", user="root")


def specify(project: Project, spec: str, policy: dict[str, str]) -> None:
    lines = [spec, "[policy]", *(f'"{key}" = "{severity}"' for key, severity in policy.items())]
    project.cluster.write(f"{project.folder}/hpcenv.toml", "\n".join(lines) + "\n")


def make_project(cluster: Cluster, spec: str) -> Project:
    folder = f"/home/alice/hpcenv-tests/policy-{uuid.uuid4().hex[:6]}"
    copy_examples(cluster, folder)
    return Project(cluster, folder)


def train(project: Project, run: str) -> int:
    words = ("examples/train.py", "--nodes", "2", "--gpus", "0", "--nproc", "1", "--wait", "--name", run)
    # In its own copy of the project a run would not see the script that one node sees changed.
    set_here = [word for name, value in VARIABLES.values() for word in ("--env", f"{name}={value}")]
    done = project.hpcenv("submit", *words, "--workdir", "live", *set_here, "--", "--steps", "1", timeout=600)
    print(done.text)
    return done.status


def by_field(findings: list[dict[str, Any]]) -> dict[str, str]:
    return {finding["field"]: finding["severity"] for finding in findings}


def verified(project: Project, *words: str) -> tuple[int, dict[str, str]]:
    done = project.hpcenv("verify", "--json", *words, timeout=600)
    return done.status, by_field(json.loads(done.stdout)["data"]["verdict"]["findings"])


def compared(project: Project, *words: str) -> tuple[int, dict[str, str]]:
    done = project.hpcenv("diff", *words, "--json")
    return done.status, by_field(json.loads(done.stdout)["data"]["changes"])


@pytest.mark.parametrize("severity", ["must", "warn", "info"] if LONG else ["must", "warn"])
def test_gate_verify_and_diff_follow_the_policy(cluster: Cluster, severity: str) -> None:
    spec = f'image = "host"\npython = "{HOST_PYTHON}"\n'
    project = make_project(cluster, spec)
    keys = ["host.shm-mib", *VARIABLES, *(key for change in FILES for key in change.keys)]
    fields = {"host.shm-mib", *VARIABLES, *(field for change in FILES for field in change.fields)}
    policy = dict.fromkeys(keys, severity)
    specify(project, spec, policy)
    project.must("lock", "--no-wheels", timeout=600)
    with ExitStack() as changes:
        changes.enter_context(small_shm(cluster))
        for change in FILES:
            changes.enter_context(changed_on_n1(cluster, project, change))
        status = train(project, "run")
        gate = by_field(project.record("run", "verdict.json")["findings"])
        verify = verified(project, "--nodes", "2", "--strict")
    print(f"{severity}: gate {status}, {len(gate)} fields: {', '.join(sorted(gate))}; verify {verify[0]}")
    assert {field: gate.get(field) for field in fields} == dict.fromkeys(fields, severity)
    assert status == (REJECTED if severity == "must" else 0)
    in_verify = fields - {*SCRIPT.fields, *VARIABLES}
    assert {field: verify[1].get(field) for field in in_verify} == dict.fromkeys(in_verify, severity)
    assert verify[0] == {"must": REJECTED, "warn": WARNED, "info": 0}[severity]
    # What the run used in place of what is locked.
    in_diff = {*VARIABLES, *(field for change in FILES for field in change.in_diff)}
    diff = compared(project, "default", "run")
    print(f"{severity}: diff {diff[0]}: {diff[1]}")
    assert {field: diff[1].get(field) for field in in_diff} == dict.fromkeys(in_diff, severity)
    assert diff[0] == (DIFFERENT if severity == "must" else 0)


def test_a_key_that_cannot_act_is_refused(cluster: Cluster) -> None:
    spec = f'image = "host"\npython = "{HOST_PYTHON}"\n'
    project = make_project(cluster, spec)
    specify(project, spec, {"network.route": "warn", "host.gpu-uuids": "must", "host.rdam": "must"})
    done = project.hpcenv("lock")
    assert done.status == 3
    for line in (
        '`policy."network.route"` cannot be changed: without it the job cannot start',
        '`policy."host.gpu-uuids"` cannot be changed: every GPU has its own',
        'unknown field `policy."host.rdam"`, perhaps you meant `host.rdma`',
    ):
        assert line in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("severity", ["must", "warn", "info"])
def test_an_image_and_its_sif(cluster: Cluster, severity: str) -> None:
    spec = 'image = "{}"\nplain-http = ["registry:5000"]\n[paths]\nstore = "' + STORE + '"\n'
    project = make_project(cluster, spec)
    keys = ("container.sif.sha256", "container.sif.tree", "container.config-digest", "container.rootfs-chain-id")
    not_judged = ("packages.*", "torch.*", "python.*", *VARIABLES)
    policy = {**dict.fromkeys(keys, severity), **dict.fromkeys(not_judged, "info")}
    specify(project, spec.format(OTHER_IMAGE), policy)
    project.must("lock", "--lock", "other", "--no-wheels", timeout=600)
    specify(project, spec.format(IMAGE), policy)
    project.must("lock", "--no-wheels", timeout=600)
    sif = project.sif()
    change = Changed(("container.sif.sha256",), ("container.sif.sha256",), sif, 'cat "$1"; echo changed')
    with changed_on_n1(cluster, project, change):
        status = train(project, "run")
        gate = by_field(project.record("run", "verdict.json")["findings"])
        verify = verified(project, "--nodes", "2", "--strict")
    print(f"{severity}: gate {status} {gate}; verify {verify}")
    assert gate["container.sif.sha256"] == severity
    assert status == (REJECTED if severity == "must" else 0)
    assert verify[1]["container.sif.sha256"] == severity
    assert verify[0] == {"must": REJECTED, "warn": WARNED, "info": 0}[severity]
    diff = compared(project, "default", "other")
    print(f"{severity}: diff {diff}")
    assert {diff[1][key] for key in keys if key in diff[1]} == {severity}
    assert "container.config-digest" in diff[1]
    assert diff[0] == (DIFFERENT if "must" in diff[1].values() else 0)
    proof = project.hpcenv("image", "verify", sif, "--image", OTHER_IMAGE, "--plain-http", "registry:5000", timeout=600)
    print(f"{severity}: image verify {proof.status}")
    assert proof.status == (11 if severity == "must" else 0), proof.text
