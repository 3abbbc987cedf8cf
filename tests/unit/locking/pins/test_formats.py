"""What other tools pinned, and how it compares with what is installed."""

import hashlib
import json
import subprocess
import sys
import zipfile

import pytest

from hpcenv.errors import EnvironmentUnreadable, FileUnusable, LockfileInvalid
from hpcenv.locking.pins.cross_check import PinDifference, cross_check
from hpcenv.locking.pins.formats import read_pins
from hpcenv.locking.pins.install_report import known_files, parse_report
from hpcenv.locking.pins.pin import Pin, PinSource, marker_environment
from hpcenv.locking.wheels.proof import InstalledDist, WheelProof

A, B, C, D = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)
LINUX = marker_environment({"python.version": "3.12.3", "python.implementation": "cpython", "system.machine": "x86_64"})


def read(tmp_path, name, text, **asked):
    path = tmp_path / name
    path.write_text(text)
    return read_pins(PinSource(path=path, **asked), environment=LINUX)


def brief(pins):
    return [(pin.name, pin.version, pin.required) for pin in pins]


# ---- requirements.txt ------------------------------------------------------------------------------------------


def test_requirements_with_hashes(tmp_path):
    text = f"""
# made by pip-compile
--index-url=whatever
Zope.Interface[test]==6.0 ; python_version >= "3.8" \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
    # via somebody
colorama==0.4.6 ; sys_platform == "win32" --hash=sha256:{C}
attrs === 23.1.0 --hash sha256:{D} # why
"""
    assert read(tmp_path, "requirements.txt", text) == (
        Pin(name="attrs", version="23.1.0", hashes=(f"sha256:{D}",), source="requirements.txt line 9"),
        Pin(
            name="zope-interface",
            version="6.0",
            hashes=(f"sha256:{A}", f"sha256:{B}"),
            source="requirements.txt line 4",
        ),
    )


def test_requirements_that_name_other_files(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.txt").write_text(f"-r ../requirements.txt\n-c limits.txt\nb==2 --hash=sha256:{B}\n")
    (tmp_path / "more" / "limits.txt").write_text("c==3\n")
    pins = read(tmp_path, "requirements.txt", "-rmore/base.txt\na==1\n")
    assert brief(pins) == [("a", "1", True), ("b", "2", True), ("c", "3", False)]


def test_a_url_requirement_pins_its_file(tmp_path):
    url = "https://example.invalid/plain-1.0-py3-none-any.whl"
    [pin] = read(tmp_path, "requirements.txt", f"plain @ {url} --hash=sha256:{A}\n")
    assert (pin.version, pin.files) == ("1.0", (("plain-1.0-py3-none-any.whl", A),))


@pytest.mark.parametrize("line", ["a", "a>=1", "a==1.*", "a==1,==2"])
def test_a_line_that_pins_nothing_has_no_version(tmp_path, line):
    [pin] = read(tmp_path, "requirements.txt", line + "\n")
    assert pin.version is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-e .", "requirements.txt line 1: `-e .` is not supported"),
        ("./a.whl", "requirements.txt line 1: `./a.whl` is not a pinned package"),
        ("${NAME}==1", "requirements.txt line 1: `${NAME}==1` is not a pinned package"),
        ("a==1 ; nonsense", "requirements.txt line 1: `a==1 ; nonsense` is not a pinned package"),
        ("-r missing.txt", "missing.txt"),
    ],
)
def test_what_requirements_may_not_say(tmp_path, line, message):
    with pytest.raises((LockfileInvalid, FileUnusable), match=r".") as caught:
        read(tmp_path, "requirements.txt", line + "\n")
    assert message in caught.value.what


# ---- pylock.toml -------------------------------------------------------------------------------------------------

