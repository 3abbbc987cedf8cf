"""hadolint's findings become ours, and its absence is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcenv.errors import ToolFailed
from hpcenv.recipes import hadolint
from hpcenv.recipes.lint import lint

AT = "@sha256:" + "a" * 64
ENVIRON = {"PATH": "/usr/bin:/bin"}
FABRIC = "RUN dnf install -y rdma-core-1 && dnf clean all\n"
DOCKERFILE = f"FROM rockylinux:9{AT}\n{FABRIC}RUN dnf install -y gcc-1\nUSER root\n"


@pytest.fixture
def no_hadolint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The folder of this Python is searched after PATH.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def findings(folder: Path, text: str, **options: object) -> list[tuple[str, str, int | None]]:
    (folder / "Dockerfile").write_text(text)
    result = lint(["Dockerfile"], here=folder, environ=ENVIRON, **options)  # type: ignore[arg-type]
    assert result.generic_rules == {"Dockerfile": "run"}
    return [(one.rule, one.severity, one.line) for one in result.findings if one.allowed is None]


def test_findings_have_hadolints_codes_lines_and_severities(tmp_path: Path) -> None:
    assert findings(tmp_path, DOCKERFILE) == [
        ("hadolint:DL3040", "warn", 3),
        ("hadolint:DL3002", "warn", 4),
        ("hadolint:DL3066", "info", 4),
    ]


def test_a_finding_of_both_is_reported_once(tmp_path: Path) -> None:
    text = f"FROM rockylinux:latest\n{FABRIC}ENV HF_TOKEN=abc\nFROM --platform=linux/amd64 rockylinux\n{FABRIC}"
    rules = [rule for rule, _, line in findings(tmp_path, text) if line in (1, 3, 4)]
    assert sorted(rules) == ["base-floating", "base-floating", "hadolint:DL3029", "secret-in-environment"]


def test_comments_and_options_accept_hadolints_rules(tmp_path: Path) -> None:
    text = DOCKERFILE.replace(
        "USER", "# hpcenv: allow hadolint:DL3002 Apptainer only\n# hpcenv: allow hadolint:DL3066 x\nUSER"
    )
    text = text.replace("RUN dnf install -y gcc", "# hadolint ignore=DL3040\nRUN dnf install -y gcc")
    assert findings(tmp_path, text) == []
    assert "hadolint:DL3002" not in str(findings(tmp_path, DOCKERFILE, allow=["hadolint:DL3002=test"]))


def test_the_users_configuration_counts(tmp_path: Path) -> None:
    (tmp_path / ".hadolint.yaml").write_text("ignored: [DL3002]\noverride: {error: [DL3040]}\n")
    found = findings(tmp_path, DOCKERFILE)
    assert ("hadolint:DL3040", "error", 3) in found
    assert "DL3002" not in str(found)


@pytest.mark.usefixtures("no_hadolint")
def test_without_hadolint_the_own_rules_run_and_the_result_says_so(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.replace(AT, ""))
    result = lint(["Dockerfile"], here=tmp_path, environ=ENVIRON)
    assert [one.rule for one in result.findings] == ["base-no-digest"]
    assert result.generic_rules == {"Dockerfile": "hadolint is not installed"}


def test_definition_files_are_not_hadolints(tmp_path: Path) -> None:
    (tmp_path / "x.def").write_text(f"Bootstrap: docker\nFrom: a{AT}\n%post\n    dnf install rdma-core\n")
    result = lint(["x.def"], here=tmp_path, environ=ENVIRON)
    assert result.findings == ()
    assert result.generic_rules == {"x.def": "hadolint reads Dockerfiles only"}


def test_a_dockerfile_that_hadolint_cannot_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM rockylinux:9{AT}\n{FABRIC}RUN <<EOF\ntrue\nEOF\nUSER 1\n")
    result = lint(["Dockerfile"], here=tmp_path, environ=ENVIRON)
    assert [(one.rule, one.severity) for one in result.findings] == [("hadolint:DL1000", "warn")]
    assert result.generic_rules == {"Dockerfile": "hadolint cannot read it"}


def fake(folder: Path, script: str) -> dict[str, str]:
    program = folder / "bin" / "hadolint"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/usr/bin:/bin"}


@pytest.mark.parametrize("script", ["echo sorry", "exit 3", "echo '[{}]'", "echo '[1]'"])
def test_a_hadolint_that_fails_is_an_error(tmp_path: Path, script: str) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    with pytest.raises(ToolFailed, match="hadolint"):
        lint(["Dockerfile"], here=tmp_path, environ=fake(tmp_path, script))


def test_a_wrong_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".hadolint.yaml").write_text("bad: [\n")
    with pytest.raises(ToolFailed, match="reported a problem") as caught:
        findings(tmp_path, DOCKERFILE)
    assert ".hadolint.yaml" in (caught.value.why or "")


def test_the_path_wins_over_the_folder_of_python(tmp_path: Path) -> None:
    environ = fake(tmp_path, "echo '[]'")
    assert hadolint.find(environ) == str(tmp_path / "bin" / "hadolint")
    assert hadolint.find(ENVIRON) == str(Path(sys.executable).parent / "hadolint")


def command(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # A link to Python has no hadolint beside it.
    (folder / "elsewhere").mkdir(exist_ok=True)
    python = folder / "elsewhere" / "python"
    if not python.exists():
        python.symlink_to(sys.executable)
    paths = f"import sys; sys.path[:0] = {sys.path!r}; sys.executable = {str(python)!r}; "
    program = paths + "from hpcenv.__main__ import main; sys.exit(main())"
    argv = [sys.executable, "-c", program, "image", "lint", *options]
    return subprocess.run(argv, cwd=folder, env=ENVIRON, capture_output=True, text=True, check=False)


def test_the_command_says_in_one_line_that_hadolint_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "x.def").write_text(f"Bootstrap: docker\nFrom: a{AT}\n%post\n    dnf install rdma-core\n")
    done = command(tmp_path, "Dockerfile", "x.def")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "generic rules not run: hadolint is not installed",
        "generic rules not run for x.def: hadolint reads Dockerfiles only",
        "2 checked: 0 error, 0 warn, 0 info",
    ]
    data = json.loads(command(tmp_path, "Dockerfile", "--json").stdout)["data"]
    assert data["generic_rules"] == {"Dockerfile": "hadolint is not installed"}
