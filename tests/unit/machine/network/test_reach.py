"""The network choice: from what nodes saw to a rendezvous endpoint and variables with reasons."""

import dataclasses
import json
import os
import socket
from pathlib import Path

import pytest

from hpcenv.judge.network import rendezvous
from hpcenv.machine.network import reach as network
from hpcenv.records.facts import Interface, Route
from hpcenv.records.manifest import Setting
from hpcenv.records.verdict import Rendezvous


def choose(manifest, nodes, facts):
    return rendezvous.choose(manifest, nodes, facts, job_id="77", attempt=0)


def values(choice, node):
    return {setting.name: setting.value for setting in choice.settings[node]}


def setting(choice, node, name):
    return next(s for s in choice.settings[node] if s.name == name)


def with_network(facts, **changes):
    return dataclasses.replace(facts, network=dataclasses.replace(facts.network, **changes))


# -- the rendezvous -----------------------------------------------------------------------


def test_the_endpoint_is_an_address_of_the_first_node_that_the_others_reach(make_manifest, make_facts):
    choice = choose(make_manifest(), ("n1", "n2"), {"n1": make_facts("n1"), "n2": make_facts("n2")})
    assert choice.rendezvous == Rendezvous(host="10.0.0.1", port=23456, id="77.0")
    assert choice.local_addresses == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    assert choice.problems == {}


def test_the_id_changes_with_every_restart(make_manifest, make_facts):
    facts = {"n1": make_facts("n1"), "n2": make_facts("n2")}
    again = rendezvous.choose(make_manifest(), ("n1", "n2"), facts, job_id="77", attempt=3)
    assert again.rendezvous.id == "77.3"


def test_each_node_gets_the_name_that_its_own_interface_has(make_manifest, make_facts):
    facts = {"n1": make_facts("n1", interface="bond0"), "n2": make_facts("n2", interface="ens3f0np0")}
    choice = choose(make_manifest(), ("n1", "n2"), facts)
    assert values(choice, "n1")["NCCL_SOCKET_IFNAME"] == "=bond0"
    assert values(choice, "n2")["NCCL_SOCKET_IFNAME"] == "=ens3f0np0"
    assert values(choice, "n2")["GLOO_SOCKET_IFNAME"] == "ens3f0np0"
    assert setting(choice, "n2", "GLOO_SOCKET_IFNAME").reason == "interface of the route to n1"


def test_a_first_node_that_takes_itself_for_127_0_1_1_is_met_at_its_real_address(make_manifest, make_facts):
    first = with_network(
        make_facts("n1"),
        first_node_addresses=("127.0.1.1",),
        routes=(Route(target="127.0.1.1", source="127.0.0.1", interface="lo"),),
    )
    choice = choose(make_manifest(), ("n1", "n2"), {"n1": first, "n2": make_facts("n2")})
    assert choice.rendezvous.host == "10.0.0.1"
    assert values(choice, "n1")["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_node_that_resolves_the_first_one_to_127_0_1_1_is_a_problem_and_no_guess(make_manifest, make_facts):
    lost = with_network(
        make_facts("n2"),
        first_node_addresses=("127.0.1.1",),
        routes=(Route(target="127.0.1.1", source="127.0.0.1", interface="lo"),),
    )
    choice = choose(make_manifest(), ("n1", "n2"), {"n1": make_facts("n1"), "n2": lost})
    assert choice.rendezvous is None
    assert choice.settings == {}
    assert choice.problems == {
        "n2": "no address of n1 (10.0.0.1) is reached by all other nodes; here it resolves to 127.0.1.1"
    }


def test_a_node_says_itself_why_it_reaches_nobody(make_manifest, make_facts):
    lost = with_network(make_facts("n2"), routes=(), problem="`n1` does not resolve: Name or service not known")
    choice = choose(make_manifest(), ("n1", "n2"), {"n1": make_facts("n1"), "n2": lost})
    assert choice.problems == {"n2": "`n1` does not resolve: Name or service not known"}


def test_one_address_must_serve_all_nodes(make_manifest, make_facts):
    first = with_network(
        make_facts("n1"),
        interfaces=(
            Interface(name="eth0", addresses=("10.0.0.1",)),
            Interface(name="ib0", addresses=("10.9.0.1",)),
        ),
    )
    both = tuple(Route(target=t, source="10.9.0.2", interface="ib0") for t in ("10.0.0.1", "10.9.0.1"))
    only_ib = (Route(target="10.9.0.1", source="10.9.0.3", interface="hsn0"),)
    facts = {
        "n1": first,
        "n2": with_network(make_facts("n2"), routes=both),
        "n3": with_network(make_facts("n3"), routes=only_ib),
    }
    choice = choose(make_manifest(nodes=3), ("n1", "n2", "n3"), facts)
    assert choice.rendezvous.host == "10.9.0.1"
    assert [values(choice, n)["GLOO_SOCKET_IFNAME"] for n in ("n1", "n2", "n3")] == ["ib0", "ib0", "hsn0"]


def test_ipv6_serves_where_there_is_nothing_else(make_manifest, make_facts):
    first = with_network(make_facts("n1"), interfaces=(Interface(name="eth0", addresses=("fe80::1", "fd00::1")),))
    other = with_network(make_facts("n2"), routes=(Route(target="fd00::1", source="fd00::2", interface="eth0"),))
    choice = choose(make_manifest(), ("n1", "n2"), {"n1": first, "n2": other})
    assert choice.rendezvous.host == "fd00::1"
    assert choice.local_addresses == {"n1": "fd00::1", "n2": "fd00::2"}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "fe80::1", "169.254.1.1", "no address"])
