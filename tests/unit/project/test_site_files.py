"""Site profiles on disk: data from somebody, read with care."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import FileUnusable, HpcenvError, SpecError
from hpcenv.project import site_files
from hpcenv.project.site import profile

FULL = """\
name = "jura"
modules = ["gcc/13", "apptainer@1.4"]
apptainer = "/opt/apptainer/bin/apptainer"
accounting = false
[match]
cluster = "Jura"
[submit]
gpu-request = "gres"
gpu-type = "h100"
cpus-per-gpu = 16
time = "1:00:00"
[[bind]]
source = "/scratch"
read-only = true
[env.NCCL_NET]
value = "IB"
reason = "no silent TCP"
source = "ticket 4"
date = 2026-11-20
min-nodes = 2
[slurm]
version = "24.11.5"
[[slurm.partition]]
name = "gpu"
"""


def written(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "sites" / "jura.toml"
    path.parent.mkdir(exist_ok=True, mode=0o755)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_a_profile_is_read_whole(tmp_path: Path) -> None:
    site, refusal = site_files.read(written(tmp_path, FULL))
    assert refusal is None
    found = profile(site, "x")
    assert found.defaults == {"gpu_request": "gres", "gpu_type": "h100", "cpus_per_gpu": 16, "time": "1:00:00"}
    assert (found.modules, found.apptainer, found.accounting) == (("gcc/13", "apptainer@1.4"), site.apptainer, False)
    assert [(b.source, b.target, b.read_only) for b in found.binds] == [("/scratch", "/scratch", True)]
    assert found.for_nodes(1).settings == ()
    (setting,) = found.for_nodes(2).settings
    assert (setting.name, setting.value, setting.origin) == ("NCCL_NET", "IB", "site profile jura")
    assert setting.reason == "no silent TCP (ticket 4, 2026-11-20)"
    assert found.slurm is not None and found.slurm.partition[0].name == "gpu"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('name = "x"\n[submit]\npartitoin = "a"\n', "unknown key `submit.partitoin`, perhaps you meant `partition`"),
        ('name = "x"\npartition = "a"\n', "unknown key `partition`, it belongs under [submit]"),
        ('name = "../x"\n', "`name` = '../x'"),
        ('name = "x"\nmodules = ["a; rm -rf /"]\n', "is not the name of a module"),
        ('name = "x"\nmodules = ["-u"]\n', "is not the name of a module"),
        ('name = "x"\napptainer = "bin/apptainer"\n', "absolute path"),
        ('name = "x"\n[submit]\npartition = "a b"\n', "one word"),
        ('name = "x"\n[submit]\ngpu-request = "gers"\n', "'gpus-per-node' or 'gres'"),
        ('name = "x"\n[env]\nA = "1"\n', "`env.A`"),
        ('name = "x"\n[env."A B"]\nvalue = "1"\nreason = "r"\n', "is not a variable name"),
        ('name = "x"\n[[bind]]\nsource = "data"\n', "absolute path"),
        ("", "`name` is missing"),
        ("name = ", "is not TOML"),
        (b"\xff\xfe", "is not UTF-8"),
        ("#" * 300_000, "more than 256 KiB"),
    ],
)  # fmt: skip
def test_what_is_no_profile(tmp_path: Path, text: str | bytes, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        site_files.read(written(tmp_path, text))
    assert why in str(caught.value)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_profile_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = written(tmp_path_factory.mktemp("x"), content)
    try:
        site_files.read(path)
    except HpcenvError as error:
        assert str(path) in error.what


@pytest.mark.parametrize(("mode", "who"), [(0o602, "all users"), (0o666, "all users")])
def test_a_profile_that_others_could_change(tmp_path: Path, mode: int, who: str) -> None:
    path = written(tmp_path, FULL, mode)
    site, refusal = site_files.read(path)
    assert site.name == "jura"
    assert isinstance(refusal, FileUnusable)
    assert who in str(refusal.why)
    assert refusal.hint == f"chmod o-w {path}"


def test_a_profile_in_a_folder_that_others_could_change(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    path.parent.chmod(0o777)
    assert "all users can write to its folder" in str(site_files.read(path)[1])
    path.parent.chmod(0o1777)
    assert site_files.read(path)[1] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_profile_of_somebody_else(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    os.chown(path, 4242, -1)
    assert "belongs to `4242`" in str(site_files.read(path)[1])
    os.chown(path, 0, 4242)
    path.chmod(0o660)
    assert "a group can write" in str(site_files.read(path)[1])


def test_a_pipe_in_its_place_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.toml")
    with pytest.raises(FileUnusable, match="is not a file"):
        site_files.read(tmp_path / "x.toml")


def test_where_profiles_are_looked_for(tmp_path: Path) -> None:
    environ = {"HOME": "/h", "XDG_CONFIG_DIRS": "/etc/xdg:relative"}
    assert [str(folder) for folder in site_files.folders(tmp_path, environ)] == [
        f"{tmp_path}/sites", "/h/.config/hpcenv/sites", "/etc/xdg/hpcenv/sites", "/etc/hpcenv/sites",
    ]  # fmt: skip
    assert str(site_files.user_folder({"XDG_CONFIG_HOME": "/c"})) == "/c/hpcenv/sites"
    assert str(site_files.user_folder({"HOME": "/h", "XDG_CONFIG_HOME": "c"})) == "/h/.config/hpcenv/sites"


def test_every_example_that_is_shipped_is_dated_and_matches_nothing() -> None:
    paths = site_files.in_folder(site_files.shipped())
    assert len(paths) >= 3
    for path in paths:
        site, _ = site_files.read(path)
        assert site.name == path.stem
        assert site.match is None
        assert site.env and all(table.source and table.date for table in site.env.values())
