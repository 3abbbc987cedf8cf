"""Site profiles on disk: data from somebody, read with care."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import FileUnusable, HpcenvError, SpecError
from hpcenv.project import site_files
from hpcenv.project.site import SlurmTable
from hpcenv.project.site_option_types import SiteSubmitTable
from hpcenv.project.site_page import page
from hpcenv.project.site_profile import profile
from hpcenv.project.site_when import RunFacts

FULL = """\
name = "jura"
modules = ["gcc/13", "apptainer@1.4"]
[match]
cluster = "Jura"
[submit]
gpu-request = "gres"
gpu-type = "h100"
cpus = 16
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
[runtime]
kind = "singularity"
program = "/opt/ce/singularity"
reason = "SIFs run with it"
[store]
folder = "${SCRATCH}/${user}/images"
reason = "homes are small"
[entry-wrapper]
command = ["/host/adapt.sh", "--quiet"]
reason = "the host's fabric"
when = { nodes = ">=2" }
[[slurm.partition]]
name = "gpu"
default = true
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
    assert found.defaults == {"gpu_request": "gres", "gpu_type": "h100", "cpus": 16, "time": "1:00:00"}
    assert (found.modules, found.program) == (("gcc/13", "apptainer@1.4"), "/opt/ce/singularity")
    one, two = (found.for_run(RunFacts(nodes=nodes)) for nodes in (1, 2))
    assert [(b.source, b.target, b.read_only, b.origin) for b in one.binds] == [
        ("/scratch", "/scratch", True, "site profile jura")
    ]
    assert ("store", "${SCRATCH}/${user}/images") in [(value.kind, value.value) for value in one.used]
    assert (one.entry_wrapper, two.entry_wrapper) == ((), ("/host/adapt.sh", "--quiet"))
    assert one.settings == ()
    (setting,) = two.settings
    assert (setting.name, setting.value, setting.origin) == ("NCCL_NET", "IB", "site profile jura")
    assert setting.reason == "no silent TCP (ticket 4, of 2026-11-20)"
    assert found.default_partition == "gpu"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('name = "x"\n[submit]\npartitoin = "a"\n', "unknown key `submit.partitoin`, perhaps you meant `partition`"),
        ('name = "x"\npartition = "a"\n', "unknown key `partition`, it belongs under [submit]"),
        ('name = "../x"\n', "`name` = '../x'"),
        ('name = "x"\nmodules = ["a; rm -rf /"]\n', "is not the name of a module"),
        ('name = "x"\nmodules = ["-u"]\n', "is not the name of a module"),
        ('name = "x"\n[runtime]\nkind = "apptainer"\nprogram = "bin/apptainer"\nreason = "r"\n', "absolute path"),
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
    environ = {"HOME": "/h", "XDG_CONFIG_DIRS": "/etc/xdg:relative", "HPCENV_SITES": "/sw/sites:relative"}
    assert [str(folder) for folder in site_files.folders(tmp_path, environ)] == [
        "/h/.config/hpcenv/sites", f"{tmp_path}/sites", "/etc/xdg/hpcenv/sites", "/etc/hpcenv/sites", "/sw/sites",
    ]  # fmt: skip
    assert str(site_files.user_folder({"XDG_CONFIG_HOME": "/c"})) == "/c/hpcenv/sites"
    assert str(site_files.user_folder({"HOME": "/h", "XDG_CONFIG_HOME": "c"})) == "/h/.config/hpcenv/sites"


# -- the profiles that hpcenv ships -------------------------------------------------------

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "sites"
NVIDIA = RunFacts(nodes=1, gpu_vendor="nvidia", nccl="2.28.9", rocm="none")
AMD = RunFacts(nodes=1, gpu_vendor="amd", rocm="7.0.2")
RUNS = {"frontier": AMD, "lumi": AMD, "snellius": replace(NVIDIA, partition="gpu_h100")}
SHIPPED = site_files.in_folder(site_files.shipped())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_value_that_is_shipped_has_a_source_with_dates(path: Path) -> None:
    site, _ = site_files.read(path)
    assert (site.name, site.match) == (path.stem, None)
    # These keys cannot say where they come from.
    plain = (site.modules, site.module_use, site.sbatch, site.srun, site.slurm, site.submit)
    assert plain == ((), (), {}, {}, SlurmTable(), SiteSubmitTable())
    found = list(site.sourced())
    assert found
    for what, value in found:
        source = site.source_of(value)
        assert value.reason and value.cited in site.source, what
        assert source and source.page and source.version and source.date and source.checked, what
        assert source.date <= source.checked, what
    assert set(site.source) == {value.cited for _, value in found}


def test_the_page_of_values_has_every_value_that_is_shipped() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "site-profiles.md").read_text()
    rows = [tuple(cell.strip(" `") for cell in line.split("|")[1:4]) for line in text.splitlines() if " | `" in line]
    shipped = []
    for path in SHIPPED:
        site, _ = site_files.read(path)
        for what, value in site.sourced():
            keys = ("value", "folder", "kind", "host", "name")
            shown = next(str(getattr(value, key)) for key in keys if getattr(value, key, None))
            shipped.append((site.name, what, shown))

    assert rows == shipped


def test_frontier_loads_the_plugin_that_its_nccl_net_asks_for() -> None:
    site, _ = site_files.read(next(path for path in SHIPPED if path.stem == "frontier"))
    found = profile(site, "frontier")
    one, two = (found.for_run(replace(AMD, nodes=nodes)) for nodes in (1, 2))
    net = [{setting.name: setting.value for setting in run.settings}["NCCL_NET"] for run in (one, two)]

    assert net == ["Socket", "OFI"]
    assert two.modules == (*one.modules, "rocm", "rccl-net-plugin")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_site_where_hpcenv_starts_no_sif_says_that_first(path: Path) -> None:
    site, _ = site_files.read(path)
    if profile(site, str(path)).no_runtime:
        assert "hpcenv can" in site.notes[0]


def test_all_systems_that_the_documentation_names_are_there() -> None:
    assert [path.stem for path in SHIPPED] == [
        "alps", "frontier", "isambard-ai", "jupiter", "juwels", "leonardo", "lumi", "marenostrum5", "polaris",
        "slingshot", "snellius",
    ]  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_golden_page_of_what_a_shipped_profile_gives(path: Path, nodes: int) -> None:
    site, _ = site_files.read(path)
    text = page(profile(site, path.name).for_run(replace(RUNS.get(path.stem, NVIDIA), nodes=nodes), user="ann"))
    golden = GOLDEN / f"{path.stem}-{nodes}.txt"
    if os.environ.get("HPCENV_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), "HPCENV_UPDATE_GOLDEN=1 pytest tests/unit/project/test_site_files.py"
