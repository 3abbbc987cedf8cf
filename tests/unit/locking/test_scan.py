"""`hpcenv image scan`: small programs play grype and osv-scanner; what is kept, and what is refused.

Their outputs have every field that the real ones have, with values of our own. The fields are those of
grype/presenter/models (anchore/grype, commit 4562c55, after 0.116.0) and pkg/models/results.go (google/osv-scanner,
commit add393a, after 2.5.0; the entries are those of the OSV schema). On 2026-11-23 the reader was run over all outputs
in the test data of these two commits: 6 of grype, 106 of osv-scanner; it read all of them.
"""

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


def grype_match(name: str, identifier: str, **about) -> dict:
    vulnerability = {
        "id": identifier,
        "dataSource": "https://advisories.example/1",
        "namespace": "github:language:python",
        "urls": [],
        "description": "text",
        "cvss": [{"source": "nvd", "type": "Primary", "version": "3.1", "vector": "CVSS:3.1/AV:N", "metrics": {}}],
        "knownExploited": [{"cve": "CVE-2026-1", "knownRansomwareCampaignUse": "Unknown"}],
        "epss": [{"cve": "CVE-2026-1", "epss": 0.1, "percentile": 0.5, "date": "2026-11-22"}],
        "cwes": [{"cve": "CVE-2026-1", "cwe": "CWE-502", "source": "nvd", "type": "Primary"}],
        "advisories": [],
        "risk": 1.5,
        **about,
    }
    details = {"type": "exact-direct-match", "matcher": "python-matcher", "searchedBy": {}, "found": {}}
    artifact = {
        "id": "0123456789abcdef",
        "name": name,
        "version": "2.14.1",
        "type": "python",
        "locations": [],
        "language": "python",
        "licenses": [],
        "cpes": [],
        "purl": f"pkg:pypi/{name}@2.14.1",
        "upstreams": [],
    }
    return {
        "vulnerability": vulnerability,
        "relatedVulnerabilities": [{"id": "CVE-2026-9", "dataSource": "https://advisories.example/9", "urls": []}],
        "matchDetails": [details],
        "artifact": artifact,
    }


GRYPE = {
    "matches": [
        grype_match("filelock", "GHSA-low", severity="Negligible", fix={"versions": [], "state": "unknown"}),
        grype_match(
            "torch",
            "CVE-2026-1",
            severity="Critical",
            fix={
                "versions": ["2.14.2"],
                "state": "fixed",
                "available": [{"version": "2.14.2", "date": "2026-11-01", "kind": "release"}],
            },
        ),
        grype_match("torch\u001b[31m", "CVE-2026-2", severity="odd\u0007", fix=None),
    ],
    "ignoredMatches": [
        {**grype_match("numpy", "CVE-2026-3", fix={"versions": [], "state": ""}), "appliedIgnoreRules": []}
    ],
    "source": {"type": "sbom-file", "target": "bom.cdx.json"},
    "distro": {"name": "", "version": "", "idLike": None},
    "descriptor": {
        "name": "grype",
        "version": "0.116.0",
        "configuration": {"fail-on-severity": ""},
        "db": {"status": {"schemaVersion": "v6.1.0", "built": "2026-11-22T08:00:00Z", "valid": True}, "providers": {}},
        "timestamp": "2026-11-23T09:00:00Z",
    },
}


def osv_entry(identifier: str, *, aliases=(), severity: str | None = None, fixed: str | None = None) -> dict:
    events = [{"introduced": "0"}, *([{"fixed": fixed}] if fixed else [])]
    ranges = [{"type": "ECOSYSTEM", "events": events}, {"type": "GIT", "events": [{"fixed": "abcdef"}]}]
    package = {"ecosystem": "PyPI", "name": "jinja2", "purl": "pkg:pypi/jinja2"}
    return {
        "schema_version": "1.7.3",
        "id": identifier,
        "modified": "2026-11-20T00:00:00Z",
        "published": "2026-11-01T00:00:00Z",
        "aliases": list(aliases),
        "summary": "text",
        "affected": [{"package": package, "ranges": ranges, "versions": ["3.1.6"], "database_specific": {}}],
        "severity": [{"type": "CVSS_V3", "score": "CVSS:3.1/AV:N"}],
        "database_specific": {"github_reviewed": True, **({"severity": severity} if severity else {})},
    }


