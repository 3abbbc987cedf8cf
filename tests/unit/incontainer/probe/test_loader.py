"""Which file the dynamic loader takes."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
from probe_world import SITE, Venv
from torch_world import build_library, install_cuda_torch


def really_mapped(env: Venv, stem: str, **variables: str) -> list[str]:
    """What the real dynamic loader maps when torch's stubs are opened in torch's order."""
    code = (
        "import ctypes, glob, sys\n"
        "ctypes.CDLL(sys.argv[1] + '/lib/libtorch_global_deps.so')\n"
        "ctypes.CDLL(glob.glob(sys.argv[1] + '/_C.*.so')[0])\n"
        "print({l.split()[-1] for l in open('/proc/self/maps') if sys.argv[2] in l})"
    )
    done = subprocess.run(
        [env.path / "bin/python3", "-c", code, env.site / "torch", stem],
        capture_output=True,
        text=True,
        check=True,
        env=variables,
        timeout=60,
    )
    return sorted(ast.literal_eval(done.stdout))


@pytest.mark.parametrize(("tags", "wins"), [("--disable-new-dtags", "prefix"), ("--enable-new-dtags", "other")])
def test_ld_library_path_shadows_a_library_exactly_when_the_loader_lets_it(
    env: Venv, tmp_path: Path, tags: str, wins: str
) -> None:
    install_cuda_torch(env, tags=tags)
    shadow = build_library(tmp_path / "module/libnccl.so.2", "int ncclGetVersion(int *v) { *v = 22203; return 0; }")
    found = env.probe(LD_LIBRARY_PATH=f"{tmp_path}/none:{shadow.parent}")["values"]
    place = {"prefix": f"prefix:{SITE}/nvidia/nccl/lib/libnccl.so.2", "other": f"other:{shadow}"}
    real = {"prefix": str(env.site / "nvidia/nccl/lib/libnccl.so.2"), "other": str(shadow)}
    assert found["libs.nccl.origin"] == place[wins]
    assert found["libs.nccl.version"] == {"prefix": "2.29.7", "other": "2.22.3"}[wins]
    mapped = really_mapped(env, "libnccl", LD_LIBRARY_PATH=f"{tmp_path}/none:{shadow.parent}")
    assert [os.path.normpath(p) for p in mapped] == [real[wins]]
    assert found["libs.ld-library-path"] == [f"{tmp_path}/none", str(shadow.parent)]
    assert env.probe()["values"]["libs.nccl.origin"] == place["prefix"]


def test_ld_preload_is_noted_and_wins(env: Venv, tmp_path: Path) -> None:
    install_cuda_torch(env)
    shadow = build_library(tmp_path / "libnccl.so.2", "int ncclGetVersion(int *v) { *v = 22203; return 0; }")
    found = env.probe(LD_PRELOAD=str(shadow))["values"]
    assert found["libs.nccl.origin"] == f"other:{shadow}" and found["libs.ld-preload"][0].startswith(f"{shadow} ")
    assert really_mapped(env, "libnccl", LD_PRELOAD=str(shadow)) == [str(shadow)]


LDCONFIG = "/sbin/ldconfig"


@pytest.mark.skipif(not os.path.exists(LDCONFIG), reason="NOT TESTED: no ldconfig here")
def test_the_folders_that_apptainer_1_5_lists_say_nothing_about_the_environment(env: Venv) -> None:
    """With --nv: `ldconfig -Nv` of the image, then the node's libraries. Apptainer 1.4 has the latter alone."""
    said = subprocess.run([LDCONFIG, "-Nv"], capture_output=True, text=True, check=True).stdout
    listed = [line.partition(":")[0] for line in said.splitlines() if line.startswith("/")]
    own = "/.singularity.d/libs"
    folders = {
        "1.5": [*listed, own],
        "1.4": [own],
        "of the image": ["/usr/local/lib", own],
        "of the user": ["/mine", *listed, own],
        "of the host": listed,
    }
    found = {who: env.probe(LD_LIBRARY_PATH=":".join(some))["values"] for who, some in folders.items()}
    assert found["1.5"]["libs.ld-library-path"] == found["1.4"]["libs.ld-library-path"] == [own]
    for who in ("of the image", "of the user", "of the host"):
        assert found[who]["libs.ld-library-path"] == folders[who], who
