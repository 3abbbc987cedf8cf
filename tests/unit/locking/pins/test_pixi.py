"""pixi.lock: real files of each version, read as rattler reads them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins import pixi
from hpcenv.locking.pins.formats import read_pins
from hpcenv.locking.pins.pin import Pin, PinSource, marker_environment

FILES = Path(__file__).parents[3] / "pin_files"
A, B = "a" * 64, "b" * 64


def environment(machine="x86_64"):
    return marker_environment({"python.version": "3.13.1", "system.machine": machine})


def read(path, machine="x86_64"):
    return read_pins(PinSource(path=Path(path)), environment=environment(machine))


@pytest.mark.parametrize(("name", "conda", "pypi"), [("pixi-4", 24, 12), ("pixi-6", 100, 0)])
def test_real_files_are_read_as_rattler_reads_them(name, conda, pypi):
    rattler = pytest.importorskip("rattler", reason="NOT RUN: py-rattler is not installed (pip install -e '.[dev]')")
    path = FILES / f"{name}.lock.yml"
    pins = read(path)
    assert [sum(pin.manager == kind for pin in pins) for kind in ("conda", "pypi")] == [conda, pypi]
    lock = rattler.LockFile.from_path(path)
    platform = next(one for one in lock.platforms() if one.name == "linux-64")
    expected = {
        (record.name.normalized, str(record.version), str(record.build), record.sha256.hex(), record.md5.hex())
        for record in lock.default_environment().conda_repodata_records_for_platform(platform)
    }
    found = {
        (pin.name, pin.version, pin.build, *(one.partition(":")[2] for one in pin.hashes))
        for pin in pins
        if pin.manager == "conda"
    }
    assert found == expected
    wheels = lock.default_environment().pypi_packages_for_platform(platform) or []
    assert {(pin.name, pin.version) for pin in pins if pin.manager == "pypi"} == {
        (wheel.name, wheel.version) for wheel in wheels
    }


def test_what_a_pin_says():
    [cudnn] = [pin for pin in read(FILES / "pixi-6.lock.yml") if pin.name == "cudnn"]
    assert (cudnn.version, cudnn.build, cudnn.manager, cudnn.required) == ("9.10.2.21", "hbcb9cd8_0", "conda", True)
    assert cudnn.source.startswith("pixi-6.lock.yml packages[")
    assert [name for name, _ in cudnn.files] == ["cudnn-9.10.2.21-hbcb9cd8_0.conda"]
    [numpy] = [pin for pin in read(FILES / "pixi-4.lock.yml") if pin.name == "numpy"]
    assert numpy.manager == "pypi" and numpy.filenames[0].startswith("numpy-") and len(numpy.hashes) == 1


@pytest.mark.parametrize(
    ("name", "machine", "what", "why"),
    [
        ("pixi-5.lock.yml", "x86_64", "has no platform linux-64", "it has win-64"),
        ("pixi-6.lock.yml", "aarch64", "has no platform linux-aarch64", "it has linux-64, osx-arm64, win-64"),
        ("pixi-6.lock.yml#gpu", "x86_64", "no environment `gpu`", "it has default"),
        ("pixi-6-environments.lock.yml", "x86_64", "no environment `default`", "with-exclude-newer"),
        ("pixi-7.lock.yml", "x86_64", "pins no file of `local-pkg`", "the folder `./local-pkg`"),
        ("pixi-7-source.lock.yml", "x86_64", "is not a file of a channel", "built from source"),
    ],
)
def test_what_real_files_are_refused_for(name, machine, what, why):
    with pytest.raises(LockfileInvalid) as caught:
        read(FILES / name, machine)
    assert what in caught.value.what and why in str(caught.value.why)
    assert caught.value.hint


CONDA = f"""version: 6
environments:
  default:
    channels: []
    packages:
      linux-64:
      - conda: https://example.invalid/c/linux-64/cudnn-9.1-0_0.conda
      - pypi: WHEEL
  tiny:
    packages:
      linux-64:
      - conda: https://example.invalid/c/linux-64/cudnn-9.1-0_0.conda
packages:
- conda: https://example.invalid/c/linux-64/cudnn-9.1-0_0.conda
  sha256: {A}
- pypi: WHEEL
  name: Some.Thing
  version: 1.10
