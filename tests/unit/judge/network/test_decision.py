"""The decision for each kind of machine, as recorded in tests/golden/network, and the precedence of its layers.

HPCENV_UPDATE_GOLDEN=1 pytest tests/unit/judge/network/test_decision.py writes the pages anew.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpcenv.judge.network import page, rendezvous
from hpcenv.judge.network.profiles import PROFILES
from hpcenv.judge.network.rules import RULES
from hpcenv.machine.network.explain import explain_machine, seen_in_recording
from hpcenv.machine.network.recording import MachineRecording, fabric_of
from hpcenv.records.checks import CheckOutcome, NodeChecks
from hpcenv.records.codec import decode_record, encode_record
from hpcenv.records.facts import Interface, Route
from hpcenv.records.manifest import Setting
from hpcenv.records.network import ImageNetwork, NetworkDecision, NetworkLink

TESTS = Path(__file__).resolve().parents[3]
GOLDEN = TESTS / "golden" / "network"
UPDATE = "HPCENV_UPDATE_GOLDEN=1 pytest tests/unit/judge/network/test_decision.py"

# Page -> machine, nodes, backend.
PAGES = {path.stem: (path.stem, 2, "nccl") for path in (TESTS / "machines").glob("*.json")} | {
    "ib-h100-one-node": ("ib-h100", 1, "nccl"),
    "ib-v100-gloo": ("ib-v100", 2, "gloo"),
    "pcie-4090": ("pcie-4090", 1, "nccl"),
    "cpu-node": ("cpu-node", 2, "gloo"),
    "vm-virtio": ("vm-virtio", 2, "gloo"),
}


def machine(name):
    return decode_record(MachineRecording, (TESTS / "machines" / f"{name}.json").read_text(), origin=name)


def decided(name, nodes=2, backend="nccl", **given):
    found = explain_machine(seen_in_recording(machine(name)), nodes=nodes, backend=backend, **given)
    assert found is not None
    return found


def rows(decision):
    return {row.name: row for row in decision.rows}


def given(**values):
    return [Setting(name=name, value=value, origin="--env") for name, value in values.items()]


def rules(decision):
    return [warning.rule for warning in decision.warnings]


@pytest.mark.parametrize("name", PAGES)
def test_the_decision_for_a_machine_is_as_recorded(name):
    kind, nodes, backend = PAGES[name]
    recording = machine(kind)
    head = [f"{recording.name} ({recording.label}): {recording.what}", f"{nodes} nodes, {backend}"]
    head += [f"made from: {source}" for source in recording.sources]
    text = "\n".join(head) + "\n\n" + page.render(decided(kind, nodes, backend))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("HPCENV_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), UPDATE


def test_there_is_no_page_of_another_machine():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_no_variable_without_a_reason_and_no_rule_without_a_source(name):
    decision = decided(*PAGES[name])
    sources = {rule.id: rule.source for rule in RULES}
    for row in decision.rows:
        assert row.reason
        assert row.source == sources.get(row.rule, row.source) != ""
    assert decode_record(NetworkDecision, encode_record(decision), origin="x") == decision


def test_the_machines_reach_every_profile():
    found = {decided(*PAGES[name]).profile for name in PAGES}
    # `single` and `unknown` are for what could not be read.
    assert found == set(PROFILES) - {"single", "unknown"}


def test_rules_have_unique_ids():
    assert len({rule.id for rule in RULES}) == len(RULES)


# -- precedence -----------------------------------------------------------------------------


def test_given_wins_over_the_hosts_files_and_those_over_detection():
    found = rows(decided("oci-h100", settings=given(NCCL_IB_TC="7")))
    assert (found["NCCL_IB_TC"].action, found["NCCL_IB_TC"].value) == ("given", "7")
    assert (found["NCCL_SOCKET_IFNAME"].value, found["NCCL_SOCKET_IFNAME"].origin) == ("eth0", "/etc/nccl.conf")
    assert found["GLOO_SOCKET_IFNAME"].origin == "detected"


def test_a_library_of_the_host_is_not_named_to_a_container_but_to_a_host_environment():
    assert rows(decided("oci-h100"))["NCCL_NET_PLUGIN"].action == "skip"
    assert rows(decided("oci-h100", container=False))["NCCL_NET_PLUGIN"].action == "host"


def test_an_empty_value_asks_hpcenv_to_set_nothing():
    row = rows(decided("ib-h100", settings=given(NCCL_NET="")))["NCCL_NET"]
    assert (row.action, row.origin) == ("skip", "--env")


@pytest.mark.parametrize("name", ["NCCL_NET_PLUGIN", "NCCL_IB_DISABLE"])
def test_a_forced_network_gives_way_to_what_contradicts_it(name):
    row = rows(decided("ib-h100", settings=given(**{name: "1"})))["NCCL_NET"]
    assert (row.action, row.reason) == ("skip", f"{name} is given")


# -- each rule ------------------------------------------------------------------------------


def test_adapters_are_named_only_where_nccl_would_use_a_wrong_one():
    assert "NCCL_IB_HCA" not in rows(decided("roce-h200"))
    row = rows(decided("ib-h100"))["NCCL_IB_HCA"]
    assert row.value == "=" + ",".join(f"mlx5_{at}:1" for at in range(8))
    assert row.evidence == "left out: mlx5_bond_0:1 (Ethernet, 100 Gb/s)"


def test_a_slow_roce_adapter_is_an_ethernet_adapter():
    decision = decided("roce-25g")
    assert decision.profile == "tcp"
    assert "NCCL_NET" not in rows(decision)


def test_alt_read_is_set_only_where_it_has_an_effect():
    amd, nvidia = decided("slingshot-mi250x"), decided("slingshot-gh200")
    assert rows(amd)["FI_CXI_RDZV_PROTO"].value == "alt_read"
    assert amd.step_options == ()
    assert rows(nvidia)["FI_CXI_RDZV_PROTO"].action == "skip"
    assert [option.option for option in nvidia.step_options] == ["--network=disable_rdzv_get"]


def test_the_setting_that_hangs_amd_is_left_out_there():
    assert rows(decided("slingshot-mi250x"))["NCCL_NET_GDR_LEVEL"].action == "skip"
    assert rows(decided("slingshot-gh200"))["NCCL_NET_GDR_LEVEL"].value == "PHB"


def test_no_network_is_forced_on_one_node():
    row = rows(decided("ib-h100", nodes=1))["NCCL_NET"]
    assert (row.action, row.rule) == ("skip", "single.net")


def test_a_topology_that_a_virtual_machine_hides_is_bound_and_named():
    decision = decided("azure-ndv5")
    assert [one.bind.target for one in decision.binds] == ["/opt/microsoft/ndv5-topo.xml"]
    assert rows(decision)["NCCL_TOPO_FILE"].value == "/opt/microsoft/ndv5-topo.xml"
    assert decided("azure-ndv5", container=False).binds == ()


# -- the interface --------------------------------------------------------------------------


def test_ipoib_carries_sockets_where_it_is_much_faster_and_the_data_go_over_sockets():
    row = rows(decided("ib-v100", backend="gloo"))["GLOO_SOCKET_IFNAME"]
    assert row.value == "ib0"
    assert "100 Gb/s" in row.reason
    # With InfiniBand the sockets only start NCCL: the proved route is used.
    assert rows(decided("ib-v100"))["NCCL_SOCKET_IFNAME"].value == "=eno1"


def with_links(facts, *links, interfaces, routes):
    fabric = replace(fabric_of(machine("cpu-node")), links=links)
    network = replace(facts.network, interfaces=interfaces, routes=routes)
    return replace(facts, fabric=fabric, network=network)


def link(name, speed, **changes):
    return replace(NetworkLink(name=name, kind="ethernet", state="up", speed_mbit=speed, driver="x"), **changes)


def two_networks(make_facts, *, second, proved=("10.0.0.1", "10.9.0.1"), address="10.9.0.2"):
    own = {"n1": ("10.0.0.1", "10.9.0.1"), "n2": ("10.0.0.2", address)}
    return {
        node: with_links(
            make_facts(node), link("eth0", 10_000), second,
            interfaces=(Interface(name="eth0", addresses=(a,), networks=("10.0.0.0/24",)),
                        Interface(name="eth1", addresses=(b,), networks=("10.9.0.0/24",))),
            routes=tuple(Route(target=t, source=a, interface="eth0" if t == "10.0.0.1" else "eth1") for t in proved),
        )
        for node, (a, b) in own.items()
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "proved", "address", "expected"),
    [
        ({"speed_mbit": 100_000}, ("10.0.0.1", "10.9.0.1"), "10.9.0.2", "eth1"),
        ({"speed_mbit": 25_000}, ("10.0.0.1", "10.9.0.1"), "10.9.0.2", "eth1"),
        ({"speed_mbit": 10_000}, ("10.0.0.1", "10.9.0.1"), "10.9.0.2", "eth0"),
        ({"speed_mbit": None}, ("10.0.0.1", "10.9.0.1"), "10.9.0.2", "eth0"),
        # Not proved by a route: only if it is much faster, up, and a device.
        ({"speed_mbit": 100_000}, ("10.0.0.1",), "10.9.0.2", "eth1"),
        ({"speed_mbit": 15_000}, ("10.0.0.1",), "10.9.0.2", "eth0"),
        ({"speed_mbit": 100_000, "state": "down"}, ("10.0.0.1",), "10.9.0.2", "eth0"),
        ({"speed_mbit": 100_000, "driver": ""}, ("10.0.0.1",), "10.9.0.2", "eth0"),
        # docker0 has the same address on every node.
        ({"speed_mbit": 100_000}, ("10.0.0.1",), "10.9.0.1", "eth0"),
    ],
)
def test_link_speed_decides_between_interfaces(make_manifest, make_facts, changes, proved, address, expected):
    facts = two_networks(make_facts, second=link("eth1", 0, **changes), proved=proved, address=address)
    choice = rendezvous.choose(make_manifest(), ("n1", "n2"), facts, job_id="1", attempt=0)
    assert {s.name: s.value for s in choice.settings["n2"]}["GLOO_SOCKET_IFNAME"] == expected
    assert choice.rendezvous.host == ("10.9.0.1" if expected == "eth1" else "10.0.0.1")


# -- nodes that differ ----------------------------------------------------------------------


def mixed(make_manifest, make_facts, first, second, **changes):
    facts = {"n1": replace(make_facts("n1"), fabric=first), "n2": replace(make_facts("n2"), fabric=second)}
    return rendezvous.choose(
        make_manifest(backend="nccl", **changes), ("n1", "n2"), facts, job_id="1", attempt=0
    ).network


def test_nodes_of_two_kinds_use_tcp_and_are_named(make_manifest, make_facts):
    decision = mixed(make_manifest, make_facts, fabric_of(machine("ib-h100")), fabric_of(machine("tcp-100g")))
    assert (decision.profile, decision.why) == ("tcp", "the nodes differ: ib: 1 of 2 nodes; tcp: 1 of 2 nodes")
    assert "NCCL_NET" not in rows(decision)
    assert "profile.differs" in rules(decision)


def test_a_node_that_lost_a_port_is_named(make_manifest, make_facts):
    whole = fabric_of(machine("ib-h100"))
    broken = replace(whole, ports=(replace(whole.ports[0], state="DOWN"), *whole.ports[1:]))
    decision = mixed(make_manifest, make_facts, whole, broken)
    assert decision.profile == "ib"
    found = next(w for w in decision.warnings if w.rule == "ports.differ")
    assert len(found.nodes) == 1
    assert {row.nodes for row in decision.rows if row.name == "NCCL_IB_HCA"} == {("n1",), ("n2",)}


def test_a_node_with_another_mtu_in_the_same_subnet_is_named(make_manifest, make_facts):
    def warned(**changes):
        facts = two_networks(make_facts, second=link("eth1", 100_000, mtu=9000))
        second = facts["n2"]
        links = tuple(replace(one, **changes) if one.name == "eth1" else one for one in second.fabric.links)
        facts["n2"] = replace(second, fabric=replace(second.fabric, links=links))
        decision = rendezvous.choose(make_manifest(), ("n1", "n2"), facts, job_id="1", attempt=0).network
        return [warning for warning in decision.warnings if warning.rule == "mtu.differs"]

    (found,) = warned(mtu=1500)
    assert found.nodes == ("n2",)
    assert found.what.startswith("MTU 1500 in 10.9.0.0/24, and 9000 on other nodes")
    assert warned() == warned(mtu=None) == warned(mtu=1500, state="down") == []


def test_infiniband_that_is_down_on_all_nodes_is_named(make_manifest, make_facts):
    whole = fabric_of(machine("ib-h100"))
    down = replace(whole, ports=tuple(replace(p, state="DOWN") if p.layer == "InfiniBand" else p for p in whole.ports))
    assert "ports.not-active" in rules(mixed(make_manifest, make_facts, down, down))
    one = replace(whole, ports=(replace(whole.ports[0], state="DOWN"), *whole.ports[1:]))
    assert "ports.not-active" not in rules(mixed(make_manifest, make_facts, one, one))


def test_without_facts_of_the_hardware_only_the_base_is_set(make_manifest, make_facts):
    decision = mixed(make_manifest, make_facts, fabric_of(machine("ib-h100")), None)
    assert decision.profile == "unknown"
    assert {row.rule.partition(".")[0] for row in decision.rows} == {"base"}


def test_hardware_that_another_schema_describes_counts_as_unknown(make_manifest, make_facts):
    newer = replace(fabric_of(machine("ib-h100")), schema=9)
    assert mixed(make_manifest, make_facts, newer, newer).profile == "unknown"


def test_gpus_that_cannot_be_read_are_warned_of(make_manifest, make_facts):
    fabric = fabric_of(machine("gpu-without-driver"))
    assert "gpus.unknown" in rules(mixed(make_manifest, make_facts, fabric, fabric, gpus_per_node=1))


# -- versions and given variables -----------------------------------------------------------


def test_a_known_bad_plugin_is_named_on_the_network_where_it_fails(make_manifest, make_facts):
    text = {"/opt/aws-ofi-nccl/lib/libnccl-net.so": "aws-ofi-nccl 1.8.1"}
    for name, expected in (("slingshot-gh200", True), ("efa-p5", False)):
        given_machine = machine(name)
        changed = replace(given_machine, files={**given_machine.files, **text})
        found = explain_machine(seen_in_recording(changed), nodes=2, backend="nccl")
        assert ("known-bad.ofi-1.8.1" in rules(found)) == expected


@pytest.mark.parametrize(
    ("version", "architecture", "expected"),
    [
        ("2.28.9", "aarch64", True),
        ("2.28.9", "x86_64", False),
        ("2.29.3", "aarch64", False),
        ("absent", "aarch64", False),
    ],
)
def test_a_known_bad_nccl_of_the_image_is_named(version, architecture, expected):
    values = {"libs.nccl.version": version, "host.machine": architecture}
    assert ("known-bad.nccl-proxy-aarch64" in rules(decided("slingshot-gh200", values=values))) == expected


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "lint.avoid"),
        ({"NCCL_IB_TIMEOUT": "22"}, "lint.avoid"),
        ({"NCCL_IB_CUDA_SUPPORT": "1"}, "lint.dead"),
        ({"NCCL_AVOID_RECORD_STREAMS": "1"}, "lint.dead"),
        ({"NCCL_BLOCKING_WAIT": "1"}, "lint.old-name"),
        ({"NCCL_IB_DISABLE": "1", "NCCL_NET": "IB"}, "lint.contradiction"),
        ({"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"}, "lint.contradiction"),
        ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, "lint.contradiction"),
        ({"NCCL_IB_HCA": "mlx5_1"}, "lint.prefix"),
    ],
)
def test_what_is_wrong_with_given_variables_is_named_and_the_value_is_kept(settings, rule):
    decision = decided("oci-h100", settings=given(**settings))
    assert rule in rules(decision)
    for name, value in settings.items():
        assert (rows(decision)[name].action, rows(decision)[name].value) == ("given", value)


def test_a_run_without_nccl_is_not_told_about_nccl():
    assert rules(decided("cpu-node", backend="gloo", settings=given(NCCL_ALGO="Ring"))) == []


def test_good_settings_are_not_criticised():
    decision = decided("ib-h100", settings=given(NCCL_DEBUG="INFO", NCCL_IB_HCA="=mlx5_1", NCCL_IB_TC="106"))
    assert [rule for rule in rules(decision) if rule.startswith("lint")] == []


def test_a_network_on_one_node_is_a_contradiction():
    assert "lint.contradiction" in rules(decided("ib-h100", nodes=1, settings=given(NCCL_NET="IB")))


def test_a_value_of_the_job_that_differs_between_nodes_is_named(make_manifest, make_facts):
    facts = {
        node: replace(
            found := make_facts(node),
            network=replace(
                found.network, variables=(Setting(name="NCCL_ALGO", value=node, origin="environment of the job"),)
            ),
        )
        for node in ("n1", "n2")
    }
    decision = rendezvous.choose(make_manifest(backend="nccl"), ("n1", "n2"), facts, job_id="1", attempt=0).network
    assert "lint.differs" in rules(decision)


# -- the environment ------------------------------------------------------------------------


GOOD = ImageNetwork(
    verbs="/usr/lib/libibverbs.so.1", providers=9, libfabric="/usr/lib/libfabric.so.1", plugin="/opt/libnccl-net.so",
    plugin_version="1.18.0",
)  # fmt: skip


def in_image(make_manifest, make_facts, name, **changes):
    """Return the rules of the warnings for two nodes of one kind with this environment."""
    fabric = fabric_of(machine(name))
    image = replace(GOOD, **changes)
    facts = {node: replace(make_facts(node), fabric=fabric, image_network=image) for node in ("n1", "n2")}
    manifest = make_manifest(backend="nccl", settings=tuple(given(NCCL_X="1")))
    return rules(rendezvous.choose(manifest, ("n1", "n2"), facts, job_id="1", attempt=0).network)


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        ("ib-h100", {"verbs": ""}, "image.verbs"),
        ("roce-h200", {"providers": 0}, "image.verbs"),
        ("efa-p5", {"plugin": ""}, "image.plugin"),
        ("slingshot-gh200", {"libfabric": ""}, "image.plugin"),
        ("slingshot-gh200", {"plugin_version": "1.13.2-aws"}, "known-bad.ofi-for-efa"),
        ("slingshot-gh200", {"plugin_version": "1.8.1"}, "known-bad.ofi-1.8.1-image"),
        ("ib-h100", {"unread": ("NCCL_X",)}, "lint.dead"),
        ("ib-h100", {"other_plugins": ("/opt/b/libnccl-net.so",)}, "image.plugin-order"),
        ("slingshot-gh200", {"plugin": "/opt/hpcx/libnccl-net.so", "plugin_version": ""}, "image.plugin-other"),
    ],
)
def test_what_the_environment_lacks_for_the_network_is_named(make_manifest, make_facts, name, changes, rule):
    assert rule in in_image(make_manifest, make_facts, name, **changes)


def test_a_plugin_of_the_environment_is_not_put_aside(make_manifest, make_facts):
    fabric = fabric_of(machine("roce-h200"))
    for version, action in (("", "skip"), ("1.18.0", "set")):
        image = replace(GOOD, plugin="/opt/hpcx/libnccl-net.so", plugin_version=version)
        facts = {node: replace(make_facts(node), fabric=fabric, image_network=image) for node in ("n1", "n2")}
        choice = rendezvous.choose(make_manifest(backend="nccl"), ("n1", "n2"), facts, job_id="1", attempt=0)
        assert rows(choice.network)["NCCL_NET"].action == action


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ib-h100", {"plugin": "", "libfabric": ""}),
        ("efa-p5", {"verbs": "", "plugin_version": "1.13.2-aws"}),
        ("tcp-100g", {"verbs": "", "plugin": ""}),
        ("slingshot-gh200", {"verbs": ""}),
    ],
)
def test_what_the_network_does_not_need_is_not_missed(make_manifest, make_facts, name, changes):
    assert [rule for rule in in_image(make_manifest, make_facts, name, **changes) if rule != "gpudirect.missing"] == []


# -- flight recorder --------------------------------------------------------------------------


@pytest.fixture
def recorder_of(make_manifest, make_facts):
    """The variables of torch's flight recorder that a node gets."""

    def of(torch, settings=(), **changes):
        facts = {node: make_facts(node) for node in ("n1", "n2")}
        facts = {node: replace(one, values={**one.values, "torch.version": torch}) for node, one in facts.items()}
        manifest = make_manifest(**{"run_folder": "/runs/r", "backend": "nccl", "settings": tuple(settings), **changes})
        choice = rendezvous.choose(manifest, ("n1", "n2"), facts, job_id="1", attempt=2)
        names = ("TORCH_FR_", "TORCH_NCCL_")
        return {one.name: one.value for one in choice.settings["n1"] if one.name.startswith(names)}

    return of


