"""Lines of NCCL's log in, the transport out."""

from __future__ import annotations

import pytest

from hpcenv.judge.smoke.nccl_log import fits, has_diagnostics, read_diagnostics, read_transport
from hpcenv.records.smoke import NcclTransport

INFINIBAND = """\
gpu1:4021:4021 [0] NCCL INFO NCCL version 2.27.3+cuda12.8
gpu1:4021:4060 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eno1:10.2.0.11<0>
gpu1:4021:4060 [0] NCCL INFO Using network IB
gpu1:4021:4060 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
gpu1:4021:4060 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels
gpu1:4021:4070 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
gpu1:4021:4070 [0] NCCL INFO Channel 01/0 : 8[0] -> 0[0] [receive] via NET/IB/1/GDRDMA
gpu1:4021:4070 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
LIBFABRIC = """\
nid1:1:9 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
nid1:1:9 [0] NCCL INFO Using network AWS Libfabric
nid1:1:9 [0] NCCL INFO Channel 00/0 : 4[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
"""
SOCKET = """\
n1:1:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
n1:1:9 [0] NCCL INFO Using network Socket
n1:1:9 [0] NCCL INFO Channel 00 : 1[0] -> 0[0] [receive] via NET/Socket/0 comm 0x7f00 nRanks 02
n1:1:9 [0] misc/socket.cc:46 NCCL WARN socketProgress: Connection closed
"""


def test_infiniband() -> None:
    assert read_transport(INFINIBAND.splitlines()) == NcclTransport(
        version="2.27.3+cuda12.8",
        network="IB",
        adapters=("mlx5_0:1/IB", "mlx5_1:1/IB"),
        via={"NET/IB": 2, "P2P/CUMEM": 1},
        gpudirect=True,
        channels=16,
        nvls="yes",
    )


def test_a_name_with_a_blank_and_its_provider() -> None:
    found = read_transport(LIBFABRIC.splitlines())
    assert (found.network, found.adapters, found.via) == ("AWS Libfabric", ("cxi",), {"NET/AWS Libfabric": 1})


def test_sockets_and_warnings() -> None:
    found = read_transport(SOCKET.splitlines())
    assert (found.network, found.adapters, found.via) == ("Socket", ("eth0",), {"NET/Socket": 1})
    assert found.errors == ("socketProgress: Connection closed",)


@pytest.mark.parametrize(
    ("network", "profile", "wanted", "fit"),
    [
        ("IB", "ib", "", True),
        ("IBext_v10", "roce2", "", True),
        ("Socket", "ib", "", False),
        ("Socket", "tcp", "", True),
        ("Socket", "ib", "Socket", True),
        ("Libfabric", "efa", "AWS Libfabric", True),
        ("Socket", "slingshot", "AWS Libfabric", False),
        ("", "efa", "", False),
    ],
)
def test_what_fits_a_decision(network: str, profile: str, wanted: str, fit: bool) -> None:
    assert fits(NcclTransport(network=network), profile=profile, wanted=wanted)[0] is fit


# The text of NVIDIA/nccl 031c305, troubleshooting/diagnostics.rst, behind the prefix that torchrun gives it.
DIAGNOSTICS = """\
[0] NCCL DIAG === NCCL Diagnostics ===
[0] NCCL DIAG [OK]   p2p: verified P2P access in both directions between every GPU pair (56 peer accesses)
[0] NCCL DIAG [INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification
[0] NCCL DIAG [INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification
[0] NCCL DIAG [INFO] env: NCCL_DEBUG_FILE differs between ranks
[0] NCCL DIAG NCCL diagnostics completed in 245.3 ms across 8 ranks
"""


def test_nccls_own_diagnostics() -> None:
    assert read_diagnostics(DIAGNOSTICS.splitlines()) == (
        "[OK] p2p: verified P2P access in both directions between every GPU pair (56 peer accesses)",
        "[INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification",
    )
    assert [has_diagnostics(version) for version in ("2.30.7", "2.31.0", "2.32.3", "3.0", "")] == [
        False, True, True, True, False,
    ]  # fmt: skip
