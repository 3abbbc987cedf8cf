"""conda-lock.yml: real files, categories, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins.formats import read_pins
from hpcenv.locking.pins.pin import PinSource, marker_environment

FILES = Path(__file__).parents[3] / "pin_files"


def read(path, machine="x86_64"):
    environment = marker_environment({"python.version": "3.10.1", "system.machine": machine})
    return read_pins(PinSource(path=Path(path)), environment=environment)


def test_a_real_file_with_pip():
    pins = read(FILES / "conda-lock-pip.yml")
    assert [sum(pin.manager == kind for pin in pins) for kind in ("conda", "pypi")] == [24, 4]
    [python] = [pin for pin in pins if pin.name == "python"]
    assert python.build.endswith("_cpython") and [one.partition(":")[0] for one in python.hashes] == ["sha256", "md5"]
    requests = next(pin for pin in pins if pin.manager == "pypi")
    assert requests.files and requests.hashes[0] == f"sha256:{requests.files[0][1]}"


@pytest.mark.parametrize(
    ("chosen", "categories"),
    [("", {"main"}), ("#dev", {"main", "dev"}), ("#dev,test", {"main", "dev", "test"}), ("#main", {"main"})],
)
def test_categories_decide_what_must_be_installed(chosen, categories):
    import yaml

    path = FILES / "conda-lock-categories.yml"
    entries = yaml.safe_load(path.read_text())["package"]
    expected = {entry["name"] for entry in entries if entry["category"] in categories}
    pins = read(f"{path}{chosen}")
    assert {pin.name for pin in pins if pin.required} == expected
    assert {pin.name for pin in pins} == {entry["name"] for entry in entries}


PACKAGE = """version: 1
metadata: {platforms: [linux-64]}
package:
- name: cudnn
  version: '9.1'
  manager: conda
  platform: linux-64
  url: https://example.invalid/c/linux-64/cudnn-9.1-h0_0.conda
  hash:
    md5: 0123456789abcdef0123456789abcdef
  optional: false
"""


@pytest.mark.parametrize(
    ("old", "new", "what", "why"),
    [
        ("version: 1\n", "version: 2\n", "a conda-lock.yml of version 2", "reads version 1"),
        ("    md5: 0123456789abcdef0123456789abcdef", "    md5: ''", "no hash of `cudnn`", "neither"),
        ("manager: conda", "manager: brew", "that hpcenv can read", "'brew'"),
        ("  manager: conda\n", "", "that hpcenv can read", "KeyError: 'manager'"),
        ("platform: linux-64\n", "platform: osx-64\n", "no packages for the platform linux-64", "it has osx-64"),
        ("package:", "dependencies:", "is an environment.yml", "builds"),
        ("package:", "things:", "neither a pixi.lock nor a conda-lock.yml", "package"),
        ("cudnn-9.1-h0_0.conda", "cudnn.zip", "is not a file of a channel", "source"),
        (
            "manager: conda\n  platform: linux-64\n  url: https://example.invalid/c/linux-64/cudnn-9.1-h0_0.conda",
            "manager: pip\n  platform: linux-64\n  url: git+https://example.invalid/x@abc",
            "pins no file of `cudnn`",
            "a commit",
        ),
    ],
)
def test_what_is_refused(tmp_path, old, new, what, why):
    assert old in PACKAGE
    (tmp_path / "conda-lock.yml").write_text(PACKAGE.replace(old, new))
    with pytest.raises(LockfileInvalid) as caught:
        read(tmp_path / "conda-lock.yml")
    assert what in caught.value.what and why in str(caught.value.why)


def test_a_category_that_is_not_there(tmp_path):
    (tmp_path / "conda-lock.yml").write_text(PACKAGE)
    assert [pin.hashes for pin in read(tmp_path / "conda-lock.yml")] == [("md5:0123456789abcdef0123456789abcdef",)]
    with pytest.raises(LockfileInvalid, match="no category `gpu`"):
        read(tmp_path / "conda-lock.yml#gpu")