def test_dumps_of_the_flight_recorder_lie_in_the_run_folder(recorder_of):
    assert recorder_of("2.13.0+cu130") == {
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/r/flight/2/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert recorder_of("2.7.1") == {
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/r/flight/2/rank_",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    # gloo's operations are recorded too, where ranks hang; torch dumps no file of them.
    assert recorder_of("2.13.0", backend="gloo") == {}
    assert recorder_of("2.9.1", backend="gloo") == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    assert recorder_of("2.9.1", (Setting(name="TORCH_FR_BUFFER_SIZE", value="9", origin="--env"),), backend="gloo") == {
        "TORCH_FR_BUFFER_SIZE": "9"
    }


def test_a_user_who_wants_the_dumps_elsewhere_gets_them_there(recorder_of):
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        found = recorder_of("2.13.0", given(**{name: "/scratch/fr_"}))
        assert found == {name: "/scratch/fr_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


# -- questions to NCCL's RAS threads ------------------------------------------------------------


@pytest.mark.parametrize(
    ("nccl", "state", "backend", "is_set"),
    [
        ("2.27.7", "failed", "nccl", True),
        ("2.27.7", "fine", "nccl", False),
        ("2.21.5", "failed", "nccl", False),  # it has no RAS threads
        ("", "failed", "nccl", False),
        ("2.27.7", "failed", "gloo", False),
    ],
)
def test_a_job_whose_node_has_another_one_gets_a_ras_port_of_its_own(
    make_manifest, make_facts, nccl, state, backend, is_set
):
    checks = NodeChecks.of([CheckOutcome(id="net.ras-port", state=state, found="port 28028 is in use")], seconds=0)
    facts = {"n1": make_facts("n1", checks=checks), "n2": make_facts("n2")}
    facts = {name: replace(one, values={**one.values, "libs.nccl.version": nccl}) for name, one in facts.items()}
    choice = rendezvous.choose(make_manifest(backend=backend), ("n1", "n2"), facts, job_id="1", attempt=0)
    values = {name: [s.value for s in choice.settings[name] if s.name == "NCCL_RAS_ADDR"] for name in facts}
    assert values["n2"] == []
    assert bool(values["n1"]) == is_set
    if is_set:
        host, _, port = values["n1"][0].partition(":")
        assert host == "localhost" and 28100 <= int(port) < 32768