# One vulnerability with entries of two lists; one that GitHub does not know; one of an older output, in no group; and a
# package that was made to do harm.
OSV = {
    "results": [
        {
            "source": {"path": "bom.cdx.json", "type": "sbom"},
            "packages": [
                {
                    "package": {"name": "jinja2", "version": "3.1.6", "ecosystem": "PyPI"},
                    "vulnerabilities": [
                        osv_entry("GHSA-a", aliases=("CVE-2026-4",), severity="MODERATE", fixed="3.1.7"),
                        osv_entry("PYSEC-2026-4", aliases=("CVE-2026-4", "GHSA-a"), fixed="3.1.7"),
                        osv_entry("PYSEC-b"),
                        osv_entry("PYSEC-c"),
                    ],
                    "groups": [
                        {"ids": ["GHSA-a", "PYSEC-2026-4"], "aliases": ["CVE-2026-4"], "max_severity": "9.8"},
                        {"ids": ["PYSEC-b"], "aliases": ["PYSEC-b"], "max_severity": "7.5"},
                    ],
                },
                {
                    "package": {"name": "jinjaa2", "version": "1", "ecosystem": "PyPI"},
                    "vulnerabilities": [osv_entry("MAL-2026-1")],
                    "groups": [{"ids": ["MAL-2026-1"], "aliases": ["MAL-2026-1"], "max_severity": ""}],
                },
                {"package": {"name": "sympy", "version": "1", "ecosystem": "PyPI", "deprecated": True}},
            ],
        }
    ],
    "experimental_config": {"licenses": {"summary": False, "allowlist": None}},
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
    assert kept["vulnerabilities"][0]["aliases"] == ["CVE-2026-9"]
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
        ("MAL-2026-1", "critical", ()),
        ("PYSEC-b", "high", ()),
        ("GHSA-a", "medium", ("3.1.7",)),
        ("PYSEC-c", "unknown", ()),
    ]
    assert result.vulnerabilities[2].aliases == ("CVE-2026-4", "PYSEC-2026-4")
    assert (result.count_from("high"), result.count_from("low"), result.count_from("unknown")) == (2, 3, 4)


def test_grype_comes_first_and_a_name_decides(project):
    install(project, "grype", {"matches": []}, version="grype 0.104.0")
    install(project, "osv-scanner", {"results": []}, version="osv-scanner version: 2.2.4")
    assert here(project).scanner == "grype 0.104.0"
    assert here(project, scanner="osv-scanner").scanner == "osv-scanner 2.2.4"


def test_grype_has_a_result_where_its_own_limit_is_exceeded(project):
    install(project, "grype", GRYPE, version="grype 0.116.0", status=2)
    assert len(here(project).vulnerabilities) == 3
    install(project, "grype", "1 error occurred", version="grype 0.116.0", status=1)
    with pytest.raises(ToolFailed):
        here(project)


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
    assert "GHSA-low (CVE-2026-9)" in done.output
    assert "unknown severity" not in done.output
    done = CliRunner().invoke(cli, ["image", "scan", "--lock", "cuda.lock.toml", "--fail-on", "low"])
    assert "--fail-on low does not count those of unknown severity" in done.output
    done = CliRunner().invoke(
        cli, ["image", "scan", "--lock", "cuda.lock.toml", "--fail-on", "high", "--json"], standalone_mode=False
    )
    assert json.loads(done.output)["data"]["counts"]["critical"] == 1
    assert done.return_value == 22