"""
WHEEL = "https://example.invalid/some_thing-1.10-py3-none-any.whl"


def written(tmp_path, text, name="pixi.lock"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def one(tmp_path, location, more=f"  sha256: {B}\n"):
    return read(written(tmp_path, CONDA.replace("WHEEL", location) + more))


def test_no_value_gets_a_type(tmp_path):
    """YAML 1.1 would make a number of the build `0_0` and of the version `1.10`."""
    cudnn, thing = one(tmp_path, WHEEL)
    assert (cudnn.build, cudnn.version) == ("0_0", "9.1")
    assert thing == Pin(
        name="some-thing",
        version="1.10",
        hashes=(f"sha256:{B}",),
        files=(("some_thing-1.10-py3-none-any.whl", B),),
        source="pixi.lock packages[1]",
    )


def test_an_environment_is_chosen(tmp_path):
    one(tmp_path, WHEEL)
    assert [pin.name for pin in read(tmp_path / "pixi.lock#tiny")] == ["cudnn"]
    (tmp_path / "pixi.lock#tiny").write_text("a==1\n")
    assert [pin.name for pin in read(tmp_path / "pixi.lock#tiny")] == ["a"], "a file of that very name comes first"


@pytest.mark.parametrize("location", [".", "./"])
def test_the_project_itself_may_be_installed_and_has_no_file(tmp_path, location):
    pin = one(tmp_path, location, more=f"  sha256: {B}\n  editable: true\n")[1]
    assert (pin.version, pin.hashes, pin.required) == (None, (), False)


@pytest.mark.parametrize(
    ("location", "more", "what", "why"),
    [
        ("./other", f"  sha256: {B}\n", "pins no file of `some-thing`", "the folder `./other`"),
        (WHEEL, f"  sha256: {B}\n  editable: true\n", "pins no file of `some-thing`", "the folder"),
        ("git+https://example.invalid/x.git?rev=1#abc", "", "pins no file of `some-thing`", "a commit"),
        ("git+ssh://git@example.invalid/x@abc", "", "pins no file of `some-thing`", "a commit"),
        ("direct+" + WHEEL, "", "states no hash of `some-thing`", "packages[1]"),
        (WHEEL, "", "states no hash of `some-thing`", "neither sha256 nor md5"),
        (WHEEL, "  sha256: abc\n", "not a pixi.lock that hpcenv can read", "'abc' is no sha256"),
    ],
)
def test_what_has_no_file_with_a_hash_is_refused(tmp_path, location, more, what, why):
    with pytest.raises(LockfileInvalid) as caught:
        one(tmp_path, location, more)
    assert what in caught.value.what and why in str(caught.value.why)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("version: 6", "version: 3", "is a pixi.lock of version 3"),
        ("version: 6", "version: 1", "is a pixi.lock of version 1"),
        ("version: 6", "version: 1000", "is a pixi.lock of version 1000"),
        ("version: 6\n", "", "is a pixi.lock of version None"),
        (f"  sha256: {A}\n", "", "states no hash of `cudnn`"),
        ("cudnn-9.1-0_0.conda\n  sha", "cudnn-9.2-0_0.conda\n  sha", "that hpcenv can read"),
        ("environments:", "environment:", "that hpcenv can read"),
    ],
)
def test_what_is_no_such_file(tmp_path, old, new, what):
    text = CONDA.replace("WHEEL", WHEEL)
    assert old in text
    with pytest.raises(LockfileInvalid, match="(?s)" + what) as caught:
        read(written(tmp_path, text.replace(old, new) + f"  sha256: {B}\n"))
    assert caught.value.why


def test_entries_that_contradict_each_other(tmp_path):
    more = f"- conda: https://example.invalid/c/linux-64/cudnn-9.1-0_0.conda\n  sha256: {B}\n"
    with pytest.raises(LockfileInvalid) as caught:
        one(tmp_path, WHEEL, more=f"  sha256: {B}\n{more}")
    assert "different hashes" in str(caught.value.why)


SEVEN = f"""version: 7
platforms:
- name: linux-64
- name: cluster
  subdir: linux-64
  virtual-packages: [__cuda >= 12]
environments:
  default:
    packages:
      linux-64: []
      cluster:
      - conda: https://example.invalid/c/linux-64/cudnn-9.1-h0_0.conda
      - conda_source: mine[ac2e8eb3] @ .
packages:
- conda: https://example.invalid/c/linux-64/cudnn-9.1-h0_0.conda
  sha256: {A}
"""


def test_a_platform_of_version_7_is_chosen(tmp_path):
    path = written(tmp_path, SEVEN)
    with pytest.raises(LockfileInvalid, match="several platforms for linux-64") as caught:
        read(path)
    assert "#default@linux-64" in str(caught.value.hint)
    pins = read(tmp_path / "pixi.lock#default@cluster")
    assert [(pin.name, pin.version, pin.required) for pin in pins] == [("cudnn", "9.1", True), ("mine", None, False)]
    assert read(tmp_path / "pixi.lock#@linux-64") == ()


def test_a_choice_behind_a_file_without_one(tmp_path):
    written(tmp_path, "a==1\n", "requirements.txt")
    with pytest.raises(LockfileInvalid, match="nothing to choose from"):
        read(tmp_path / "requirements.txt#gpu")


def test_names_from_the_file_are_quoted_in_a_command_that_is_suggested():
    data = {"version": "6", "environments": {"x; rm -r y": {}}}
    with pytest.raises(LockfileInvalid) as caught:
        pixi.require_known(Path("a b/pixi lock.yml"), data, "none")
    assert caught.value.hint == "name one after `#`: --from 'pixi lock.yml'#'x; rm -r y'"
