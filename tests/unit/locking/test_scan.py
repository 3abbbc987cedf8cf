"""`hpcenv image scan`: small programs play grype and osv-scanner; what is kept, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcenv.cli._command_line import cli
from hpcenv.errors import ToolFailed, ToolMissing
from hpcenv.locking.scan import scan
from hpcenv.project.workspace import read_lockfile

ROOT = Path(__file__).resolve().parents[3]

SCANNER = """#!{python} -IS
import json, sys
words = sys.argv[1:]
if words == ["--version"]:
    print({version!r})
    sys.exit(0)
place = words[-1] if "sbom:" not in words[0] else words[0][5:]
bill = json.load(open(place))
open({folder!r} + "/call", "w").write(json.dumps([words, bill]))
print({said!r})
sys.exit({status})
"""

GRYPE = {
    "matches": [
        {
            "vulnerability": {"id": "GHSA-low", "severity": "Negligible", "fix": {"versions": [], "state": "unknown"}},
            "artifact": {"name": "filelock", "version": "4.2.11"},
        },
        {
            "vulnerability": {"id": "CVE-2026-1", "severity": "Critical", "fix": {"versions": ["2.14.2"]}},
            "artifact": {"name": "torch", "version": "2.14.1"},
        },
        {
            "vulnerability": {"id": "CVE-2026-2", "severity": "odd\u0007", "fix": None},
            "artifact": {"name": "torch\u001b[31m", "version": "2.14.1"},
        },
    ],
    "descriptor": {"name": "grype", "version": "0.104.0", "db": {"status": {"built": "2026-11-22T08:00:00Z"}}},
}
OSV = {
    "results": [
        {
            "source": {"path": "bom.cdx.json", "type": "sbom"},
            "packages": [
                {
                    "package": {"name": "jinja2", "version": "3.1.6", "ecosystem": "PyPI"},
                    "vulnerabilities": [
                        {
                            "id": "GHSA-a",
                            "database_specific": {"severity": "MODERATE"},
                            "affected": [
                                {
                                    "package": {"name": "jinja2"},
                                    "ranges": [
                                        {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.7"}]},
                                        {"type": "GIT", "events": [{"fixed": "abcdef"}]},
                                    ],
                                }
                            ],
                        },
                        {"id": "PYSEC-b"},
                    ],
                    "groups": [{"ids": ["PYSEC-b"], "max_severity": "7.5"}],
                }
            ],
        }
    ]
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "lockfiles" / "cuda.lock.toml", tmp_path / "cuda.lock.toml")
    return tmp_path


def install(project: Path, name: str, said: object, *, version: str, status: int = 0) -> None:
    program = project / "tools" / name
    text = said if isinstance(said, str) else json.dumps(said)
    words = {"python": sys.executable, "folder": str(project), "said": text, "version": version, "status": status}
    program.write_text(SCANNER.format(**words))
    program.chmod(0o755)


def here(project: Path, **more):
    return scan(project, environ={"PATH": f"{project / 'tools'}"}, lock="cuda.lock.toml", **more)


def call(project: Path):
    return json.loads((project / "call").read_text())


def test_grype_gets_the_bill_of_materials_and_its_result_is_kept(project):
    install(project, "grype", GRYPE, version="grype 0.104.0")
    result = here(project)
    words, bill = call(project)
    assert words[0].startswith("sbom:")
    locked = read_lockfile(project / "cuda.lock.toml")
    names = {one["name"] for one in bill["components"] if one.get("purl", "").startswith("pkg:pypi/")}
    assert (
        names
        == {dist.name for dist in locked.packages.dist if dist.wheel and dist.wheel.sha256} | {"setuptools"} & names
    )
    assert [(one.id, one.severity, one.fixed) for one in result.vulnerabilities] == [
        ("CVE-2026-1", "critical", ("2.14.2",)),
        ("GHSA-low", "low", ()),
        ("CVE-2026-2", "unknown", ()),
    ]
    assert result.vulnerabilities[-1].package == "torch?[31m"
    kept = json.loads((project / "cuda.scan.json").read_text())
    assert kept["fingerprint"] == locked.fingerprint
    assert kept["scanned"][:2] == "20"
    assert (kept["scanner"], kept["database"]) == ("grype 0.104.0", "2026-11-22T08:00:00Z")
    assert kept["counts"] == {"critical": 1, "high": 0, "medium": 0, "low": 1, "unknown": 1}
    assert str(project) not in (project / "cuda.scan.json").read_text()


@pytest.mark.parametrize(
    ("version", "first"), [("osv-scanner version: 1.9.2", "--format"), ("osv-scanner version: 2.2.4", "scan")]
)
def test_osv_scanner_ends_with_1_where_it_found_something(project, version, first):
    install(project, "osv-scanner", OSV, version=version, status=1)
    result = here(project, bill="spdx")
    words, bill = call(project)
    assert words[0] == first
    assert words[-1].endswith(".spdx.json")
    assert bill["spdxVersion"] == "SPDX-2.3"
    assert [(one.id, one.severity, one.fixed) for one in result.vulnerabilities] == [
        ("PYSEC-b", "high", ()),
        ("GHSA-a", "medium", ("3.1.7",)),
    ]
    assert result.count_from("high") == 1


def test_grype_comes_first_and_a_name_decides(project):
    install(project, "grype", {"matches": []}, version="grype 0.104.0")
    install(project, "osv-scanner", {"results": []}, version="osv-scanner version: 2.2.4")
    assert here(project).scanner == "grype 0.104.0"
    assert here(project, scanner="osv-scanner").scanner == "osv-scanner 2.2.4"


def test_without_a_scanner_it_says_what_to_install(project):
    with pytest.raises(ToolMissing, match="neither grype nor osv-scanner") as caught:
        here(project)
    assert "install grype" in str(caught.value.hint)
    with pytest.raises(ToolMissing, match="grype is not on PATH"):
        here(project, scanner="grype")
    assert not (project / "cuda.scan.json").exists()


@pytest.mark.parametrize("said", ["no JSON", "[" * 100_000, {"matches": [{}]}, {"matches": 3}, [1]])
def test_an_output_of_another_form_is_no_result(project, said):
    install(project, "grype", said, version="grype 9")
    with pytest.raises(ToolFailed):
        here(project)
    assert not (project / "cuda.scan.json").exists()


def test_a_scanner_that_fails_is_no_result(project):
    install(project, "osv-scanner", "cannot load the database", version="osv-scanner version: 2.2.4", status=127)
    with pytest.raises(ToolFailed):
        here(project)
    assert not (project / "cuda.scan.json").exists()


def test_the_command_can_fail_on_a_severity(project, monkeypatch):
    install(project, "grype", GRYPE, version="grype 0.104.0")
    monkeypatch.setenv("PATH", f"{project / 'tools'}:{os.environ['PATH']}")
    monkeypatch.chdir(project)
    done = CliRunner().invoke(cli, ["image", "scan", "--lock", "cuda.lock.toml"])
    assert done.exit_code == 0, done.output
    assert "critical  torch 2.14.1  CVE-2026-1  fixed in 2.14.2" in done.output
    done = CliRunner().invoke(
        cli, ["image", "scan", "--lock", "cuda.lock.toml", "--fail-on", "high", "--json"], standalone_mode=False
    )
    assert json.loads(done.output)["data"]["counts"]["critical"] == 1
    assert done.return_value == 22
