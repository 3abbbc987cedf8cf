"""`hpcenv reproduce`: proofs, rungs, cost, the copy of the code, hostile run folders. Runs were recorded on the testbed."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import FileUnusable, UsageError, WouldOverwrite
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.code_listing import Listing, digest_of
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.attainable import expect, expect_after
from hpcenv.reproduction.code_copy import copy_code
from hpcenv.reproduction.compare import Steps, compare_runs
from hpcenv.reproduction.cost import estimate
from hpcenv.reproduction.reproduction import find_target, verdict_of
from hpcenv.reproduction.run_record import read_record
from hpcenv.reproduction.rungs import _without_cluster, plan_rung
from hpcenv.submission.request import SubmitOptions

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests" / "recorded_runs" / "table-1"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    shutil.copytree(RECORDED, tmp_path / "table-1", symlinks=True)
    return RunFolder(tmp_path / "table-1")


def proofs(run: RunFolder) -> dict[str, tuple[str, str]]:
    found = find_target(run.path.parent, str(run.path)).proofs()
    keys = ("lockfile is", "layers", "manifest has", "copy of the code", "facts of all", "every rank")
    return {key: next((one.result, one.why) for one in found if key in one.what) for key in keys}


# -- rung 0 -------------------------------------------------------------------------------


def test_rung_0_needs_no_slurm_no_container_and_no_gpu(run, hpcenv, tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()
    done = hpcenv("reproduce", str(run.path), cwd=tmp_path, environ={"PATH": str(empty), "HOME": str(tmp_path)})
    assert done.status == 0, done.stderr
    assert done.stdout.startswith("proved from the files: 5 of 6 statements")
    assert max(map(len, done.stdout.splitlines())) <= 80
    page = json.loads(hpcenv("reproduce", str(run.path), "--json", cwd=tmp_path).stdout)
    assert page["ok"] and page["data"]["verdict"] == "proved" and page["data"]["cost"]["nodes"] == 0


def test_the_recorded_run_is_proved(run):
    found = proofs(run)
    assert {key: result for key, (result, _) in found.items()} == {
        "lockfile is": "proved", "layers": "unknown", "manifest has": "proved", "copy of the code": "proved",
        "facts of all": "proved", "every rank": "proved",
    }  # fmt: skip
    assert "match on 2 nodes" in found["facts of all"][1]


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_an_edited_lockfile_differs(run):
    edit(run.lockfile, '"2.13.0+cpu"', '"2.13.1+cpu"')
    found = proofs(run)
    assert found["lockfile is"][0] == "differs" and found["manifest has"][0] == "differs"


def test_changed_code_differs_and_missing_code_is_unknown(run):
    edit(run.source / "train.py", "default=0.02", "default=0.2")
    assert proofs(run)["copy of the code"] == ("differs", "changed: source/train.py")
    (run.source / "train.py").unlink()
    assert proofs(run)["copy of the code"][0] == "unknown"


def test_a_list_that_was_written_for_changed_code_differs(run):
    edit(run.source / "train.py", "default=0.02", "default=0.2")
    listed = load_record(Listing, run.listing)
    from hpcenv.reproduction.proofs import file_sha256

    files = {**listed.files, "source/train.py": file_sha256(run.source / "train.py")}
    save_record(Listing(schema=1, files=files), run.listing)
    assert "is not the list in the manifest" in proofs(run)["copy of the code"][1]


def test_facts_that_give_another_verdict_differ(run):
    edit(run.facts_of("n2"), '"2.13.0+cpu"', '"2.12.0+cpu"')
    result, why = proofs(run)["facts of all"]
    assert result == "differs" and "judged again it is mismatch" in why


def test_facts_that_are_not_here_or_that_a_newer_rule_needs_prove_nothing(run):
    run.facts_of("n2").unlink()
    assert proofs(run)["facts of all"][0] == "unknown"


def test_a_rank_without_losses_differs(run):
    assert proofs(run)["every rank"] == ("proved", "4 ranks, up to step 30")
    run.metrics_of(0, 3).unlink()
    assert proofs(run)["every rank"] == ("differs", "ranks 3 have none")
    shutil.rmtree(run.metrics)
    assert proofs(run)["every rank"][0] == "unknown"


def test_a_lockfile_alone_is_proved_and_not_repeated(run, hpcenv, tmp_path):
    alone = tmp_path / "paper.lock.toml"
    shutil.copy(run.lockfile, alone)
    assert hpcenv("reproduce", str(alone), cwd=tmp_path).status == 0
    done = hpcenv("reproduce", str(alone), "--rung", "3", cwd=tmp_path)
    assert done.status == 2 and "names an environment and no command" in done.stderr
    edit(alone, '"2.13.0+cpu"', '"2.13.1+cpu"')
    assert hpcenv("reproduce", str(alone), cwd=tmp_path).status == 41


def test_a_damaged_archive_is_refused_also_where_it_was_unpacked_before(run, hpcenv, tmp_path):
    assert hpcenv("bundle", "make", str(run.path), "-o", "b.zip", "--author", "Doe, Jane", cwd=tmp_path).status == 0
    reader = tmp_path / "reader"
    reader.mkdir()
    assert hpcenv("reproduce", "../b.zip", cwd=reader).status == 0
    with zipfile.ZipFile(tmp_path / "b.zip") as good, zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad:
        for info in good.infolist():
            bad.writestr(info, good.read(info) + b" " * info.filename.endswith("manifest.json"))
    done = hpcenv("reproduce", "../bad.zip", cwd=reader)
    assert done.status == 45 and "'manifest.json' was changed" in done.stderr


def test_an_unpacked_bundle_that_was_edited_proves_nothing(run, hpcenv, tmp_path):
    assert hpcenv("bundle", "make", str(run.path), "-o", "b.zip", "--author", "Doe, Jane", cwd=tmp_path).status == 0
    reader = tmp_path / "reader"
    reader.mkdir()
    assert hpcenv("reproduce", "../b.zip", cwd=reader).status == 0
    assert hpcenv("reproduce", "table-1", cwd=reader).status == 0
    sums = reader / "table-1" / "SHA256SUMS"
    edit(reader / "table-1" / "manifest.json", '"run"', ' "run"')
    done = hpcenv("reproduce", "table-1", cwd=reader)
    assert done.status == 45 and "the checksums in SHA256SUMS are not those of manifest.json" in done.stderr
    sums.chmod(0o644)
    sums.write_text(sums.read_text() + f"{'0' * 64}  ../outside\n")
    assert "../outside" in hpcenv("reproduce", "table-1", cwd=reader).stderr


PUBLISHED = "the files are those of the published bundle"


def published(hpcenv: Any, reader: Path, *words: str) -> tuple[int, str | None, str | None]:
    """Return how `reproduce` ended, and what its page says of the files of a bundle: the result, and why."""
    done = hpcenv("reproduce", *words, "--json", cwd=reader)
    rows = [one for one in done.envelope["data"]["proofs"] if one["what"] == PUBLISHED] if done.status == 0 else []
    return (done.status, rows[0]["result"], rows[0]["why"]) if rows else (done.status, None, None)


def test_an_unpacked_bundle_without_its_checksums_was_compared_with_nothing(run, hpcenv, tmp_path):
    assert hpcenv("bundle", "make", str(run.path), "-o", "b.zip", "--author", "Doe, Jane", cwd=tmp_path).status == 0
    reader = tmp_path / "reader"
    reader.mkdir()
    status, result, why = published(hpcenv, reader, "../b.zip")
    assert (status, result) == (0, "proved") and re.fullmatch(r"[0-9]+ files have the sha256 that SHA256SUMS has", why)
    folder = reader / "table-1"
    for target in ("table-1", "table-1/lock.toml", "../b.zip"):
        assert published(hpcenv, reader, target) == (0, "proved", why)
    # A file that the checksums do not name, which hpcenv reads as a record.
    (folder / "metrics/attempt-1").mkdir()
    shutil.copy(folder / "metrics/attempt-0/rank-0.jsonl", folder / "metrics/attempt-1")
    assert published(hpcenv, reader, "table-1") == (
        0, "unknown", "SHA256SUMS does not name metrics/attempt-1/rank-0.jsonl",
    )  # fmt: skip
    shutil.rmtree(folder / "metrics/attempt-1")
    (folder / "extra.json").symlink_to("/etc/hostname")
    assert published(hpcenv, reader, "table-1") == (0, "unknown", "SHA256SUMS does not name extra.json")
    (folder / "extra.json").unlink()
    (folder / "SHA256SUMS").write_text("")
    assert published(hpcenv, reader, "table-1")[1] == "unknown"
    (folder / "SHA256SUMS").unlink()
    why = "SHA256SUMS is not in the folder: nothing was compared"
    assert published(hpcenv, reader, "table-1") == (0, "unknown", why)
    done = hpcenv("reproduce", "table-1", cwd=reader)
    assert "5 of 7 statements; unknown here: 2" in done.stdout and "nothing was compared" in done.stdout
    # The folder of a run was never published.
    assert published(hpcenv, reader, str(run.path)) == (0, None, None)


def test_an_edited_bundle_is_refused_also_by_the_path_of_its_lockfile(run, hpcenv, tmp_path):
    assert hpcenv("bundle", "make", str(run.path), "-o", "b.zip", "--author", "Doe, Jane", cwd=tmp_path).status == 0
    assert hpcenv("bundle", "unpack", "b.zip", "paper", cwd=tmp_path).status == 0
    edit(tmp_path / "paper/manifest.json", '"run"', ' "run"')
    for target in ("paper", "paper/lock.toml"):
        done = hpcenv("reproduce", target, cwd=tmp_path)
        assert done.status == 45 and "are not those of manifest.json" in done.stderr, target


def test_a_link_that_leads_elsewhere_differs(run):
    os.symlink("train.py", run.source / "link.py")
    relist(run, {**load_record(Listing, run.listing).files, "source/link.py": "link:train.py"})
    assert proofs(run)["copy of the code"][0] == "proved"
    (run.source / "link.py").unlink()
    os.symlink("hpcenv.toml", run.source / "link.py")
    assert proofs(run)["copy of the code"] == ("differs", "changed: source/link.py")


def test_a_copy_of_nothing_or_without_a_digest_is_unknown(run):
    relist(run, {})
    assert proofs(run)["copy of the code"] == ("unknown", "the list of the run's files is empty")
    data = json.loads(run.manifest.read_text())
    data["source"]["digest"] = ""
    run.manifest.write_text(json.dumps(data))
    assert proofs(run)["copy of the code"] == ("unknown", "the run recorded no digest of its code")


def test_a_verdict_on_no_node_proves_nothing(run):
    data = json.loads(run.started.read_text())
    run.started.write_text(json.dumps({**data, "nodes": []}))
    assert proofs(run)["facts of all"] == ("unknown", "no node is named in `started.json`")


def test_a_bundle_is_unpacked_and_proved(run, hpcenv, tmp_path):
    done = hpcenv("bundle", "make", str(run.path), "-o", "b.zip", "--author", "Doe, Jane", cwd=tmp_path)
    assert done.status == 0, done.stderr
    (tmp_path / "reader").mkdir()
    done = hpcenv("reproduce", "../b.zip", cwd=tmp_path / "reader")
    assert done.status == 0, done.stderr
    assert done.stdout.startswith("proved from the files: 6 of 7")
    assert os.listdir(tmp_path / "reader") == ["table-1"]
    again = hpcenv("reproduce", "../b.zip", cwd=tmp_path / "reader")
    assert (again.status, again.stdout) == (0, done.stdout) and "was unpacked before" in again.stderr
    edit(tmp_path / "reader/table-1/source/train.py", "default=0.02", "default=0.2")
    refused = hpcenv("reproduce", "../b.zip", cwd=tmp_path / "reader")
    assert refused.status == 17 and "`source/train.py` in it differs from the file in the bundle" in refused.stderr
    hint = re.search(r"hpcenv (bundle unpack \S+) FOLDER", refused.stderr)
    assert hint is not None
    assert hpcenv(*hint[1].split(), "other", cwd=tmp_path / "reader").status == 0
    assert hpcenv("reproduce", "other", cwd=tmp_path / "reader").status == 0


def test_what_is_no_bundle_is_refused_and_writes_nothing(hpcenv, tmp_path):
    (tmp_path / "a.zip").write_bytes(b"x")
    done = hpcenv("reproduce", "a.zip", cwd=tmp_path)
    assert done.status == 45 and os.listdir(tmp_path) == ["a.zip"], done.stderr


# -- the copy of the code -----------------------------------------------------------------


def relist(run: RunFolder, files: dict[str, str]) -> Manifest:
    save_record(Listing(schema=1, files=files), run.listing)
    data = json.loads(run.manifest.read_text())
    data["source"]["digest"] = digest_of(files)
    run.manifest.write_text(json.dumps(data))
    return load_record(Manifest, run.manifest)


def test_the_code_is_copied_once_and_found_again(run, tmp_path):
    manifest, target = load_record(Manifest, run.manifest), tmp_path / "code"
    copied = copy_code(run, manifest, target)
    assert (copied.left_out, copied.code.root) == ((), target)
    assert sorted(copied.code.files) == ["hpcenv.toml", "train.py"]
    assert sorted(path.name for path in target.iterdir()) == ["hpcenv.toml", "train.py"]
    assert copy_code(run, manifest, target) == copied
    (target / "train.py").write_text("")
    with pytest.raises(WouldOverwrite, match=r"train\.py"):
        copy_code(run, manifest, target)


@pytest.mark.parametrize(
    "path", ["source/../../out", "source/a/../../../out", "/tmp/out", "source//out", "source/./x", "source/\0"]
)  # fmt: skip
def test_a_path_that_climbs_out_copies_nothing(path, run, tmp_path):
    listed = load_record(Listing, run.listing).files
    manifest = relist(run, {**listed, path: "0" * 64})
    with pytest.raises((FileUnusable, UsageError)):
        copy_code(run, manifest, tmp_path / "inner" / "code")
    assert not (tmp_path / "inner" / "code").exists() and not (tmp_path / "out").exists()
    assert proofs(run)["copy of the code"][0] == "differs"


def test_a_link_that_leads_out_is_left_out_and_a_linked_folder_is_not_read(run, tmp_path):
    listed = load_record(Listing, run.listing).files
    links = {"source/secret": "link:../../../etc/passwd", "source/abs": "link:/etc", "source/ok": "link:train.py"}
    manifest = relist(run, {**listed, **links})
    left_out = copy_code(run, manifest, tmp_path / "code").left_out
    assert [line.partition(":")[0] for line in left_out] == ["source/abs", "source/secret"]
    assert os.readlink(tmp_path / "code" / "ok") == "train.py"
    os.symlink("/etc", run.source / "etc")
    manifest = relist(run, {**listed, "source/etc/passwd": "0" * 64})
    with pytest.raises(FileUnusable, match="leads out"):
        copy_code(run, manifest, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_other_content_than_listed_copies_nothing(run, tmp_path):
    (run.source / "train.py").write_text("import os\n")
    with pytest.raises(FileUnusable, match="not the file"):
        copy_code(run, load_record(Manifest, run.manifest), tmp_path / "code")
    assert not (tmp_path / "code").exists()


# -- rungs, cost, expectation -------------------------------------------------------------


def test_the_options_of_the_authors_cluster_are_left_out():
    old = SubmitOptions(script="t.py", partition="gpu", account="paper", nodes=2, env={"A": "1"}, sbatch={"wckey": "x"})
    options, words = _without_cluster(old)
    assert (options.partition, options.account, dict(options.sbatch)) == (None, None, {})
    assert options.env == {"A": "1"} and set(words) == {"--partition gpu", "--account paper", "--sbatch wckey=x"}


def plan(rung: Any, given: dict[str, Any] | None = None, **more: Any) -> Any:
    words: dict[str, Any] = {
        "shape": (4, 2),
        "args": ("--lr", "1"),
        "one_node": ("--acc", "{factor}"),
        "steps": 20,
        **more,
    }
    return plan_rung(SubmitOptions(script="t.py", nodes=4, nproc=2), given or {}, rung, **words)


def test_rung_3_is_the_run_itself():
    found = plan(3)
    assert (found.options.nodes, found.options.nproc, found.options.args, found.steps) == (4, 2, ("--lr", "1"), None)


def test_rung_1_keeps_the_global_batch():
    found = plan(1)
    assert (found.options.nodes, found.factor, found.world_size) == (1, 4, 2)
    assert found.options.args == ("--lr", "1", "--acc", "4")
    assert plan(1, {"nproc": 1}).options.args[-1] == "8"


def test_rung_1_is_refused_where_the_batch_would_change():
    with pytest.raises(UsageError, match=r"one-node = \[\"--accumulate\""):
        plan(1, one_node=())
    with pytest.raises(UsageError, match="not a multiple of 3"):
        plan(1, {"nproc": 3})
    assert plan(1, shape=(1, 2), one_node=()).options.args == ("--lr", "1")  # it was on one node already


def test_the_cost_is_estimated_from_the_record_and_unknown_stays_unknown(run):
    target = find_target(run.path.parent, str(run.path))
    assert target.record is not None
    whole = estimate(target.record, target.locked(), nodes=2, steps=None, has_image=True)
    assert whole.minutes is not None and 0.1 < whole.minutes < 3 and whole.gpu_hours == 0.0 and whole.fetch_bytes == 0
    run.finished.unlink()
    shutil.rmtree(run.exits)
    again = find_target(run.path.parent, str(run.path))
    assert again.record is not None
    assert estimate(again.record, None, nodes=2, steps=5, has_image=False).minutes is None
    assert estimate(again.record, None, nodes=2, steps=5, has_image=False).fetch_bytes is None


def test_what_can_be_expected_of_other_hardware(run):
    first = find_target(run.path.parent, str(run.path)).record
    assert first is not None
    assert expect(first, world_size=4).best == "equal"
    assert "2 ranks in place of 4" in expect(first, world_size=2).reasons[0]
    assert first.lock is not None
    unread = replace(first, determinism={}, lock=replace(first.lock, determinism="off"))
    assert expect(unread, world_size=4).reasons == ("no rank recorded which determinism profile the run used",)
    assert expect_after(first, first).best == "equal"
    edit(run.facts_of("n1"), '"host.machine": "x86_64"', '"host.machine": "aarch64"')
    path = run.determinism_of(0, 0)
    read = json.loads(path.read_text())
    for switch in read["switches"]:
        if switch["name"] == "torch.num-threads":
            switch["at_end"] = "7"
    path.write_text(json.dumps(read))
    other = find_target(run.path.parent, str(run.path)).record
    assert other is not None
    found = expect_after(first, other)
    assert found.best == "within"
    assert any("processor architecture" in text for text in found.reasons)
    assert any("torch.num-threads: 1 -> 7" in text for text in found.reasons)


# -- before anything is submitted ---------------------------------------------------------


def test_a_dry_run_says_cost_and_what_must_be_accepted_and_submits_nothing(run, hpcenv, tmp_path):
    done = hpcenv("reproduce", str(run.path), "--rung", "3", "--dry-run", cwd=tmp_path, accepts=False)
    assert done.status == 0, done.stderr
    assert "what it costs:" in done.stdout and "python = /shared/hostenv/bin/python" in done.stdout
    assert not (tmp_path / "table-1-code" / "runs").exists()


def test_without_acceptance_nothing_is_submitted(run, hpcenv, tmp_path):
    data = json.loads(run.request.read_text())
    data["options"]["env"] = {"LD_PRELOAD": "/evil.so"}
    run.request.write_text(json.dumps(data))
    done = hpcenv("reproduce", str(run.path), "--rung", "3", cwd=tmp_path, accepts=False)
    assert done.status == 29 and "LD_PRELOAD" in done.stderr
    assert not (tmp_path / "table-1-code" / "runs").exists()


def test_hostile_records_end_in_words(run, hpcenv, tmp_path):
    for path, content in (
        (run.manifest, "[" * 50000), (run.manifest, "{}"), (run.submission, '{"schema": 99}'), (run.manifest, "\x00" * 100),
    ):  # fmt: skip
        before = path.read_bytes()
        path.write_text(content)
        done = hpcenv("reproduce", str(run.path), cwd=tmp_path)
        assert done.status == 18, done.stderr
        path.write_bytes(before)
    edit(run.manifest, '"run": "table-1"', '"run": "\\u001b[2Jtable"')
    assert "\x1b" not in hpcenv("reproduce", str(run.path), cwd=tmp_path).stdout


# -- the verdict --------------------------------------------------------------------------


def judge(other: Path, rung: Any = 3, *, accumulated: bool = False) -> tuple[str, str, str, tuple[str, ...]]:
    """Return verdict, sentence, what was to be expected, and why, of a recorded run against `table-1`."""
    compared = compare_runs(other.parent, str(RECORDED), str(other), steps=Steps(last=None if rung == 3 else 20))
    expected = expect_after(read_record(RECORDED), read_record(other), compared.causes, accumulated=accumulated)
    verdict, sentence = verdict_of(compared, expected, rung)
    return verdict, sentence, expected.best, expected.reasons


def test_an_equal_run_is_reproduced(run):
    verdict, sentence, best, reasons = judge(run.path)
    assert (verdict, best, reasons) == ("reproduced-bitwise", "equal", ())
    assert sentence.startswith("reproduced, bitwise: equal to the last bit: 120 values")


def test_another_hyper_parameter_is_another_experiment():
    verdict, sentence, best, reasons = judge(RECORDED.parent / "other-lr")
    assert (verdict, best) == ("not-reproduced", "nothing")
    assert "it is another experiment: arguments: run.arguments:" in sentence and "0.021" in reasons[0]


def test_another_number_of_ranks_is_within_the_tolerance_if_the_authors_say_how():
    one_node = RECORDED.parent / "one-node"
    verdict, sentence, best, reasons = judge(one_node, 1, accumulated=True)
    assert (verdict, best) == ("reproduced-within", "within")
    assert "2 ranks in place of 4, with the same global batch by accumulation" in sentence
    # The same arguments typed by a user are another experiment.
    assert judge(one_node, 1)[2] == "nothing"


def test_a_package_that_was_changed_is_named_also_if_the_bits_are_equal(run):
    version = re.search(r'name = "numpy"\nversion = "([0-9.]+)"', run.lockfile.read_text())
    assert version is not None
    edit(run.lockfile, f'name = "numpy"\nversion = "{version[1]}"', 'name = "numpy"\nversion = "2.0.0"')
    for node in ("n1", "n2"):
        edit(run.facts_of(node), "sha256:7ddbb7af", "sha256:00000000")
    verdict, sentence, best, reasons = judge(run.path)
    assert (verdict, best) == ("reproduced-bitwise", "within")
    assert any("numpy" in reason and "2.0.0" in reason for reason in reasons)


def test_other_cpu_kernels_are_the_reason_that_the_sentence_names(run):
    path = run.determinism_of(0, 0)
    read = json.loads(path.read_text())
    for switch in read["switches"]:
        if switch["name"] == "torch.cpu-capability":
            switch["at_start"] = switch["after_first_step"] = switch["at_end"] = "DEFAULT"
    path.write_text(json.dumps(read))
    change_loss(run, 1e-7)
    verdict, sentence, best, _ = judge(run.path)
    assert (verdict, best) == ("reproduced-within", "within")
    assert re.search(r"the last bit was not to be expected: torch.cpu-capability: \w+ -> DEFAULT", sentence)


def test_results_that_nothing_explains_are_called_that(run):
    change_loss(run, 0.5)
    verdict, sentence, best, _ = judge(run.path)
    assert (verdict, best) == ("not-reproduced", "equal")
    assert sentence.endswith("; nothing that is recorded of the two runs explains it")


def change_loss(run: RunFolder, by: float) -> None:
    """Change the loss of rank 0 at step 7."""
    path = run.metrics_of(0, 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = next(one for one in lines if one["kind"] == "loss" and one["step"] == 7)
    line["value"] = struct.unpack("f", struct.pack("f", float.fromhex(line["value"]) * (1 + by)))[0].hex()
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def test_an_image_that_cannot_be_fetched_is_to_be_in_the_bundle(run, hpcenv, tmp_path):
    shutil.copy(ROOT / "lockfiles" / "default.lock.toml", run.lockfile)
    asked = read_lockfile(run.lockfile).asked
    project = tmp_path / "project"
    project.mkdir()
    (project / "hpcenv.toml").write_text(f'image = "{asked.image}"\nplatform = "{asked.platform}"\n')
    (project / "train.py").write_text((run.source / "train.py").read_text())
    done = hpcenv("reproduce", str(run.path), "--rung", "3", "--allow-changed", cwd=project)
    assert done.status == 10
    assert "ask the authors for a bundle with the image: `hpcenv bundle make RUN --with-sif FILE`" in done.stderr
