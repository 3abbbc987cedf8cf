"""The list of what is not checked: each line has a test that changes the thing, and the verdict stays `match`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNS, CORPUS = "tests/unit/submission/test_not_checked.py", "tests/corpus/corpus_not_checked.py"

# How a line of the list begins -> the tests: a file, and words that name the test in it.
SHOWN_BY: dict[str, tuple[tuple[str, str], ...]] = {
    "files of the project that the copy only links to": ((RUNS, "test_a_file_that_the_copy_links_to_is_not_checked"),),
    "data that `[[data]]` does not name": ((RUNS, "test_data_that_no_table_names_are_not_checked"),),
    "with `--workdir live`": ((RUNS, "test_files_of_a_live_project_are_not_checked"),),
    "files of the run's own copy after the ranks": ((RUNS, "test_a_file_of_the_copy_that_changes_under_the_ranks_is"),),
    "entry points of an `.egg-info` folder": ((RUNS, "test_entry_points_beside_the_script_are_not_checked"),),
    "files of the project that hide a package of an image": (
        ("tests/unit/submission/test_hidden_names.py", "test_names_that_differ_from_the_distribution_and_editable"),
    ),
    "files of code outside the environment": (
        (CORPUS, "not-checked-module-below-pythonpath"),
        (CORPUS, "not-checked-module-in-a-folder-of-a-pth-file"),
        (CORPUS, "not-checked-module-behind-an-import-hook"),
    ),
    "files of an editable install that git does not track": ((CORPUS, "not-checked-data-of-an-editable-install"),),
    "files of a host environment between the check and the end": (
        ("tests/unit/facts/test_second_look.py", "test_a_changed_file_is_named_and_one_written_again_is_not"),
    ),
    "whether a script uses its GPUs": (
        ("tests/unit/runs/test_rank_gpus.py", "test_ranks_whose_first_backward_pass_ran_on_the_cpu_are_a_line"),
    ),
    "compiled files in `__pycache__`": ((CORPUS, "not-checked-compiled-file-that-fits-its-source"),),
    "data and programs in packages that no list names": (
        (CORPUS, "not-checked-data-that-no-list-names"),
        (CORPUS, "not-checked-headers-of-python"),
    ),
    "leftovers of editors, archives and pip": (
        ("tests/corpus/corpus_revision.py", "leftovers_of_editors_and_archives"),
    ),
    "libraries that code opens by itself": ((CORPUS, "not-checked-library-that-code-opens-by-itself"),),
    "language and time zone": (
        ("tests/corpus/corpus_harmless.py", "other_time_zone"),
        ("tests/corpus/corpus_harmless.py", "other_language"),
    ),
    "caches and settings below `$HOME`": ((CORPUS, "not-checked-caches-and-settings-below-home"),),
    "code that torch and Triton compiled": (
        (
            "tests/unit/launch/test_compiled_caches.py",
            "test_compiled_code_of_an_earlier_run_with_the_same_fingerprint_is_used_and_not_checked",
        ),
    ),
    "what a lockfile of an older revision does not cover": (
        ("tests/corpus/test_revision.py", "test_a_lockfile_of_revision_1_is_judged_by_its_own_rules"),
    ),
    "compilers on `PATH`": ((CORPUS, "not-checked-compiler-on-path-and-execute-bit"),),
}


def lines() -> list[str]:
    text = (ROOT / "docs" / "explanation" / "what-is-checked.md").read_text(encoding="utf-8")
    part = text.partition("hpcenv does not check these")[2].partition("\n\n")[2].partition("\n\n")[0]
    return re.findall(r"^- (.*)$", part, re.MULTILINE)


def test_each_line_has_a_test_and_each_test_a_line() -> None:
    found = lines()
    assert len(found) == len(SHOWN_BY)
    for line, start in zip(found, SHOWN_BY, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("start", SHOWN_BY)
def test_the_tests_exist(start: str) -> None:
    for file, name in SHOWN_BY[start]:
        assert re.search(rf'(def |name="){re.escape(name)}', (ROOT / file).read_text(encoding="utf-8")), (file, name)


def test_every_change_of_the_corpus_that_is_not_checked_has_a_line() -> None:
    names = set(re.findall(r'name="(not-checked-[a-z-]+)"', (ROOT / CORPUS).read_text(encoding="utf-8")))
    assert names == {name for tests in SHOWN_BY.values() for file, name in tests if file == CORPUS}
