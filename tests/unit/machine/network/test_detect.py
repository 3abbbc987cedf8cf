"""What the detection finds on machines of many kinds, and that a broken file hides nothing else."""

import json
import os
import time
from pathlib import Path

import pytest

from hpcenv.machine.network import recording
from hpcenv.machine.network.detect import detect
from hpcenv.machine.tree import HostTree, RecordedTree, TracedTree
from hpcenv.records.codec import decode_record, encode_record
from hpcenv.records.facts import Interface
from hpcenv.records.network import Fabric, GpuPlace

MACHINES = Path(__file__).resolve().parents[3] / "machines"


def machine(name):
    path = MACHINES / f"{name}.json"
    return decode_record(recording.MachineRecording, path.read_text(), origin=str(path))


def fabric(name):
    return recording.fabric_of(machine(name))


def on_disk(given, root):
    """Write a recording as a tree of files and links."""
    for path, name in sorted(given.links.items(), key=lambda link: len(link[0])):
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        target = (
            root / "devices" / str(len(list((root / "devices").glob("*"))) if (root / "devices").is_dir() else 0) / name
        )
        target.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
    folders = {path.rpartition("/")[0] for path in given.files}
    for path, text in given.files.items():
        place = root / path.lstrip("/")
        if path in folders:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.json")), ids=lambda path: path.stem)
def test_a_tree_on_disk_is_read_like_its_recording(path, tmp_path):
    given = machine(path.stem)
    on_disk(given, tmp_path)
    assert detect(HostTree(tmp_path), {}, gpus=given.gpus) == recording.fabric_of(given)


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.json")), ids=lambda path: path.stem)
def test_every_machine_says_whether_it_was_recorded_and_a_synthesised_one_names_its_sources(path):
    given = machine(path.stem)
    assert given.name == path.stem
    assert given.label == "recorded" or given.sources


def test_ports_have_layer_rate_place_and_interface():
    ports = {port.device: port for port in fabric("ib-h100").ports}
    assert [p.layer for p in ports.values()] == ["InfiniBand"] * 8 + ["Ethernet"]
    assert (ports["mlx5_0"].rate_gbit, ports["mlx5_0"].bus, ports["mlx5_0"].interfaces) == (
        400,
        "0000:1a:00.0",
        ("ib0",),
    )
    assert ports["mlx5_bond_0"].gid_types == ("IB/RoCE v1", "RoCE v2")


def test_ipoib_has_the_speed_of_its_port():
    links = {link.name: link for link in fabric("ib-v100").links}
    assert (links["ib0"].kind, links["ib0"].speed_mbit) == ("infiniband", 100_000)
    assert (links["eno1"].kind, links["eno1"].speed_mbit) == ("ethernet", 1000)


def test_slingshot_says_whether_rendezvous_get_is_on():
    assert {device.rendezvous_get for device in fabric("slingshot-gh200").cxi} == {"yes"}
    assert {device.rendezvous_get for device in fabric("slingshot-mi250x").cxi} == {"no"}


def test_gpus_of_amd_are_counted_with_their_links():
    found = fabric("slingshot-mi250x")
    assert (found.gpu_vendor, len(found.gpus), {gpu.links for gpu in found.gpus}) == ("amd", 8, {4})
    assert found.gpus[0].numa == 0


def test_gpus_that_cannot_be_read_are_unknown_and_not_none():
    assert fabric("cpu-node").gpu_vendor == "none"
    found = fabric("gpu-without-driver")
    assert found.gpu_vendor == "unknown"
    assert found.unknown == ("gpus: 0000:18:00.0 (NVIDIA) on the PCI bus without a loaded driver",)
    assert detect(RecordedTree({}, {}), {}).gpu_vendor == "unknown"
    loaded = RecordedTree({"/proc/driver/nvidia/version": "x"}, {})
    assert detect(loaded, {}).gpu_vendor == "unknown"


def test_versions_of_the_host_are_read():
    assert {(v.name, v.version) for v in fabric("efa-p5").versions} >= {
        ("aws-ofi-nccl", "1.16.3"), ("efa-installer", "1.43.2"), ("libfabric", "2.1.0amzn5.0"), ("efa", "2.17.2g"),
    }  # fmt: skip
    assert ("libfabric", "1.22.0") in {(v.name, v.version) for v in fabric("slingshot-gh200").versions}


def test_a_plugin_without_a_version_is_there_all_the_same():
    assert [v.version for v in fabric("gcp-a3-ultra").versions if v.name == "nccl-net-plugin"] == ["unknown"]


