"""Limits of a run on one machine: what systemd and the kernel take is said, and what they do not take, too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcenv.records.manifest import Manifest
from hpcenv.submission.local_limits import LocalScope, scope_for

Limit = Callable[..., LocalScope]
BOTH = 'echo "memory.max:68719476736"; echo "cpu.max:400000 100000"'


@pytest.fixture
def limit(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> Limit:
    """The limits of a run where systemd-run and loginctl answer so; without a text the program is not there."""

    def _limit(systemd: str = "", linger: str = "", **manifest: object) -> LocalScope:
        for name, script in (("systemd-run", systemd), ("loginctl", linger)):
            if script:
                (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
                (tmp_path / name).chmod(0o755)
        made = make_manifest(**{"cluster": "local", "nodes": 1, "cpus_per_task": 0, "gpus_per_node": 1, **manifest})
        # Only what the scripts need: this machine may have the real programs.
        (tmp_path / "sh").symlink_to("/bin/sh")
        return scope_for(made, {"PATH": str(tmp_path), "HOME": os.environ.get("HOME", "/")})

    return _limit


def test_both_limits_are_read_from_the_kernel(limit: Limit) -> None:
    scope = limit(BOTH, mem="64G", cpus_per_task=4, run="a")
    words = ("systemd-run", "--user", "--scope", "--quiet", "--description=hpcenv a", "--property=MemoryMax=64G")
    assert scope.argv == (*words, "--property=CPUQuota=400%", "--property=OOMPolicy=continue", "--")
    assert scope.notes == ("limited by a scope of systemd: 64G of memory", "limited by a scope of systemd: 4 CPUs")


def test_a_plain_number_is_mebibytes_as_for_sbatch(limit: Limit) -> None:
    assert "--property=MemoryMax=2048M" in limit(BOTH, mem="2048").argv


def test_a_controller_that_is_not_delegated_is_said(limit: Limit) -> None:
    scope = limit('echo "memory.max:68719476736"; echo "cpu.max:max 100000"', mem="64G", cpus_per_task=4)
    assert scope.notes[0] == "limited by a scope of systemd: 64G of memory"
    assert scope.notes[1] == "not limited: CPUs: the user's systemd may not set cpu.max on this machine"
    assert scope.argv


def test_an_older_systemd_without_the_policy_for_memory_is_used_without_it(limit: Limit) -> None:
    scope = limit(f'case "$*" in *OOMPolicy*) echo "Unknown assignment" >&2; exit 1;; esac; {BOTH}', mem="64G")
    assert scope.argv[-2:] == ("--property=MemoryMax=64G", "--")


@pytest.mark.parametrize(
    ("systemd", "why"),
    [("", "`systemd-run` is not on PATH"), ("echo Failed to connect to bus >&2; exit 1", "Failed to connect to bus")],
)
def test_without_a_systemd_of_the_user_nothing_is_limited(limit: Limit, systemd: str, why: str) -> None:
    scope = limit(systemd, mem="64G", cpus_per_task=4)
    assert scope.argv == ()
    assert [note.split(": ", 2)[:2] for note in scope.notes] == [["not limited", "memory"], ["not limited", "CPUs"]]
    assert all(why in note for note in scope.notes), scope.notes


def test_what_nobody_asked_to_limit_is_said_of_a_run_with_gpus(limit: Limit) -> None:
    words = ("not limited: memory (--mem limits it)", "not limited: CPUs (--cpus limits them)")
    assert limit(mem="0") == LocalScope(notes=words)


def test_a_run_without_gpus_and_limits_starts_as_in_any_shell(limit: Limit) -> None:
    assert limit(BOTH, gpus_per_node=0) == LocalScope()


def test_a_scope_that_ends_with_the_last_login_is_said(limit: Limit) -> None:
    assert limit(BOTH, "echo no", mem="64G").notes[-1].startswith("systemd ends this run when you log out everywhere")


def test_a_scope_that_outlives_the_login_needs_no_word(limit: Limit) -> None:
    assert not any("log out" in note for note in limit(BOTH, "echo yes", mem="64G").notes)
