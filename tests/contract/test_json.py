"""`--json`: one object with the same keys from every verb, whether it went well or not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcenv.cli._help import VERBS
from hpcenv.cli.bundle import VERBS as BUNDLE_VERBS
from hpcenv.cli.data import VERBS as DATA_VERBS
from hpcenv.cli.image import VERBS as IMAGE_VERBS
from hpcenv.cli.kernel import VERBS as KERNEL_VERBS
from hpcenv.cli.net import VERBS as NET_VERBS

KEYS = {"schema", "command", "ok", "data", "error"}
ERROR_KEYS = {"code", "what", "why", "hint", "commands", "exit_status"}

# How each verb fails in an empty folder, and with which status.
FAILURES: dict[str, tuple[tuple[str, ...], str]] = {
    "doctor": (("doctor", "--write"), "environment-unreadable"),
    "compat": (("compat", "--with", "torchvision"), "usage"),
    "completion": (("completion", "tcsh"), "usage"),
    "init": (("init", "--image", ""), "spec-invalid"),
    "lock": (("lock",), "spec-invalid"),
    "submit": (("submit", "train.py"), "spec-invalid"),
    "status": (("status",), "run-not-found"),
    "top": (("top",), "run-not-found"),
    "list": (("list",), "run-not-found"),
    "logs": (("logs", "x"), "run-not-found"),
    "run": (("run",), "spec-invalid"),
    "attach": (("attach", "x"), "run-not-found"),
    "wait": (("wait", "x"), "run-not-found"),
    "cancel": (("cancel", "x"), "run-not-found"),
    "rerun": (("rerun", "x"), "run-not-found"),
    "clean": (("clean", "x"), "run-not-found"),
    "stacks": (("stacks", "x"), "run-not-found"),
    "report": (("report",), "run-not-found"),
    "diagnose": (("diagnose", "x"), "run-not-found"),
    "usage": (("usage",), "run-not-found"),
    "export": (("export", "requirements"), "spec-invalid"),
    "verify": (("verify",), "spec-invalid"),
    "explain": (("explain", "torch.vresion"), "usage"),
    "diff": (("diff", "a", "b"), "usage"),
    "reproduce": (("reproduce", "a"), "run-not-found"),
    "compare": (("compare", "a", "b"), "run-not-found"),
    "site": (("site", "nosuch"), "spec-invalid"),
    "data fetch": (("data", "fetch"), "spec-invalid"),
    "data list": (("data", "list", "--trust", "nosuchuser", "--store", "."), "usage"),
    "data resolve": (("data", "resolve", "a/b/c"), "usage"),
    "net explain": (("net", "explain", "--from", "nosuch.json"), "record-invalid"),
    "net diff": (("net", "diff", "a", "b"), "run-not-found"),
    "bundle make": (("bundle", "nosuch"), "run-not-found"),
    "bundle verify": (("bundle", "verify", "nosuch"), "file-unusable"),
    "bundle unpack": (("bundle", "unpack", "nosuch"), "file-unusable"),
    "image pull": (("image", "pull", "docker://UPPER CASE"), "spec-invalid"),
    "image build": (("image", "build"), "spec-invalid"),
    "image verify": (("image", "verify", "nosuch.sif"), "environment-unreadable"),
    "image inspect": (("image", "inspect", "nosuch.sif"), "environment-unreadable"),
    "image list": (("image", "list", "--trust", "nosuchuser", "--store", "."), "usage"),
    "image inspect --path": (("image", "inspect", "--path", "x"), "image-unavailable"),
    "image prune": (("image", "prune", "--store", "."), "file-unusable"),
    "image init": (("image", "init", "--torch", "2.13.0", "--cuda", "12.8"), "spec-invalid"),
    "image refresh": (("image", "refresh", "nosuch"), "spec-invalid"),
    "kernel install": (("kernel", "install"), "spec-invalid"),
    "image lint": (("image", "lint", "nosuch"), "file-unusable"),
    "session start": (("session", "start", "x"), "spec-invalid"),
    "session open": (("session", "open", "x"), "run-not-found"),
}


def check(done: Any, *, command: str, ok: bool) -> dict[str, Any]:
    envelope: dict[str, Any] = done.envelope
    assert set(envelope) == KEYS
    assert (envelope["schema"], envelope["command"], envelope["ok"]) == (1, command, ok)
    if envelope["error"] is not None:
        assert set(envelope["error"]) == ERROR_KEYS
        assert envelope["error"]["exit_status"] == done.status
    return envelope


# What ssh and people read of `session connect`, `session ssh-config` and `shell` is no JSON.
EVERY = [verb for verb in VERBS if verb not in ("bundle", "data", "image", "kernel", "net", "session", "shell")]
EVERY += ["session start", "session open"]
EVERY += [f"kernel {verb}" for verb in KERNEL_VERBS]
EVERY += [f"image {verb}" for verb in IMAGE_VERBS] + [f"net {verb}" for verb in NET_VERBS]
EVERY += [f"data {verb}" for verb in DATA_VERBS]
EVERY += [f"bundle {verb}" for verb in BUNDLE_VERBS]


@pytest.mark.parametrize("verb", EVERY)
def test_an_error_of_a_verb(verb: str, hpcenv: Any, tmp_path: Path) -> None:
    words, code = FAILURES[verb]
    done = hpcenv(*words, "--json", cwd=tmp_path)
    envelope = check(done, command=verb, ok=False)
    assert envelope["error"]["code"] == code
    assert envelope["data"] is None
    assert done.stderr == ""


@pytest.mark.parametrize("verb", EVERY)
def test_a_usage_error_of_a_verb(verb: str, hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv(*verb.split(), "--nosuch", "--json", cwd=tmp_path)
    assert done.status == 2
    assert check(done, command=verb, ok=False)["error"]["code"] == "usage"


@pytest.mark.parametrize("words", [("--json",), ("nosuch", "--json"), ("--json", "lock")])
def test_a_usage_error_before_any_verb(words: tuple[str, ...], hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv(*words, cwd=tmp_path)
    assert done.status == 2
    assert set(done.envelope) == KEYS


def test_json_after_the_dashes_is_the_scripts(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("submit", "train.py", "--", "--json", cwd=tmp_path)
    assert done.stdout == ""
    assert done.stderr.startswith("error[spec-invalid]")


def test_the_story_of_a_run_as_json(hpcenv: Any, project: Path) -> None:
    """lock, submit, status, logs, report, cancel: the success of every verb but init."""
    locked = check(hpcenv("lock", "--json", cwd=project), command="lock", ok=True)
    assert locked["data"]["changed"] is False
    assert re.fullmatch("hpc2-[0-9a-f]{12}", locked["data"]["fingerprint"])
    assert check(hpcenv("lock", "--check", "--json", cwd=project), command="lock", ok=True)["data"]["reasons"] == []

    words = ("submit", "train.py", "--nproc", "1", "--name", "story", "--json")
    plan = check(hpcenv(*words, "--dry-run", cwd=project), command="submit", ok=True)
    assert plan["data"]["manifest"]["run"] == "story"
    assert not (project / "runs").exists()

    done = hpcenv(*words, "--wait", "--", "a b", "--json", "", b"\xff", cwd=project)
    assert done.status == 0, done.stderr
    submitted = check(done, command="submit", ok=True)
    assert submitted["data"]["status"]["state"] == "completed"

    status = check(hpcenv("status", "--json", cwd=project), command="status", ok=True)
    assert status["data"]["exit_status"] == 0
    logs = check(hpcenv("logs", "story", "--json", cwd=project), command="logs", ok=True)
    assert "TRAINS ['a b', '--json', '', '\\udcff']" in logs["data"]["lines"]
    report = check(hpcenv("report", "--lines", "0", "--json", cwd=project), command="report", ok=True)
    assert report["data"]["last_lines"] == []
    assert (
        check(hpcenv("cancel", "story", "--json", cwd=project), command="cancel", ok=True)["data"]["state"]
        == "completed"
    )


def test_init_as_json(hpcenv: Any, tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    done = hpcenv("init", "--json", cwd=folder, environ={"HOME": str(tmp_path)})
    assert check(done, command="init", ok=True)["data"] == {"image": "host", "path": str(folder / "hpcenv.toml")}


def test_a_stale_lockfile_is_data_and_an_error(hpcenv: Any, project: Path) -> None:
    (project / "hpcenv.toml").write_text((project / "hpcenv.toml").read_text() + '[policy]\n"system.glibc" = "must"\n')
    done = hpcenv("lock", "--check", "--json", cwd=project)
    envelope = check(done, command="lock", ok=False)
    assert done.status == 7
    assert envelope["error"]["code"] == "lockfile-stale"
    assert [reason["name"] for reason in envelope["data"]["reasons"]] == ["policy-changed"]
