"""What torch and Triton compile on a host environment is kept by user and fingerprint, or by the run."""

import dataclasses
import os

import pytest

from hpcenv.launch.compiled_caches import NAMES
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import DeterminismOptions, Setting
from hpcenv.records.verdict import NodeSettings

SHOW = 'echo "$TORCHINDUCTOR_CACHE_DIR|$TRITON_CACHE_DIR|$TORCH_EXTENSIONS_DIR"'


@pytest.fixture
def places(run):
    """Start the ranks, and return the three folders that they get."""

    def started(program=SHOW, *, environ=None, **changes):
        run.save(**{"fingerprint": "hpc1-aaaa", **changes})
        run.open_gate()
        run.torchrun(program)
        done = run.step("task", **(environ or {}))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split("|")

    return started


def test_each_fingerprint_has_its_own_folder_and_the_same_one_the_same(places, run):
    mine = run.tmp / f"hpcenv-{os.geteuid()}"
    first = places()
    assert first == [str(mine / "compiled/hpc1-aaaa" / name) for name in ("torchinductor", "triton", "torch")]
    assert mine.stat().st_mode & 0o777 == 0o700
    assert places() == first
    other = places(fingerprint="hpc1-bbbb")
    assert not set(other) & set(first)


@pytest.mark.parametrize("why", ["bitwise", "no fingerprint", "folder of another kind", "others may write"])
def test_a_run_that_may_not_share_one_has_its_own(places, run, why):
    changes = {}
    if why == "bitwise":
        changes["determinism"] = DeterminismOptions(profile="bitwise")
    elif why == "no fingerprint":
        changes["fingerprint"] = ""
    elif why == "folder of another kind":
        (run.tmp / f"hpcenv-{os.geteuid()}").symlink_to(run.base)
    else:
        (run.tmp / f"hpcenv-{os.geteuid()}").mkdir()
        (run.tmp / f"hpcenv-{os.geteuid()}").chmod(0o777)
    found = places(**changes)
    assert all(place.startswith(str(run.folder.home_of("n1"))) for place in found), found


def test_what_the_user_has_chosen_stays(places, run):
    shell = {name: f"/shell/{name}" for name in NAMES}
    chosen = places(environ=shell, pass_env=("TORCHINDUCTOR_CACHE_DIR",))
    assert chosen[::2] == ["/shell/TORCHINDUCTOR_CACHE_DIR", "/shell/TORCH_EXTENSIONS_DIR"]
    run.open_gate()
    path = run.folder.env_of("n1")
    setting = Setting(name="TRITON_CACHE_DIR", value="/mine", origin="--env")
    save_record(dataclasses.replace(load_record(NodeSettings, path), settings=(setting,)), path)
    assert run.step("task").stdout.split("|")[1] == "/mine"


def test_compiled_code_of_an_earlier_run_with_the_same_fingerprint_is_used_and_not_checked(places):
    first = places('mkdir -p "$TRITON_CACHE_DIR"; echo other > "$TRITON_CACHE_DIR/kernel.cubin"; echo "||"')
    assert first == ["", "", ""]
    assert places('cat "$TRITON_CACHE_DIR/kernel.cubin"') == ["other"]