def test_loopback_and_link_local_addresses_are_never_an_endpoint(make_manifest, make_facts, address):
    first = with_network(make_facts("n1"), interfaces=(Interface(name="eth0", addresses=(address,)),))
    other = with_network(make_facts("n2"), routes=(Route(target=address, source=address, interface="lo"),))
    choice = choose(make_manifest(), ("n1", "n2"), {"n1": first, "n2": other})
    assert choice.rendezvous is None
    assert list(choice.problems) == ["n2"]


def test_a_silent_node_leaves_nothing_chosen(make_manifest, make_facts):
    choice = choose(make_manifest(), ("n1", "n2"), {"n1": make_facts("n1")})
    assert choice.rendezvous is None
    assert choice.problems == {"n2": "this node reported no facts"}


def test_a_silent_first_node_leaves_nothing_chosen(make_manifest, make_facts):
    choice = choose(make_manifest(), ("n1", "n2"), {"n2": make_facts("n2")})
    assert (choice.rendezvous, choice.problems) == (None, {"n1": "this node reported no facts"})


def test_without_a_free_port_nothing_is_chosen(make_manifest, make_facts):
    facts = {"n1": with_network(make_facts("n1"), free_port=None), "n2": make_facts("n2")}
    choice = choose(make_manifest(), ("n1", "n2"), facts)
    assert (choice.rendezvous, choice.problems) == (None, {"n1": "no free TCP port for the rendezvous"})


def test_only_the_first_nodes_port_counts(make_manifest, make_facts):
    facts = {"n1": make_facts("n1"), "n2": with_network(make_facts("n2"), free_port=None)}
    assert choose(make_manifest(), ("n1", "n2"), facts).rendezvous.port == 23456


def test_one_node_meets_itself(make_manifest, make_facts):
    alone = with_network(make_facts("n1"), routes=(), problem="`n1` does not resolve")
    choice = choose(make_manifest(nodes=1), ("n1",), {"n1": alone})
    assert choice.rendezvous.host == "127.0.0.1"
    assert setting(choice, "n1", "NCCL_SOCKET_IFNAME").reason == "the job has one node"


def test_emulated_nodes_meet_on_this_machine(make_manifest, make_facts):
    nodes = ("local0", "local1")
    facts = {node: make_facts(node) for node in nodes}
    choice = choose(make_manifest(cluster="local"), nodes, facts)
    assert choice.local_addresses == {"local0": "127.0.0.1", "local1": "127.0.0.1"}
    assert values(choice, "local1")["GLOO_SOCKET_IFNAME"] == "lo"


# -- the variables ------------------------------------------------------------------------


def test_the_users_settings_win_over_the_jobs_and_those_over_detection(make_manifest, make_facts):
    job = tuple(
        Setting(name=name, value="from the job", origin="environment of the job")
        for name in ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_ALGO")
    )
    facts = {"n1": with_network(make_facts("n1"), variables=job), "n2": make_facts("n2")}
    manifest = make_manifest(settings=(Setting(name="NCCL_DEBUG", value="TRACE", origin="--env"),))
    choice = choose(manifest, ("n1", "n2"), facts)
    assert setting(choice, "n1", "NCCL_DEBUG") == Setting(name="NCCL_DEBUG", value="TRACE", origin="--env")
    assert setting(choice, "n1", "NCCL_SOCKET_IFNAME").value == "from the job"
    assert values(choice, "n1")["NCCL_ALGO"] == "from the job"
    assert values(choice, "n2")["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_few_variables_are_set_and_each_has_a_reason(make_manifest, make_facts):
    choice = choose(make_manifest(), ("n1", "n2"), {"n1": make_facts("n1"), "n2": make_facts("n2")})
    assert sorted(values(choice, "n1")) == [
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "PYTHONUNBUFFERED",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
    ]
    assert all(s.reason and s.origin == "detected" for s in choice.settings["n1"])


@pytest.mark.parametrize(
    ("changes", "cpus", "threads", "reason"),
    [
        ({"cpus_per_task": 8, "nproc_per_node": 2}, 64, "4", "8 CPUs for 2 ranks on a node"),
        ({"cpus_per_task": 0, "nproc_per_node": 2}, 64, "32", "64 CPUs for 2 ranks on a node"),
        ({"cpus_per_task": 0, "nproc_per_node": 8}, 4, "1", "4 CPUs for 8 ranks on a node"),
        ({"cpus_per_task": 0, "nproc_per_node": 2}, "many", "1", "1 CPU for 2 ranks on a node"),
        ({"cluster": "local", "cpus_per_task": 0, "nproc_per_node": 2}, 16, "4", "16 CPUs for 4 ranks on this machine"),
    ],
)
def test_the_ranks_share_the_cpus(make_manifest, make_facts, changes, cpus, threads, reason):
    facts = {node: make_facts(node, values={"host.cpus": cpus}) for node in ("n1", "n2")}
    found = setting(choose(make_manifest(**changes), ("n1", "n2"), facts), "n1", "OMP_NUM_THREADS")
    assert (found.value, found.reason) == (threads, reason)


# -- observing ----------------------------------------------------------------------------


def fake(folder, name, program):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{program}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path):
    """A folder in front of PATH for programs that stand for the system's."""
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path / 'bin'}:{before}"
    yield tmp_path / "bin"
    os.environ["PATH"] = before