PYLOCK = f"""
lock-version = "1.0"
created-by = "hand"
extras = ["gpu"]
dependency-groups = ["dev"]

[[packages]]
name = "attrs"
version = "23.1.0"
wheels = [
  {{ url = "https://example.invalid/attrs-23.1.0-py3-none-any.whl", hashes = {{ sha256 = "{A}" }} }},
]
[packages.sdist]
name = "attrs-23.1.0.tar.gz"
url = "https://example.invalid/x"
hashes = {{ sha256 = "{B}", md5 = "00" }}

[[packages]]
name = "colorama"
version = "0.4.6"
marker = "sys_platform == 'win32'"
wheels = [{{ name = "colorama-0.4.6-py3-none-any.whl", path = "c.whl", hashes = {{ sha256 = "{C}" }} }}]

[[packages]]
name = "cuda"
version = "1"
marker = "'gpu' in extras"
wheels = [{{ name = "cuda-1-py3-none-any.whl", path = "d.whl", hashes = {{ sha256 = "{D}" }} }}]

[[packages]]
name = "mine"
directory = {{ path = "." }}

[[packages]]
name = "pytest"
version = "8"
marker = "'dev' in dependency_groups"
wheels = [{{ name = "pytest-8-py3-none-any.whl", path = "p.whl", hashes = {{ sha256 = "{D}" }} }}]
"""


def test_pylock(tmp_path):
    pins = read(tmp_path, "pylock.toml", PYLOCK)
    assert brief(pins) == [
        ("attrs", "23.1.0", True),
        ("cuda", "1", False),
        ("mine", None, True),
        ("pytest", "8", False),
    ]
    assert pins[0].files == (("attrs-23.1.0-py3-none-any.whl", A), ("attrs-23.1.0.tar.gz", B))
    assert pins[0].hashes == ("md5:00", f"sha256:{A}", f"sha256:{B}")
    assert pins[0].source == "pylock.toml packages[0]"


def test_pylock_with_extras_and_groups(tmp_path):
    pins = read(tmp_path, "pylock.train.toml", PYLOCK, extras=["GPU"], groups=["dev"])
    assert [pin.name for pin in pins if pin.required] == ["attrs", "cuda", "mine", "pytest"]


def test_a_pylock_for_other_environments_is_refused(tmp_path):
    text = PYLOCK.replace("extras =", "environments = [\"sys_platform == 'win32'\"]\nextras =", 1)
    with pytest.raises(LockfileInvalid, match="is not for this environment"):
        read(tmp_path, "pylock.toml", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lock-version = '1.0'\n", "is not a valid pylock.toml"),
        (PYLOCK.replace('"1.0"', '"9.0"', 1), "is not a valid pylock.toml"),
        ("a = \n", "is not TOML"),
        ("x = 1\n", "is not a valid pylock.toml"),
        ("version = 1\n[[package]]\nname = 'a'\nversion = '1'\n", "is not a valid pylock.toml"),
    ],
)
def test_files_that_are_no_lock(tmp_path, text, message):
    with pytest.raises(LockfileInvalid, match=message):
        read(tmp_path, "pylock.toml", text)


# ---- files of other tools ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("poetry.lock", "poetry export --output requirements.txt"),
        ("pdm.lock", "pdm export --format pylock --output pylock.toml"),
        ("Pipfile.lock", "pipenv requirements --hash > requirements.txt"),
        ("pyproject.toml", "pip lock"),
    ],
)
def test_a_file_that_is_not_read_is_refused_with_the_command_that_exports_it(tmp_path, name, command):
    with pytest.raises(LockfileInvalid, match="hpcenv does not read") as caught:
        read(tmp_path, name, "[[package]]\nname = 'a'\n")
    assert command in caught.value.hint


def test_a_conda_explicit_file_is_refused_with_the_way_to_a_lock(tmp_path):
    with pytest.raises(LockfileInvalid, match="conda") as caught:
        read(
            tmp_path, "explicit.txt", "# platform: linux-64\n@EXPLICIT\nhttps://host.invalid/linux-64/a-1-0.conda#ab\n"
        )
    assert "conda-lock" in caught.value.hint


def test_a_uv_lock_without_uv_is_refused_with_the_line_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LockfileInvalid, match="cannot be read without uv") as caught:
        read(tmp_path, "uv.lock", "version = 1\n", extras=("cpu",))
    assert "uv export --frozen --offline --format pylock.toml --extra cpu -o pylock.toml" in caught.value.hint


