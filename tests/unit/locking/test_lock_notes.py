"""What `lock` says of an image that has not all for fast networks."""

import dataclasses
from pathlib import Path

import pytest

from hpcenv.locking import lock_notes
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.network import ImageNetwork

LOCKED = read_lockfile(Path(__file__).resolve().parents[2] / "fuzz" / "seeds" / "lockfile" / "host.lock.toml")
COMPLETE = ImageNetwork(
    verbs="/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44", providers=12, libfabric="", plugin="", plugin_version=""
)


def notes(image, *, kind="sif", **facts):
    values = {"system.os-release": "debian 12", "system.machine": "x86_64", "libs.nccl.version": "2.27.7"}
    values |= {name.replace("_", "."): value for name, value in facts.items()}
    return lock_notes.of_fabric(LOCKED.model_copy(update={"kind": kind, "facts": values}), image)


def test_a_complete_image_has_no_note():
    assert notes(COMPLETE) == ()


def test_torch_without_nccl_has_no_note():
    assert notes(None) == ()


@pytest.mark.parametrize(
    ("release", "line"),
    [
        ("debian 12", "libibverbs1 ibverbs-providers"),
        ("ubuntu 24.04", "libibverbs1 ibverbs-providers"),
        ("rocky 9.5", "RUN dnf install -y libibverbs"),
        ("sles 15.6", "RUN zypper --non-interactive install libibverbs1"),
        ("gentoo", "install libibverbs and its providers (rdma-core)"),
    ],
)
def test_without_verbs_the_line_for_the_dockerfile_is_named(release, line):
    (note,) = notes(dataclasses.replace(COMPLETE, verbs="", providers=0), **{"system_os-release": release})
    assert note.startswith(
        "the image does not contain libibverbs.so.1: with InfiniBand or RoCE, NCCL silently uses TCP"
    )
    assert line in note


def test_verbs_without_a_provider_find_no_device():
    (note,) = notes(dataclasses.replace(COMPLETE, providers=0))
    assert note.startswith("the image does not contain a provider beside libibverbs.so.1")


def test_an_environment_of_the_host_has_the_libraries_of_the_nodes():
    assert notes(dataclasses.replace(COMPLETE, verbs="", providers=0), kind="host") == ()


def test_several_plugins_and_a_plugin_without_libfabric():
    image = dataclasses.replace(
        COMPLETE,
        plugin="/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so",
        other_plugins=("/opt/aws-ofi-nccl/lib/libnccl-net.so (aws-ofi-nccl 1.18.0)",),
    )
    (note,) = notes(image)
    assert "NCCL takes /opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so, not /opt/aws-ofi-nccl" in note
    assert "ENV NCCL_NET_PLUGIN=PATH" in note
    alone = dataclasses.replace(COMPLETE, plugin="/usr/local/lib/libnccl-net.so", plugin_version="1.18.0")
    (note,) = notes(alone)
    assert "and no libfabric.so.1" in note
    assert notes(dataclasses.replace(alone, libfabric="/usr/lib/libfabric.so.1")) == ()


def test_versions_that_are_known_to_fail():
    (note,) = notes(COMPLETE, libs_nccl_version="2.26.2")
    assert note.startswith("NCCL 2.26.2 is known to fail: ends with `Could not find NET with id 0`")
    assert "NVIDIA/nccl#1748" in note
    plugin = dataclasses.replace(COMPLETE, plugin="/x/libnccl-net.so", plugin_version="1.8.1", libfabric="/x/libfabric")
    (note,) = notes(plugin)
    assert note.startswith("aws-ofi-nccl 1.8.1 is known to fail on slingshot: deadlocks")
    # It fails on Grace only.
    assert notes(COMPLETE, libs_nccl_version="2.28.9") == ()
    assert len(notes(COMPLETE, libs_nccl_version="2.28.9", system_machine="aarch64")) == 1
