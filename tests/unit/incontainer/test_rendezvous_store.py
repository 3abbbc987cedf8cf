"""The node with the store ends last: which node that is, and who is still connected."""

import subprocess
import sys
import time

import pytest

from hpcenv.incontainer import rendezvous_store
from hpcenv.incontainer.rendezvous_store import count_others, endpoint_hosted_here, wait_for_others

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
LISTEN = "0A"
ESTABLISHED = "01"
CLOSE_WAIT = "08"
PORT = 0x7531
N1, N2 = "0BFD7D0A", "0CFD7D0A"
MAPPED = "0000000000000000FFFF0000"


def words(**changed):
    options = {"nnodes": "2", "rdzv_endpoint": "n1:29500", "rdzv_conf": "is_host=1", **changed}
    return [f"--{name}={value}" for name, value in options.items()] + ["--", "train.py", "--nnodes=1"]


@pytest.mark.parametrize(
    ("changed", "endpoint"),
    [
        ({}, ("n1", 29500)),
        ({"rdzv_endpoint": "[fe80::1]:29500"}, ("fe80::1", 29500)),
        ({"rdzv_conf": "is_host=0"}, None),
        ({"nnodes": "1"}, None),
        ({"rdzv_endpoint": "localhost:0"}, None),
    ],
)
def test_only_the_node_that_others_connect_to_has_to_wait(changed, endpoint):
    assert endpoint_hosted_here(words(**changed)) == endpoint


@pytest.fixture
def connections(tmp_path):
    """Writes what the kernel says of this machine's connections: (local, peer, state)."""

    def write(*rows, six=()):
        for name, lines in (("tcp", rows), ("tcp6", six)):
            text = [HEADER, *(f"   {n}: {own} {peer} {state} 0" for n, (own, peer, state) in enumerate(lines))]
            (tmp_path / name).write_text("\n".join(text) + "\n")
        return str(tmp_path)

    return write


def test_a_connection_of_another_node_counts_and_our_own_do_not(connections):
    own = ((f"{N1}:7531", f"{N1}:C001", ESTABLISHED), (f"{N1}:C001", f"{N1}:7531", ESTABLISHED))
    assert count_others(PORT, connections(*own)) == 0
    others = ((f"{N1}:7531", f"{N2}:C002", ESTABLISHED), (f"{N1}:7531", f"{N2}:C003", ESTABLISHED))
    assert count_others(PORT, connections(*own, *others)) == 2
    gone = ((f"{N1}:7531", f"{N2}:C002", CLOSE_WAIT), ("00000000:7531", "00000000:0000", LISTEN))
    elsewhere = ((f"{N1}:0016", f"{N2}:C004", ESTABLISHED),)
    assert count_others(PORT, connections(*own, *gone, *elsewhere)) == 0


def test_a_server_for_both_kinds_of_addresses_lists_ipv4_in_ipv6_form(connections):
    client = (f"{N1}:C001", f"{N1}:7531", ESTABLISHED)
    server = (f"{MAPPED}{N1}:7531", f"{MAPPED}{N1}:C001", ESTABLISHED)
    other = (f"{MAPPED}{N1}:7531", f"{MAPPED}{N2}:C001", ESTABLISHED)
    assert count_others(PORT, connections(client, six=[server])) == 0
    assert count_others(PORT, connections(client, six=[server, other])) == 1


ON_ONE_MACHINE = """
import datetime, os, subprocess, sys, time, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import rendezvous_store
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
mine = dist.TCPStore("127.0.0.1", store.port, is_master=False)
print(rendezvous_store.wait_for_others("127.0.0.1", store.port, 0, lambda: False))
other = subprocess.Popen([sys.executable, "-c", "import sys, time, torch.distributed as dist\\n"
    "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False)\\nprint(flush=True)\\ntime.sleep(2)",
    str(store.port)], stdout=subprocess.PIPE)
other.stdout.readline()
began = time.monotonic()
print(rendezvous_store.wait_for_others("127.0.0.1", store.port, 0, lambda: False))
print(rendezvous_store.wait_for_others("n1", store.port, 0, lambda: False))
print(rendezvous_store.wait_for_others("127.0.0.1", store.port, None, lambda: False), time.monotonic() - began > 1)
"""


def test_where_nodes_are_emulated_the_other_processes_of_this_machine_count():
    pytest.importorskip("torch")
    folder = rendezvous_store.__file__.rpartition("/")[0]
    argv = [sys.executable, "-c", ON_ONE_MACHINE, folder]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said.split() == ["True", "False", "True", "True", "True"]


def test_connections_that_cannot_be_read_are_not_waited_for(tmp_path):
    assert count_others(PORT, str(tmp_path)) is None


SERVE = """
import datetime, socket, sys, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import rendezvous_store
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
held = rendezvous_store.hold("localhost", port)
# As torchrun: its own store, which is gone when its work is done.
store = dist.TCPStore("localhost", port, is_master=True, multi_tenant=True)
store.set("ended", "no")
del store
left = dist.TCPStore("localhost", port, is_master=False, timeout=datetime.timedelta(seconds=10))
print(left.get("ended").decode(), rendezvous_store.hold("localhost", port) is not None)
"""


def test_the_store_outlives_torchrun():
    pytest.importorskip("torch")
    folder = rendezvous_store.__file__.rpartition("/")[0]
    argv = [sys.executable, "-c", SERVE, folder]
    assert subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout == "no True\n"


OLD = """
import datetime, socket, sys, torch.distributed as dist
import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend as backend
sys.path.insert(0, sys.argv[1])
import rendezvous_store

def start_as_torch_2_1_2_does(params):
    host, port = params
    return dist.TCPStore(host, port, is_master=True, timeout=datetime.timedelta(seconds=60))

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
backend._create_tcp_store = start_as_torch_2_1_2_does
held = rendezvous_store.hold("localhost", port)
store = backend._create_tcp_store(("localhost", port))
store.set("ended", "no")
del store
left = dist.TCPStore("localhost", port, is_master=False, timeout=datetime.timedelta(seconds=10))
print(left.get("ended").decode(), held is not None)
"""


def test_the_store_of_an_older_torchrun_outlives_it_too():
    """It starts a store that is not shared: the port must be free until then."""
    pytest.importorskip("torch")
    folder = rendezvous_store.__file__.rpartition("/")[0]
    argv = [sys.executable, "-c", OLD, folder]
    assert subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout == "no True\n"


def test_nobody_is_waited_for_when_nobody_is_connected():
    started = time.monotonic()
    assert wait_for_others("n1", 1, None, lambda: False)
    assert time.monotonic() - started < 5
