"""The table: its sources, and what a broken one says."""

import copy
import re

import pytest

from hpcenv.errors import SpecError
from hpcenv.judge.compat import table_file
from hpcenv.judge.compat.compat_table import PACKAGED
from hpcenv.judge.compat.drivers import check_driver
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.project import compatibility, toml_files

TABLE = compatibility.table()

DATA = toml_files.read(PACKAGED, error=SpecError)


def test_every_row_has_a_source_and_a_date():
    def blocks(table):
        yield table
        for value in table.values():
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, dict):
                    yield from blocks(inner)

    dated = [block for block in blocks(DATA) if "source" in block]
    assert len(dated) >= 8
    for block in dated:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", block["retrieved"])
    sources = [TABLE.floors_source, TABLE.packaged_source, TABLE.forward.source]
    sources += [release.source for release in TABLE.torches] + [gpu.source for gpu in TABLE.gpus.values()]
    assert all("read 20" in source for source in sources)


def test_no_package_index_is_named():
    text = PACKAGED.read_text()
    assert "://" not in text
    assert not re.search(r"\b[a-z0-9-]+\.(org|com|io)\b", text)


def test_every_pypi_build_is_among_the_builds():
    for release in TABLE.torches:
        assert release.pypi in release.builds
        assert release.requires_python.startswith(">=3.")
        assert release.aarch64_pypi in (*release.aarch64, "cpu")


def test_every_packaged_driver_is_at_least_the_floor():
    for toolkit, driver in TABLE.packaged.items():
        floor = driver_floor(TABLE, ".".join(map(str, toolkit)))
        assert floor is not None
        if toolkit != (11, 0, 0):  # Update 1 of CUDA 11.0 came with the floor
            assert check_driver(TABLE, floor.cuda, driver).result == "match"


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("schema",), 3, "has schema 3"),
        (("schema",), "2", "`schema`"),
        (("cuda",), None, "`cuda`"),
        (("cuda", "floor", "source"), "", "`cuda.floor.source`"),
        (("cuda", "floor", "retrieved"), None, "`cuda.floor.retrieved`"),
        (("cuda", "floor", "driver", "13"), "new", "`cuda.floor.driver.13`"),
        (("cuda", "packaged", "driver", "thirteen"), "1", "`cuda.packaged.driver.thirteen`"),
        (("cuda", "forward", "package", "13.0"), ["yes"], "`cuda.forward.package.13.0`"),
        (("cuda", "forward", "data-centre-only"), "yes", "`cuda.forward.data-centre-only`"),
        (("torch", "release"), {}, "`torch.release`"),
        (("torch", "release", 0), "2.15", "`torch.release[0]`"),
        (("torch", "release", 1, "builds", "12.6"), "5.0 sm_60", "`torch.release[1].builds.12.6`"),
        (("torch", "release", 1, "pypi"), 13.0, "`torch.release[1].pypi`"),
        (("gpu", "other", "new"), ["RTX"], "`gpu.other.new`"),
        (("gpu", "data-centre", "9.0"), ["H100", 7], "`gpu.data-centre.9.0`"),
        (("gpu", "sm-count", "number", "V100"), True, "`gpu.sm-count.number.V100`"),
        (("gpu", "memory", "gb", "T4"), [], "`gpu.memory.gb.T4`"),
        (("gpu", "memory", "gb", "T4"), [True], "`gpu.memory.gb.T4`"),
        (("gpu", "aarch64", "names"), None, "`gpu.aarch64.names`"),
        (("cuda", "toolkits", "others"), ["new"], "`cuda.toolkits.others`"),
        (("cuda", "capability", "row", "7.0", "first-toolkit"), None, "`cuda.capability.row.7.0.first-toolkit`"),
        (("cuda", "capability", "row", "7.0", "last-driver"), "580.1", "`cuda.capability.row.7.0.last-driver`"),
        (("cuda", "capability", "row", "seven"), {}, "`cuda.capability.row.seven`"),
        (("torch", "release", 0, "python"), ">=3.11", "`torch.release[0].python`"),
        (("torch", "release", 0, "uploaded"), "yesterday", "`torch.release[0].uploaded`"),
        (("torch", "release", 0, "cudnn"), "9.26.0.51", "`torch.release[0].cudnn`"),
        (("torch", "release", 0, "aarch64"), None, "`torch.release[0].aarch64`"),
        (("pair", "torchvision", "torch", "0.24.0"), "2.9.0", "`pair.torchvision.torch.0.24.0`"),
        (("pair", "torchaudio", "doubt", "2.11.0"), {"torch": ">=2.15"}, "`pair.torchaudio.doubt.2.11.0.why`"),
    ],
)
def test_a_broken_table_names_file_and_key(path, value, key):
    data = copy.deepcopy(DATA)
    *tables, last = path
    table = data
    for one in tables:
        table = table[one]
    if value is None:
        del table[last]
    else:
        table[last] = value

    with pytest.raises(SpecError) as error:
        table_file.parse(data, origin="mine.toml")
    assert "`mine.toml`" in error.value.what
    assert key in error.value.what


def test_another_table_takes_the_place_of_the_packaged_one():
    data = copy.deepcopy(DATA)
    data["cuda"]["floor"]["driver"]["14"] = "700.10"

    assert check_driver(TABLE, "14.0", "700.20").result == "unknown"
    assert check_driver(table_file.parse(data), "14.0", "700.20").result == "match"