def test_this_machine_reaches_itself():
    found = network.observe("localhost", {})
    assert "127.0.0.1" in found.first_node_addresses
    assert Route(target="127.0.0.1", source="127.0.0.1", interface="lo") in found.routes
    assert found.problem == ""


def test_tuning_variables_of_the_job_are_noted_and_others_are_not():
    environ = {
        "NCCL_DEBUG": "INFO",
        "GLOO_X": "1",
        "OMP_NUM_THREADS": "3",
        "NCCL": "no",
        "MY_NCCL_X": "no",
        "HOME": "/",
    }
    assert [s.name for s in network.observe("localhost", environ).variables] == [
        "GLOO_X",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
    ]


@pytest.mark.parametrize("name", ["no-such-node.invalid", "x" * 300, "two..dots"])
def test_a_name_that_does_not_resolve_is_told_and_not_raised(name, path):
    fake(path, "scontrol", "exit 1")
    found = network.observe(name, {})
    assert found.routes == ()
    assert found.problem.startswith(f"`{name}` does not resolve: ")


def test_without_dns_slurms_own_address_of_the_node_is_used(path):
    fake(path, "scontrol", 'echo "NodeName=$5 Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=n1"')
    found = network.observe("no-such-node.invalid", {})
    assert (found.first_node_addresses, found.problem) == (("127.0.0.1",), "")


def test_slurms_address_does_not_count_when_it_is_only_a_name(path):
    fake(path, "scontrol", 'echo "NodeName=$5 NodeAddr=other-name"')
    assert network.observe("no-such-node.invalid", {}).first_node_addresses == ()


def test_interface_names_are_the_kernels_also_for_a_half_of_a_veth_pair(path):
    # `ip address` writes eth0@if5; with -j name and link are two keys (iproute2 6.1, seen).
    links = [
        {"ifname": "eth0", "link_index": 5, "addr_info": [{"local": "127.0.0.1"}, {"family": "none"}]},
        {"ifname": "ib0"},
        {},
    ]
    fake(path, "ip", f"echo '{json.dumps(links)}'")
    found = network.observe("127.0.0.1", {})
    assert found.interfaces == (
        Interface(name="eth0", addresses=("127.0.0.1",)),
        Interface(name="ib0", addresses=()),
    )
    assert found.routes[0].interface == "eth0"


@pytest.mark.parametrize("program", ["exit 1", "echo '['", "echo 1", "echo '[1]'"])
def test_without_a_usable_ip_program_the_kernel_is_asked(path, program):
    fake(path, "ip", program)
    found = network.observe("127.0.0.1", {})
    assert Interface(name="lo", addresses=("127.0.0.1",)) in found.interfaces


def test_an_own_address_that_no_interface_has_is_named(path):
    fake(path, "ip", "echo '[]'")
    found = network.observe("127.0.0.1", {})
    assert found.problem == "no route to 127.0.0.1: 127.0.0.1: no interface has the own address 127.0.0.1"


def test_the_port_is_free_and_outside_of_the_ephemeral_range():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    port = network.observe("localhost", {}).free_port
    assert 20000 <= port < 65000
    assert not low <= port <= high or (low, high) == (1024, 65535)
    with socket.socket() as probe:
        probe.bind(("", port))


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_a_port_that_is_taken_in_one_family_is_not_free(family, address):
    with socket.socket(family) as taken:
        if family == socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind((address, 0))
        assert not network.is_free_port(taken.getsockname()[1])
