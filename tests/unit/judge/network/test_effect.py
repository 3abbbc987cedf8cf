"""Settings that the host or the environment ignores are named before the training, and those that work are not."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpcenv.judge.network import rendezvous
from hpcenv.judge.network.effect import CHECKS, selected
from hpcenv.machine.network.recording import MachineRecording, fabric_of
from hpcenv.records.codec import decode_record
from hpcenv.records.manifest import Setting
from hpcenv.records.network import FabricVersion, ImageNetwork

MACHINES = Path(__file__).resolve().parents[3] / "machines"
GOOD = ImageNetwork(
    verbs="/usr/lib/libibverbs.so.1", providers=3, libfabric="/opt/libfabric.so.1", plugin="/opt/libnccl-net.so",
    plugin_version="1.18.0",
)  # fmt: skip


def fabric(name):
    path = MACHINES / f"{name}.json"
    return fabric_of(decode_record(MachineRecording, path.read_text(), origin=name))


@pytest.fixture
def effects(make_manifest, make_facts):
    """Setting -> what was read back of it, for two equal nodes."""

    def of(machine, *, image=GOOD, values=(), **given):
        settings = tuple(Setting(name=name, value=value, origin="--env") for name, value in given.items())
        one = replace(make_facts("n1"), fabric=machine, image_network=image)
        one = replace(one, values={**one.values, **dict(values)})
        facts = {node: replace(make_facts(node), fabric=machine, image_network=image, values=one.values)
                 for node in ("n1", "n2")}  # fmt: skip
        manifest = make_manifest(backend="nccl", settings=settings)
        network = rendezvous.choose(manifest, ("n1", "n2"), facts, job_id="1", attempt=0).network
        warned = {warning.what.partition("=")[0] for warning in network.warnings if warning.rule == "effect.none"}
        assert warned == {effect.name for effect in network.effects if effect.took_effect == "no"}
        return {effect.name: (effect.took_effect, effect.found) for effect in network.effects}

    return of


def slingshot(rendezvous_get, *versions):
    machine = fabric("slingshot-gh200")
    cxi = tuple(replace(device, rendezvous_get=rendezvous_get) for device in machine.cxi)
    kept = tuple(one for one in machine.versions if one.name not in ("kdreg2", "userfaultfd"))
    return replace(machine, cxi=cxi, versions=(*kept, *versions))


@pytest.mark.parametrize(
    ("state", "answer", "found"), [("yes", "no", "1"), ("no", "yes", "0"), ("unknown", "unknown", "cannot be read")]
)
def test_alt_read_works_only_where_rdzv_get_en_is_0(effects, state, answer, found):
    assert effects(slingshot(state), FI_CXI_RDZV_PROTO="alt_read")["FI_CXI_RDZV_PROTO"] == (answer, found)
    assert "FI_CXI_RDZV_PROTO" not in effects(slingshot(state), FI_CXI_RDZV_PROTO="default")


def test_a_monitor_whose_device_is_not_there_has_no_effect(effects):
    there = FabricVersion(name="kdreg2", version="present", path="/dev/kdreg2")
    assert effects(slingshot("no"), FI_MR_CACHE_MONITOR="kdreg2")["FI_MR_CACHE_MONITOR"] == ("no", "absent")
    assert effects(slingshot("no", there), FI_MR_CACHE_MONITOR="kdreg2")["FI_MR_CACHE_MONITOR"] == ("yes", "present")


@pytest.mark.parametrize(("allowed", "answer"), [("all users", "yes"), ("privileged", "unknown"), (None, "unknown")])
def test_userfaultfd_may_be_for_privileged_users(effects, allowed, answer):
    versions = [] if allowed is None else [FabricVersion(name="userfaultfd", version=allowed, path="/proc")]
    found = effects(slingshot("no", *versions), FI_MR_CACHE_MONITOR="userfaultfd")["FI_MR_CACHE_MONITOR"]
    assert found[0] == answer


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("NCCL_SOCKET_IFNAME", "=eno1", "yes"),
        ("NCCL_SOCKET_IFNAME", "bond", "no"),
        ("NCCL_IB_HCA", "mlx5_1", "yes"),
        ("NCCL_IB_HCA", "=mlx5_77", "no"),
        ("NCCL_NET_GDR_LEVEL", "PHB", "yes"),
        ("NCCL_NET", "IB", "yes"),
        ("NCCL_NET_PLUGIN", "other", "yes"),
    ],
)
def test_a_setting_on_infiniband(effects, name, value, answer):
    assert effects(fabric("ib-h100"), **{name: value})[name][0] == answer


def test_without_gpudirect_its_level_has_no_effect(effects):
    machine = replace(fabric("ib-h100"), gpudirect="")
    assert effects(machine, NCCL_NET_GDR_LEVEL="PHB")["NCCL_NET_GDR_LEVEL"][0] == "no"
    assert "NCCL_NET_GDR_LEVEL" not in effects(machine, NCCL_NET_GDR_LEVEL="LOC")


def test_what_the_environment_lacks_makes_a_network_of_it_without_effect(effects):
    machine = fabric("ib-h100")
    assert effects(machine, image=replace(GOOD, verbs=""), NCCL_NET="IB")["NCCL_NET"] == ("no", "no libibverbs.so.1")
    other = replace(GOOD, plugin="/opt/hpcx/libnccl-net.so", plugin_version="")
    assert effects(machine, image=other, NCCL_NET="AWS Libfabric")["NCCL_NET"] == ("no", "/opt/hpcx/libnccl-net.so")
    found = effects(machine, image=replace(GOOD, plugin=""), NCCL_NET_PLUGIN="other")
    assert found["NCCL_NET_PLUGIN"] == ("no", "the loader finds no such library")


@pytest.mark.parametrize(("limit", "answer"), [("unlimited", "yes"), ("8192 KiB", "no"), ("16777216 KiB", "yes")])
def test_a_small_memlock_is_named_where_rdma_is_used(effects, limit, answer):
    found = effects(fabric("ib-h100"), values={"host.memlock": limit}.items())
    assert found["memlock"] == (answer, limit)
    assert "memlock" not in effects(fabric("tcp-100g"), values={"host.memlock": limit}.items())


def test_what_hpcenv_chose_from_a_list_is_not_read_back_from_it(effects):
    assert not effects(fabric("tcp-100g")).keys() & {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert set(CHECKS) >= {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth0", ["eth0", "eth01"]),
        ("=eth0", ["eth0"]),
        ("^eth,lo", ["ib0"]),
        ("^=eth0,lo", ["eth01", "ib0"]),
        ("", []),
    ],
)
def test_names_are_selected_as_nccl_does(value, names):
    assert selected(value, ["eth0", "eth01", "ib0", "lo"]) == names


def test_a_name_without_a_port_means_all_ports():
    assert selected("=mlx5_1", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"], parts=":") == ["mlx5_1:1", "mlx5_1:2"]
    assert selected("mlx5_1:1", ["mlx5_1:1", "mlx5_1:2", "mlx5_11:1"], parts=":") == ["mlx5_1:1"]
