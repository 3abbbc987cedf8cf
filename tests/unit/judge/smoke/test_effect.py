"""Settings beside NCCL's log and the libraries that a rank loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch_world import build_library

from hpcenv.incontainer.smoke import nccl_libraries
from hpcenv.judge.smoke.effect import ignored
from hpcenv.judge.smoke.nccl_log import read_transport
from hpcenv.records.smoke import SmokeRank

LOG = """\
n1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eno1:10.2.0.11<0>
n1:1:2 [0] NCCL INFO Using network IB
n1:1:2 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer
"""
OFI = "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
RANK = SmokeRank(rank=0, transport=read_transport(LOG.splitlines()), libraries=("/env/libnccl.so.2", OFI))


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("NCCL_MIN_NCHANNELS", "16", None),
        ("NCCL_MIN_CTAS", "32", ("at least 32 channels", "16 channels")),
        ("NCCL_MAX_NCHANNELS", "8", ("at most 8 channels", "16 channels")),
        ("NCCL_MAX_CTAS", "no number", None),
        ("NCCL_IB_HCA", "mlx5", None),
        ("NCCL_IB_HCA", "=mlx5_0:1", ("adapters =mlx5_0:1", "mlx5_1:1/IB")),
        ("NCCL_IB_HCA", "^mlx5_1", ("adapters ^mlx5_1", "mlx5_1:1/IB")),
        ("NCCL_NET_PLUGIN", "ofi", None),
        ("NCCL_NET_PLUGIN", OFI, None),
        ("NCCL_NET_PLUGIN", "spcx", ("plugin libnccl-net-spcx.so", OFI)),
        ("NCCL_NET_PLUGIN", "none", None),
    ],
)
def test_a_setting_that_nccl_ignored_is_named(name: str, value: str, found: tuple[str, str] | None) -> None:
    expected = [] if found is None else [(f"{name}={value}", *found)]
    assert list(ignored({name: value}, RANK)) == expected


def test_what_cannot_be_read_back_is_not_ignored() -> None:
    settings = {"NCCL_MIN_CTAS": "32", "NCCL_IB_HCA": "mlx5_7", "NCCL_NET_PLUGIN": "ofi"}
    assert list(ignored(settings, SmokeRank(rank=0))) == []


def test_a_rank_knows_the_plugin_that_it_loaded(tmp_path: Path) -> None:
    plugin = build_library(tmp_path / "libnccl-net-mine.so")
    script = (
        "import ctypes, sys; sys.path.insert(0, sys.argv[2]); ctypes.CDLL(sys.argv[1]);"
        "from hpcenv.incontainer.smoke import nccl_libraries; print(chr(10).join(nccl_libraries()))"
    )

    root = str(Path(__file__).resolve().parents[4])
    done = subprocess.run([sys.executable, "-c", script, str(plugin), root], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(plugin)]
    assert str(plugin) not in nccl_libraries()