@pytest.mark.parametrize("name", ["requirements.txt", "conda-lock.yml"])
def test_an_extra_for_a_file_that_has_none_is_refused(tmp_path, name):
    text = "a==1\n" if name == "requirements.txt" else "version: 1\npackage: []\nmetadata: {}\n"
    with pytest.raises(LockfileInvalid, match="`--extra` does not go with") as caught:
        read(tmp_path, name, text, extras=("cpu",))
    assert "uv.lock and pylock.toml" in caught.value.why


def test_the_hash_of_a_url_stands_in_the_url(tmp_path):
    [pin] = read(tmp_path, "requirements.txt", f"tqdm @ https://host.invalid/tqdm-4.67.1-py3-none-any.whl#sha256={A}\n")
    assert (pin.version, pin.hashes) == ("4.67.1", (f"sha256:{A}",))


# ---- the project itself ----------------------------------------------------------------------------------------------


def test_the_project_itself_may_be_installed_or_not(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'My.Trainer'\n")
    pins = read(tmp_path, "requirements.txt", f"-e .\na==1 --hash=sha256:{A}\n")
    assert brief(pins) == [("a", "1", True), ("my-trainer", None, False)]


def test_another_folder_that_is_installed_as_editable_has_no_version(tmp_path):
    (tmp_path / "libs" / "eval").mkdir(parents=True)
    (tmp_path / "libs" / "eval" / "pyproject.toml").write_text("[project]\nname = 'eval'\n")
    assert brief(read(tmp_path, "requirements.txt", "-e ./libs/eval\n")) == [("eval", None, True)]


def test_a_folder_without_a_name_is_refused_with_a_way(tmp_path):
    with pytest.raises(LockfileInvalid, match="is not supported") as caught:
        read(tmp_path, "requirements.txt", "-e ./old\n")
    assert "leave the line out" in caught.value.hint


# ---- which Python, extras and groups a pylock.toml is for --------------------------------------------------------------

WITH_EXTRAS = f"""lock-version = "1.0"
created-by = "test"
extras = ["cpu"]
dependency-groups = ["dev"]
requires-python = ">=3.10"

[[packages]]
name = "tqdm"
version = "4.67.1"
marker = "'cpu' in extras or 'dev' in dependency_groups"
wheels = [{{ url = "https://host.invalid/tqdm-4.67.1-py3-none-any.whl", hashes = {{ sha256 = "{A}" }} }}]
"""


def test_a_pylock_for_another_python_is_refused(tmp_path):
    with pytest.raises(LockfileInvalid, match=r"is not for Python 3\.12\.3") as caught:
        read(tmp_path, "pylock.toml", WITH_EXTRAS.replace(">=3.10", ">=3.99"))
    assert "requires-python" in caught.value.why


@pytest.mark.parametrize(
    ("asked", "required"), [({}, False), ({"extras": ("CPU",)}, True), ({"groups": ("dev",)}, True)]
)
def test_what_an_extra_or_group_needs(tmp_path, asked, required):
    assert brief(read(tmp_path, "pylock.toml", WITH_EXTRAS, **asked)) == [("tqdm", "4.67.1", required)]


@pytest.mark.parametrize(("asked", "has"), [({"extras": ("gpu",)}, "cpu"), ({"groups": ("test",)}, "dev")])
def test_an_extra_that_a_pylock_does_not_have_is_refused(tmp_path, asked, has):
    with pytest.raises(LockfileInvalid, match="has no `--") as caught:
        read(tmp_path, "pylock.toml", WITH_EXTRAS, **asked)
    assert has in caught.value.why


# ---- markers -----------------------------------------------------------------------------------------------------


def test_markers_are_those_of_the_examined_python(tmp_path):
    text = f"""
numpy==1.26.4 ; python_full_version < "3.12" --hash=sha256:{A}
numpy==2.1.0 ; python_full_version >= "3.12" --hash=sha256:{B}
"""
    assert brief(read(tmp_path, "requirements.txt", text)) == [("numpy", "2.1.0", True)]
    older = marker_environment({"python.version": "3.11.2", "system.machine": "x86_64"})
    assert brief(read_pins(PinSource(path=tmp_path / "requirements.txt"), environment=older)) == [
        ("numpy", "1.26.4", True)
    ]


def test_markers_need_a_python_version():
    with pytest.raises(EnvironmentUnreadable, match="cannot evaluate markers"):
        marker_environment({})


# ---- comparing -----------------------------------------------------------------------------------------------------


def pin(name, version="1.0", *hashes, required=True):
    return Pin(name=name, version=version, hashes=tuple(f"sha256:{h}" for h in hashes), source="f", required=required)


def check(pins, *installed, **more):
    dists = [InstalledDist(name=name, version=version) for name, version, _ in installed]
    proofs = [
        WheelProof(name=name, sha256=sha256, proof="record" if sha256 else "none", reason="" if sha256 else "offline")
        for name, _, sha256 in installed
    ]
    return cross_check(pins, dists, proofs, **more)


def test_what_agrees_gives_nothing():
    assert check([pin("a", "1.0", A, B), pin("b", "2.0", C)], ("A", "1.0.0", B), ("b", "2.0+cu130", C)) == ()


def test_each_kind_of_difference():
    pins = [
        pin("gone"),
        pin("optional", required=False),
        pin("file", "1.0", A),
        pin("version", "1.0", A),
        pin("unproved", "1.0", A),
        pin("hashless"),
        pin("open", None),
    ]
    installed = [("file", "1.0", B), ("version", "2.0", A), ("unproved", "1.0", None), ("hashless", "1.0", A)]
    found = check(pins, *installed, ("open", "1.0", A), ("extra", "1.0", A), ("pip", "26", None), ignore=["pip"])
    note = f"sha256 {B} (proof: record) is not among those of f"
    assert found == (
        PinDifference(kind="not-pinned", name="extra", installed="1.0"),
        PinDifference(kind="other-file", name="file", pinned=A, installed="1.0", note=note),
        PinDifference(kind="not-installed", name="gone", pinned="1.0", note="f"),
        PinDifference(kind="unknown", name="hashless", installed="1.0", note="f states no sha256"),
        PinDifference(kind="unknown", name="open", pinned="any version", installed="1.0", note="f pins no version"),
        PinDifference(kind="unknown", name="unproved", pinned=A, installed="1.0", note="offline"),
        PinDifference(kind="other-version", name="version", pinned="1.0", installed="2.0", note="f"),
    )


def test_one_of_two_pinned_versions_is_enough():
    assert check([pin("a", "1.0", A), pin("a", "2.0", B)], ("a", "2.0", B)) == ()


def test_a_pinned_local_version_must_be_the_same():
    [found] = check([pin("torch", "2.13.0+cpu", A)], ("torch", "2.13.0+cu130", A))
    assert found.kind == "other-version"


# ---- what an image may hold ------------------------------------------------------------------------------------------


def test_wheels_of_a_lock_in_the_image(tmp_path):
    [known, *_] = known_files(read(tmp_path, "pylock.toml", PYLOCK))
    assert (known.name, known.filename, known.sha256) == ("attrs", "attrs-23.1.0-py3-none-any.whl", A)


def test_a_report_that_pip_wrote(tmp_path):
    filename = "plain-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / filename, "w") as wheel:
        wheel.writestr("plain-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
        wheel.writestr("plain-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("plain-1.0.dist-info/RECORD", "")
    report = tmp_path / "report.json"
    argv = ["install", "-q", "--dry-run", "--no-index", "--no-deps", "--report", report, tmp_path / filename]
    subprocess.run([sys.executable, "-m", "pip", *map(str, argv)], check=True, capture_output=True, timeout=60)
    [known] = parse_report(report.read_bytes(), origin="report.json")
    stated = hashlib.sha256((tmp_path / filename).read_bytes()).hexdigest()
    assert (known.name, known.version, known.filename, known.sha256) == ("plain", "1.0", filename, stated)


def test_what_is_no_wheel_in_a_report_is_left_out():
    entry = {
        "download_info": {"url": "file:///p-1.tar.gz", "archive_info": {"hashes": {"sha256": A}}},
        "metadata": {"name": "p", "version": "1"},
    }
    assert parse_report(json.dumps({"version": "1", "install": [entry]}), origin="report.json") == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": "2"}', '{"version": "1", "install": [{}]}'])
def test_what_is_no_report(text):
    with pytest.raises(LockfileInvalid, match="report"):
        parse_report(text, origin="report.json")