def test_the_administrators_file_is_read_as_nccl_reads_it():
    tuning = fabric("oci-h100").tuning[0]
    values = {s.name: s.value for s in tuning.variables}
    assert (tuning.path, tuning.kind, tuning.unread) == ("/etc/nccl.conf", "settings", 0)
    assert values["NCCL_IB_HCA"].startswith("=mlx5_0,mlx5_1,mlx5_3")
    assert {s.origin for s in tuning.variables} == {"/etc/nccl.conf"}


def test_of_a_vendors_script_only_literal_assignments_count_and_the_rest_is_counted():
    tuning = fabric("gcp-a3-ultra").tuning[0]
    assert {s.name: s.value for s in tuning.variables}["NCCL_NET"] == "gIB"
    assert "NCCL_IB_QPS_PER_CONNECTION" not in {s.name for s in tuning.variables}
    assert tuning.unread == 1


def test_the_users_file_comes_before_the_administrators():
    files = {
        "/home/u/.nccl.conf": "NCCL_DEBUG=INFO\nno line\nnccl=1",
        "/etc/nccl.conf": "NCCL_DEBUG=WARN",
        "/x.conf": "A=1",
    }
    found = detect(RecordedTree(files, {}), {"HOME": "/home/u"}).tuning
    assert [(t.path, t.unread) for t in found] == [("/home/u/.nccl.conf", 1), ("/etc/nccl.conf", 0)]
    named = detect(RecordedTree(files, {}), {"HOME": "/home/u", "NCCL_CONF_FILE": "/x.conf"}).tuning
    assert [t.path for t in named] == ["/x.conf", "/etc/nccl.conf"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/sys/class/net/eno1/speed", "fast"),
        ("/sys/class/infiniband/mlx5_0/ports/1/rate", "\udcff"),
        ("/sys/class/infiniband/mlx5_0/ports/1/state", ""),
        ("/sys/class/infiniband/mlx5_0/ports/x/state", "4: ACTIVE"),
        ("/sys/class/cxi/cxi0/device/properties/rdzv_get_en", "maybe"),
        ("/sys/class/kfd/kfd/topology/nodes/0/properties", "simd_count many"),
    ],
)
def test_a_broken_file_is_unknown_and_hides_nothing_else(path, text):
    given = machine("ib-h100")
    files = dict(given.files)
    if "kfd" in path:
        files.pop("/proc/driver/nvidia/version")
    files[path] = text.encode("utf-8", "replace").decode()
    found = detect(RecordedTree(files, given.links), {}, gpus=given.gpus)
    assert isinstance(found, Fabric)
    assert len(found.links) == 12
    assert len(found.ports) in (0, 9)


def test_this_machine_is_read_in_less_than_50_ms():
    detect(HostTree(), {})
    began = time.perf_counter()
    found = detect(HostTree(), {})
    assert time.perf_counter() - began < 0.05
    assert "lo" in {link.name for link in found.links}


def test_a_recording_holds_no_address_and_gives_the_same_fabric(tmp_path):
    files = {
        "/etc/nccl.conf": "NCCL_IB_ADDR_RANGE=fd02::/16\nNCCL_COMM_ID=10.1.2.3:99\nX=52:54:00:12:34:56",
        "/sys/class/dmi/id/chassis_asset_tag": "SERIAL-123",
        "/sys/class/net/eth0/type": "1",
        "/sys/class/net/eth0/operstate": "up",
        "/sys/class/net/enx0a1b2c3d4e5f/type": "1",
        "/sys/module/mlx5_core/version": "24.10-0.7.0",
        "/opt/amazon/ofi-nccl/lib/libnccl-net.so": "\x7fELF...aws-ofi-nccl 1.18.0 and more",
    }
    for path, text in files.items():
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text(text)
    interfaces = (Interface(name="eth0", addresses=("10.1.2.3",)), Interface(name="lo", addresses=("127.0.0.1",)))
    gpus = (GpuPlace(bus="0000:18:00.0", links=18, clique="0011223344556677.3"),)
    made = recording.record(
        TracedTree(tmp_path), name="mine", date="2026-11-23", gpus=gpus, interfaces=interfaces, first="eth0"
    )
    text = encode_record(made)
    for secret in ("SERIAL", "10.1.2.3", "fd02", "52:54", "00112233", "ELF", "0a1b2c"):
        assert secret not in text
    assert made.addressed == ("eth0",)
    again = recording.fabric_of(decode_record(recording.MachineRecording, text, origin="x"))
    assert {v.name: v.version for v in again.versions} == {"mlx5_core": "24.10-0.7.0", "aws-ofi-nccl": "1.18.0"}
    assert [link.name for link in again.links] == ["enx0", "eth0"]


def test_recorded_machines_are_up_to_date_json():
    for path in MACHINES.glob("*.json"):
        assert json.loads(path.read_text())["schema"] == 1
        assert os.path.getsize(path) < 200_000
