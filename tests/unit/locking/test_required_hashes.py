"""`lock --require-hashes` and [policy] `packages.*.wheel-proof`; `lock --check --spec-only`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import HashesUnproved
from hpcenv.locking import required_hashes
from hpcenv.project.lockfile import WheelTable
from hpcenv.project.workspace import read_lockfile

SEEDS = Path(__file__).resolve().parents[2] / "fuzz" / "seeds" / "lockfile"


def locked(policy: dict[str, str] | None = None, **proofs: str | None) -> Any:
    base = read_lockfile(SEEDS / "host.lock.toml")
    dists = tuple(
        base.packages.dist[0].model_copy(
            update={"name": name, "version": "1.0", "wheel": wheel(proof), "source": None, "reason": None}
        )
        for name, proof in proofs.items()
    )
    packages = base.packages.model_copy(update={"dist": dists})
    return base.model_copy(update={"packages": packages, "policy": policy or {}})


def wheel(proof: str | None) -> WheelTable | None:
    return None if proof is None else WheelTable(filename="x.whl", sha256="0" * 64, index="pypi", proof=proof)


def names(lock: Any, *, every: bool) -> list[str]:
    return [dist.name for dist in required_hashes.unproved(lock, every=every)]


def test_a_proof_that_compared_nothing_is_none() -> None:
    lock = locked(a="record", b="embedded-lock", c="index-only", d="none", e=None, f="claimed", g="direct-url")
    assert names(lock, every=True) == ["c", "d", "e", "f"]
    assert names(lock, every=False) == []


def test_the_policy_asks_for_some_or_all() -> None:
    assert names(locked({"packages.*.wheel-proof": "must"}, a="record", b=None), every=False) == ["b"]
    assert names(locked({"packages.b.wheel-proof": "must"}, a=None, b=None), every=False) == ["b"]
    assert names(locked({"packages.*.wheel-proof": "warn"}, a=None), every=False) == []


def test_each_package_is_listed_with_the_reason() -> None:
    lock = locked(a=None, b="index-only")
    with pytest.raises(HashesUnproved) as caught:
        required_hashes.require(lock, every=True, reasons={"a": "the index does not list it"}, hint="")
    assert caught.value.what == "the sha256 of the wheel is not confirmed for 2 packages"
    assert caught.value.why == (
        "a 1.0: the index does not list it\nb 1.0: the index has one file of this name, which was not compared"
    )


def test_a_long_list_is_cut() -> None:
    lock = locked(**{f"p{n}": None for n in range(25)})
    with pytest.raises(HashesUnproved) as caught:
        required_hashes.require(lock, every=True, reasons={}, hint="")
    assert caught.value.why.endswith("\nand 5 more")


def test_lock_ends_with_47_and_keeps_the_old_lockfile(project: Path, hpcenv: Any) -> None:
    path = project / "lockfiles" / "default.lock.toml"
    before = path.read_bytes()
    done = hpcenv("lock", "--require-hashes", "--no-wheels", "--json", cwd=project)

    assert (done.status, done.envelope["error"]["code"]) == (47, "hashes-unproved")
    assert "torch 2.13.0+cpu: " in done.envelope["error"]["why"]
    assert path.read_bytes() == before
    assert hpcenv("lock", "--check", "--require-hashes", cwd=project).status == 47


def test_the_policy_of_the_project_asks_too(project: Path, hpcenv: Any) -> None:
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text() + '[policy]\n"packages.*.wheel-proof" = "must"\n')
    assert hpcenv("lock", "--no-wheels", cwd=project).status == 47


def test_a_fresh_clone_is_checked_without_its_environment(project: Path, hpcenv: Any) -> None:
    """The Python that hpcenv.toml names is not there, nothing has been accepted, and nothing is started."""
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text().replace("/bin/python", "/nowhere/python"))
    done = hpcenv("lock", "--check", "--spec-only", cwd=project, accepts=False)

    assert done.status == 0, done
    assert "note: only hpcenv.toml was compared: the environment was not looked at" in done.stderr
    assert hpcenv("lock", "--check", cwd=project).status != 0

    spec.write_text(spec.read_text() + '[host]\ngpu = "h100"\n')
    done = hpcenv("lock", "--check", "--spec-only", cwd=project, accepts=False)
    assert done.status == 7, done
    assert "gpu-changed" in done.stderr


def test_spec_only_is_a_part_of_the_check(project: Path, hpcenv: Any) -> None:
    assert hpcenv("lock", "--spec-only", cwd=project).status == 2
