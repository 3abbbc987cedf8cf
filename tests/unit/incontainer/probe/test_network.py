"""What NCCL would use of the image: the files that the loader finds, and variables that no library reads."""

from __future__ import annotations

from pathlib import Path

from probe_world import Venv
from torch_world import ANSWERS, build_library, install_cuda_torch, install_torch

READS = 'const char *names[] = {"NCCL_DEBUG", "NCCL_IB_HCA"};'


def with_nccl(env: Venv, body: str = READS) -> None:
    name = "nccl/lib/libnccl.so.2"
    install_cuda_torch(env, answers={**ANSWERS, name: ANSWERS[name] + body})


def test_torch_without_nccl_needs_none_of_it(env: Venv) -> None:
    install_torch(env)
    assert "network" not in env.probe()


def test_without_verbs_libfabric_and_plugin_they_are_absent(env: Venv, tmp_path: Path) -> None:
    with_nccl(env)
    found = env.probe(LD_LIBRARY_PATH=str(tmp_path))["network"]
    assert (found["plugin"], found["plugin-version"], found["unread"]) == ("", "", [])


def test_the_plugin_that_the_loader_finds_first_counts(env: Venv, tmp_path: Path) -> None:
    with_nccl(env)
    for folder, version in (("first", "1.8.1-aws"), ("second", "1.18.0")):
        body = f'const char *hello(void) {{ return "Initializing aws-ofi-nccl {version}"; }}'
        build_library(tmp_path / folder / "libnccl-net.so", body)
    build_library(tmp_path / "second" / "libnccl-net-other.so")
    build_library(tmp_path / "first" / "libfabric.so.1")
    build_library(tmp_path / "first" / "libibverbs.so.1")
    (tmp_path / "first/libibverbs").mkdir()
    (tmp_path / "first/libibverbs/libmlx5-rdmav34.so").touch()
    path = f"{tmp_path}/first:{tmp_path}/second"
    found = env.probe(LD_LIBRARY_PATH=path)["network"]
    assert found["plugin"] == str(tmp_path / "first/libnccl-net.so")
    assert found["plugin-version"] == "1.8.1-aws"
    assert found["libfabric"] == str(tmp_path / "first/libfabric.so.1")
    assert (found["verbs"], found["providers"]) == (str(tmp_path / "first/libibverbs.so.1"), 1)
    assert found["other-plugins"] == [f"{tmp_path}/second/libnccl-net.so (aws-ofi-nccl 1.18.0)"]
    (tmp_path / "third").symlink_to(tmp_path / "first")
    assert env.probe(LD_LIBRARY_PATH=f"{tmp_path}/third:{tmp_path}/first")["network"]["other-plugins"] == []
    named = env.probe(LD_LIBRARY_PATH=path, NCCL_NET_PLUGIN="other")["network"]
    assert named["plugin"] == str(tmp_path / "second/libnccl-net-other.so")


def test_a_variable_that_no_library_reads_is_named(env: Venv) -> None:
    with_nccl(env)
    given = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "NCCL_IB_CUDA_SUPPORT": "1", "NCCL_IB": "1", "MY_NCCL_X": "1"}
    # NCCL_IB is only the beginning of a name that is read.
    assert env.probe(**given)["network"]["unread"] == ["NCCL_IB", "NCCL_IB_CUDA_SUPPORT"]


def test_a_name_that_the_plugin_or_torch_reads_is_alive(env: Venv, tmp_path: Path) -> None:
    with_nccl(env)
    build_library(tmp_path / "libnccl-net.so", 'const char *name(void) { return "NCCL_OF_PLUGIN"; }')
    found = env.probe(LD_LIBRARY_PATH=str(tmp_path), NCCL_OF_PLUGIN="1", NCCL_OF_NO_LIBRARY="1")
    assert found["network"]["unread"] == ["NCCL_OF_NO_LIBRARY"]


def test_a_library_that_cannot_be_searched_may_read_everything(env: Venv) -> None:
    with_nccl(env)
    path = env.site / "nvidia/nccl/lib/libnccl.so.2"
    content = bytearray(path.read_bytes())
    content[60:62] = b"\0\0"  # no section headers, as after `sstrip`
    path.write_bytes(bytes(content))
    assert env.probe(NCCL_IB_CUDA_SUPPORT="1")["network"]["unread"] == []
