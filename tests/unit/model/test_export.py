"""Exports: what stands in them, what is left out and why, and that a lockfile's words stay words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.pylock import Pylock
from packaging.requirements import Requirement

from hpcenv.adapters import toml_files
from hpcenv.model import export, lockfile
from hpcenv.model.document import parse
from hpcenv.model.export import WheelLink, WheelUrl
from hpcenv.model.lockfile import Lockfile

A, B, C = "a" * 64, "b" * 64, "c" * 64


def dist(
    name: str, version: str = "1.0", *, sha256: str | None = A, proof: str = "record", **rest: Any
) -> dict[str, Any]:
    wheel = {"proof": proof, "filename": f"{name}-{version}-py3-none-any.whl", "index": "pypi"}
    if sha256 is not None:
        wheel["sha256"] = sha256
    return {"name": name, "version": version, "source": "wheel", "record-sha256": "01", "wheel": wheel, **rest}


VCS = {
    "source": "vcs",
    "direct-url": {"url": "https://git.example/x.git", "commit-id": "4f2a"},
    "wheel": {"proof": "none"},
}
EDITABLE = {
    "source": "editable",
    "direct-url": {"url": "file:mine", "commit-id": "77aa", "dirty": True, "editable": True},
}
DISTS = [
    dist("torch", "2.13.0+cu130", sha256=B),
    dist("numpy", "2.3"),
    dist("Mine", **EDITABLE, wheel={"proof": "none", "reason": "installed from a directory"}),
    dist("pulled", **VCS),
    dist("unproved", sha256=C, proof="none"),
    {"name": "unasked", "version": "3", "source": "wheel"},
]
IMAGE = {
    "reference": "docker://registry.example:5000/team/torch:2.13",
    "index-digest": f"sha256:{A}",
    "manifest-digest": f"sha256:{B}",
    "config-digest": f"sha256:{C}",
    "rootfs-chain-id": f"sha256:{A}",
    "platform": "linux/amd64",
    "env-digest": f"sha256:{C}",
    "nvidia": {"CUDA_VERSION": "13.0.0"},
    "layers": [{"digest": f"sha256:{A}", "diff-id": f"sha256:{B}", "size": 1, "media-type": "x"}],
    "sif": {
        "sha256": C, "size": 1, "partition-sha256": A, "partition-size": 1, "compression": "zstd", "arch": "amd64",
        "built-with": "apptainer 1.5", "builder": "b", "mksquashfs-args": ["-x"], "source-date-epoch": 0,
    },
}  # fmt: skip


def locked(
    *dists: dict[str, Any], facts: dict[str, Any] | None = None, image: bool = False, edited: bool = False
) -> Lockfile:
    data: dict[str, Any] = {
        "schema": 1,
        "generated-by": "hpcenv 0.1.0",
        "fingerprint": "hpc1-000000000000",
        "kind": "sif" if image else "host",
        "asked": {"image": IMAGE["reference"] if image else "host", "platform": "linux/amd64"},
        **({"container": IMAGE} if image else {}),
        "python": {"version": "3.12.11", "implementation": "cpython"},
        "torch": {"version": "2.13.0", "cuda": "13.0"},
        "libs": {
            "nccl": {"version": "2.29.7", "sha256": f"sha256:{C}", "origin": "wheel"},
            "cudnn": {"version": "absent", "sha256": "absent"},
        },
        "system": {"machine": "x86_64", "glibc": "2.36"},
        "unknown": {"libs.cudnn.version": "cannot be read"},
        **(facts or {}),
        "packages": {
            "count": len(dists), "env-digest": "sha256:aa", "unlisted-count": 0, "unlisted-digest": "sha256:cc",
            "dist": list(dists),
        },
    }  # fmt: skip
    found, problems = parse(Lockfile, lockfile.from_data(data))
    assert problems == ()
    assert found is not None
    content = lockfile.fingerprint(lockfile.to_data(found))
    return found if edited else replace(found, fingerprint=content)


def lines(text: str) -> list[str]:
    """What is not a comment."""
    return [line for line in text.splitlines() if not line.startswith("#")]


# -- requirements.txt


def test_requirements_pin_what_is_proved_and_comment_the_rest() -> None:
    found = export.requirements(locked(*DISTS))
    assert lines(found.text) == [f"numpy==2.3 --hash=sha256:{A}", f"torch==2.13.0+cu130 --hash=sha256:{B}"]
    assert [line for line in found.text.splitlines() if "==" in line and line.startswith("#")] == [
        "# Mine==1.0: editable install file:mine at 77aa, with changes that are not committed",
        "# pulled==1.0: installed from version control https://git.example/x.git at 4f2a",
        "# unasked==3: the lockfile names no wheel of it; `hpcenv lock` looks for one",
        "# unproved==1.0: its wheel has no proof",
    ]
    assert [one.name for one in found.left_out] == ["Mine", "pulled", "unasked", "unproved"]
    assert found.notes == ("4 of 6 packages are left out: Mine, pulled, unasked, unproved",)
    assert found.count == 2


def test_the_order_of_the_lockfile_is_no_part_of_an_export() -> None:
    for render in (export.requirements, export.cyclonedx):
        one, other = render(locked(*DISTS)).text, render(locked(*reversed(DISTS))).text
        # The fingerprint names the lockfile's own order; all else is the same.
        assert _unnamed(one) == _unnamed(other)


def _unnamed(text: str) -> str:
    return re.sub("hpc1-[0-9a-f]{12}|urn:uuid:[0-9a-f-]{36}", "", text)


def test_a_wheel_of_a_direct_url_is_pinned_to_it() -> None:
    one = dist("x", proof="direct-url", **{"direct-url": {"url": "https://files.example/x-1.0-py3-none-any.whl"}})
    found = export.requirements(locked(one))
    assert lines(found.text) == [f"x @ https://files.example/x-1.0-py3-none-any.whl --hash=sha256:{A}"]


def test_a_wheel_of_a_file_is_pinned_by_version_and_said() -> None:
    one = dist("x", proof="direct-url", **{"direct-url": {"url": "file:x-1.0-py3-none-any.whl"}})
    found = export.requirements(locked(one))
    assert lines(found.text) == [f"x==1.0 --hash=sha256:{A}"]
    assert found.notes == ("pip must be configured to find x: installed from a file",)


def test_another_index_than_the_default_is_said() -> None:
    one = dist("x")
    one["wheel"]["index"] = "extra-1"
    assert export.requirements(locked(one)).notes == ("pip must be configured to find x: installed from extra-1",)


def test_a_modified_package_is_said_above_its_pin() -> None:
    found = export.requirements(locked(dist("x", **{"content-sha256": "02"})))
    said = "modified after it was installed: this gives it as it was before"
    assert found.text.splitlines()[-2:] == [f"# x==1.0: {said}", f"x==1.0 --hash=sha256:{A}"]
    assert found.notes == (f"x 1.0 was {said}",)


def test_a_package_that_is_installed_twice_is_left_out() -> None:
    found = export.requirements(locked(dist("X-y", "1"), dist("x_y", "2")))
    assert lines(found.text) == []
    assert {one.reason for one in found.left_out} == {"it is installed 2 times, and pip installs it once"}


def test_an_edited_lockfile_is_said() -> None:
    found = export.requirements(locked(edited=True))
    assert re.match("the lockfile was edited: it says hpc1-0{12}, its content is hpc1-[0-9a-f]{12}", found.notes[0])


def test_the_image_is_named_and_said_to_be_missing() -> None:
    found = export.requirements(locked(dist("x"), image=True))
    assert f"# Locked in the image docker://registry.example:5000/team/torch:2.13, sha256:{B}, which" in found.text
    assert found.notes == ("the image is not in it: only its Python packages are",)


# -- a lockfile is untrusted input

HOSTILE = [
    "x\n--index-url http://evil.example",
    "-e .",
    "x --hash",
    "x\u2028y",
    "x; y",
    "../x",
    "",
    "x\x1b[2J",
    "é",
    "x\r\ny",
]


def hostile(words: str) -> Lockfile:
    return locked(
        dist(words, sha256=A),
        dist("b", words),
        dist("c", sha256=words),
        dist("d", proof="none", wheel={"proof": "none", "reason": words}),
        dist("e", source="vcs", wheel={"proof": "none"}, **{"direct-url": {"url": words, "commit-id": words}}),
        dist("g", wheel={"proof": "record", "sha256": A, "filename": words}),
        dist("h", wheel={"proof": "record", "sha256": A, "filename": f"h-1.0-{words}.whl"}),
        dist("f", proof="direct-url", **{"direct-url": {"url": f"https://h.example/{words}.whl"}}),
        facts={"python": {"version": words, "implementation": words}, "system": {"machine": words}},
    )


def check_hostile(words: str) -> None:
    made = hostile(words)
    for line in lines(export.requirements(made).text):
        pin, _, option = line.partition(" --hash=sha256:")
        assert re.fullmatch("[0-9a-f]{64}", option), line
        Requirement(pin)
    for line in lines(export.environment(made, name="x").text):
        assert re.fullmatch(r'[a-z]+: ?("x")?|  - [a-z]+(=[0-9.abrc]+)?:?|      - (\S+==\S+|"[^"\\]+")', line), line
    urls = {one.name: WheelUrl(url="https://h.example/x.whl") for one in export.wheels_to_find(made)}
    document = export.pylock(made, urls)
    Pylock.from_dict(toml_files_parse(toml_files.dumps(document.data, header=document.header)))
    assert document.header.isascii()
    text = export.cyclonedx(made).text
    assert text == export.cyclonedx(made).text
    json.loads(text)


def toml_files_parse(text: str) -> dict[str, Any]:
    import tomlkit

    return tomlkit.parse(text).unwrap()


@pytest.mark.parametrize("words", HOSTILE)
def test_words_of_a_lockfile_never_become_lines_that_pip_or_conda_obey(words: str) -> None:
    check_hostile(words)


@settings(deadline=None, max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_words_do(words: str) -> None:
    check_hostile(words)


# -- pylock.toml


def test_pylock_has_every_proved_wheel_with_its_url() -> None:
    urls = {"torch": WheelUrl(url="https://h.example/t.whl"), "numpy": WheelUrl(reason="no index lists it")}
    found = export.pylock(locked(*DISTS), urls)
    assert found.data == {
        "lock-version": "1.0",
        "environments": [
            "sys_platform == 'linux' and platform_machine == 'x86_64' and implementation_name == 'cpython' and python_version == '3.12'"
        ],
        "requires-python": "==3.12.*",
        "created-by": "hpcenv",
        "packages": [
            {
                "name": "torch",
                "version": "2.13.0+cu130",
                "wheels": [
                    {
                        "name": "torch-2.13.0+cu130-py3-none-any.whl",
                        "url": "https://h.example/t.whl",
                        "hashes": {"sha256": B},
                    }
                ],
            }
        ],
    }
    Pylock.from_dict(found.data)
    assert "numpy==2.3: no index lists it" in found.header
    assert [one.name for one in found.left_out] == ["Mine", "numpy", "pulled", "unasked", "unproved"]


def test_only_proved_wheels_of_indexes_are_looked_for() -> None:
    direct = dist("x", proof="direct-url", **{"direct-url": {"url": "https://files.example/x-1.0-py3-none-any.whl"}})
    assert [one.name for one in export.wheels_to_find(locked(*DISTS, direct))] == ["numpy", "torch"]
    (package,) = export.pylock(locked(direct), {}).data["packages"]
    assert package["wheels"][0]["url"] == "https://files.example/x-1.0-py3-none-any.whl"


def test_a_wheel_with_the_name_of_another_package_is_left_out() -> None:
    one = dist("x", wheel={"proof": "record", "sha256": A, "filename": "y-1.0-py3-none-any.whl"})
    found = export.pylock(locked(one), {"x": WheelUrl(url="https://h.example/y-1.0-py3-none-any.whl")})
    assert found.data["packages"] == []
    assert [one.reason for one in found.left_out] == ["its wheel has not the name of a wheel of this name and version"]


NAME = "x-1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("links", "url", "said"),
    [
        ([], None, f"no index lists {NAME}"),
        ([(NAME, "https://h.example/x.whl", A)], "https://h.example/x.whl", ""),
        ([("renamed.whl", "http://h.example/x.whl", A)], "http://h.example/x.whl", ""),
        ([(NAME, None, None), (NAME, "https://h.example/x.whl", A)], "https://h.example/x.whl", ""),
        ([(NAME, None, None)], None, "its wheel lies in a folder of this machine (find-links), and no index has it"),
        ([(NAME, None, A)], None, "its wheel lies in a folder of this machine (find-links), and no index has it"),
        (
            [(NAME, "https://h.example/x.whl", B)],
            None,
            f"the index has another file of that name: sha256 {B}, locked {A}",
        ),
        (
            [(NAME, "https://h.example/x.whl", None)],
            "https://h.example/x.whl",
            "the index states no sha256 for it; pip compares it with the locked one",
        ),
        ([("y-1.0-py3-none-any.whl", "https://h.example/y.whl", None)], None, f"no index lists {NAME}"),
        ([(NAME, "https://me:secret@h.example/x.whl#sha256=1", A)], "https://h.example/x.whl", ""),
        ([(NAME, "https://h.example/x.whl?token=1", A)], None, "its URL holds a query, which may be a secret"),
        ([(NAME, "file:///srv/x.whl", A)], None, "its URL is of the kind `file:`, which names a place on one machine"),
        ([(NAME, "https://h.example/x\n.whl ", A)], None, "its URL has characters that a URL may not have"),
    ],
)
def test_the_url_is_of_the_very_file_and_public(
    links: list[tuple[str, str | None, str | None]], url: str | None, said: str
) -> None:
    (one,) = export.wheels_to_find(locked(dist("x")))
    found = export.choose_url(one, [WheelLink(filename=f, url=u, sha256=s) for f, u, s in links])
    assert (found.url, found.remark or found.reason) == (url, said)


# -- environment.yml


def read_yaml(text: str) -> dict[str, Any]:
    """The few forms of YAML that are written; with PyYAML, that this is how it reads them too."""
    rows = lines(text)
    assert rows[0].startswith("name: ")
    assert rows[1] == "dependencies:"
    found: list[Any] = []
    for row in rows[2:]:
        nested, entry = re.fullmatch(r"  (    )?- (.+)", row).groups()  # type: ignore[union-attr]
        value: Any = json.loads(entry) if entry.startswith('"') else entry
        assert entry.startswith('"') or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!=-]*:?", entry), entry
        if nested:
            found[-1]["pip"].append(value)
        else:
            found.append({"pip": []} if value == "pip:" else value)
    read = {"name": json.loads(rows[0].partition(" ")[2]), "dependencies": found}
    try:
        import yaml
    except ImportError:
        return read
    assert yaml.safe_load(text) == read
    return read


def test_environment_pins_python_and_what_pip_can_install() -> None:
    conda = dist("libmamba", source="conda", wheel={"proof": "none"})
    found = export.environment(locked(*DISTS, conda), name="on")
    assert read_yaml(found.text) == {
        "name": "on",
        "dependencies": [
            "python=3.12.11",
            "pip",
            {"pip": ["numpy==2.3", "torch==2.13.0+cu130", "unasked==3", "unproved==1.0"]},
        ],
    }
    assert [(one.name, one.reason.partition(" file")[0]) for one in found.left_out] == [
        ("libmamba", "installed by conda"),
        ("Mine", "editable install"),
        ("pulled", "installed from version control https://git.example/x.git at 4f2a"),
    ]


def test_environment_keeps_the_hash_of_a_direct_url() -> None:
    url = "https://files.example/x-1.0-py3-none-any.whl"
    found = read_yaml(export.environment(locked(dist("x", **{"direct-url": {"url": url}})), name="n").text)
    assert found["dependencies"][-1] == {"pip": [f"x @ {url}#sha256={A}"]}


def test_environment_says_when_conda_has_not_this_python() -> None:
    facts = {"python": {"version": "3.11.13", "implementation": "pypy"}}
    found = export.environment(locked(dist("x"), facts=facts), name="n")
    assert read_yaml(found.text)["dependencies"][0] == "python"
    assert found.notes == ("the Python is not pinned: locked is pypy 3.11.13",)


# -- CycloneDX


def bom(made: Lockfile) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    document = json.loads(export.cyclonedx(made).text)
    return document, {one["bom-ref"]: one for one in document["components"]}


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in component["properties"]}


def test_cyclonedx_lists_packages_with_purl_hash_and_proof() -> None:
    _, found = bom(locked(*DISTS))
    torch = found["package:torch@2.13.0+cu130"]
    assert torch["hashes"] == [{"alg": "SHA-256", "content": B}]
    assert torch["purl"] == "pkg:pypi/torch@2.13.0%2Bcu130?file_name=torch-2.13.0%2Bcu130-py3-none-any.whl"
    assert properties(torch)["hpcenv:wheel.proof"] == "record"
    assert properties(torch)["hpcenv:record-sha256"] == "01"
    for name in ("package:unproved@1.0", "package:unasked@3", "package:pulled@1.0", "package:Mine@1.0"):
        assert "hashes" not in found[name]
        assert properties(found[name])["hpcenv:wheel.proof"] == "none"
    assert found["package:pulled@1.0"]["purl"] == "pkg:generic/pulled@1.0"
    assert properties(found["package:Mine@1.0"])["hpcenv:direct-url.dirty"] == "true"


def test_cyclonedx_has_the_image_the_sif_and_the_libraries() -> None:
    document, found = bom(locked(image=True))
    image = found["image"]
    assert (image["type"], image["name"], image["version"]) == (
        "container",
        "registry.example:5000/team/torch",
        f"sha256:{B}",
    )
    assert image["hashes"] == [{"alg": "SHA-256", "content": B}]
    assert image["purl"].startswith(f"pkg:oci/torch@sha256:{B}?arch=amd64&repository_url=")
    assert properties(image)["hpcenv:container.rootfs-chain-id"] == f"sha256:{A}"
    assert found["sif"]["hashes"] == [{"alg": "SHA-256", "content": C}]
    assert (found["library:nccl"]["version"], found["library:nccl"]["hashes"][0]["content"]) == ("2.29.7", C)
    assert "library:cudnn" not in found
    root = properties(document["metadata"]["component"])
    assert root["hpcenv:torch.cuda"] == "13.0"
    assert root["hpcenv:unknown:libs.cudnn.version"] == "cannot be read"
    assert found["python"]["version"] == "3.12.11"


def test_cyclonedx_has_no_time_and_a_serial_number_of_the_fingerprint() -> None:
    one, again, other = (json.loads(export.cyclonedx(made).text) for made in (locked(*DISTS), locked(*DISTS), locked()))
    assert one == again
    assert "timestamp" not in one["metadata"]
    assert one["serialNumber"] != other["serialNumber"]
    assert one["metadata"]["component"]["version"] == locked(*DISTS).fingerprint


@pytest.mark.parametrize("image", [False, True])
def test_cyclonedx_is_valid(image: bool) -> None:
    from cyclonedx.exception import MissingOptionalDependencyException
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    twice = [dist("x"), dist("x"), dist("x", **{"content-sha256": "02"})]
    text = export.cyclonedx(locked(*DISTS, *twice, image=image)).text
    try:
        problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
        broken = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.replace('"SHA-256"', '"SHA-257"'))
    except MissingOptionalDependencyException:
        pytest.skip("NOT CHECKED: the validator is missing (pip install 'cyclonedx-python-lib[json-validation]')")
    assert problem is None, problem
    assert broken is not None


# -- files that may be replaced


def test_an_export_is_known_again_and_nothing_else_is() -> None:
    made = locked(*DISTS)
    texts = {
        "requirements": export.requirements(made).text,
        "environment": export.environment(made, name="n").text,
        "cyclonedx": export.cyclonedx(made).text,
    }
    for kind in texts:
        for other, text in texts.items():
            assert export.is_ours(kind, text) == (kind == other)  # type: ignore[arg-type]
    foreign = (
        "",
        "numpy\n",
        "{}",
        "[]",
        "[" * 100_000,
        '{"bomFormat": "CycloneDX", "metadata": {"component": {"name": "x"}}}',
    )
    assert not any(export.is_ours(kind, text) for kind in export.FORMATS for text in foreign)
