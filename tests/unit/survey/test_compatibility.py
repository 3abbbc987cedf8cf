"""`hpcenv compat`: thirty questions with the vendors' answers; what is unknown is never called fine."""

import csv
import datetime as dt
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.cli._command_line import cli
from hpcenv.errors import SpecError, UsageError
from hpcenv.project import compatibility, toml_files
from hpcenv.survey.compatibility import CompatQuestion, ask, version_of

TABLE = compatibility.table()
TODAY = dt.date(2026, 11, 23)
QUESTIONS = toml_files.read(Path(__file__).with_name("compat_questions.toml"), error=SpecError)["question"]
WORDS = {"match": "yes", "mismatch": "no", "unknown": "unknown"}


PUBLIC = [
    line for line in Path(__file__).with_name("compat_public.tsv").read_text().splitlines() if not line.startswith("#")
]
# What no table row answers: who else than the default index builds 2.15, and cuda-compat on branches that have ended.
OPEN = {
    ("2.15.0+cu126", ""),
    ("2.11.0+cu130", "550.54.15"),
    ("2.11.0+cu130", "530.30.02"),
    ("2.11.0+cu130", "555.42.06"),
    # Those pages speak of the build. NVIDIA's list of GPUs has H200 from 550.90.07 on, and L4 from 525.105.17 on.
    ("2.9.1+cu128", "550.54.15"),
    ("2.11.0+cu126", "525.60.13"),
}


def asked(row):
    parts = ("gpu", "driver", "torch", "cuda", "python", "machine", "cuda-compat")
    packages = tuple((name, version) for name, version in row.get("packages", ()))
    return CompatQuestion(**{part.replace("-", "_"): row[part] for part in parts if part in row}, packages=packages)


def test_there_are_thirty_questions_with_sources():
    numbers = {row["number"].rstrip("b") for row in QUESTIONS}
    assert {str(n) for n in range(1, 31)} <= numbers
    assert all(row["source"] and row["read"].startswith("2026-") for row in QUESTIONS)


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: f"{row['number']}: {row['text']}")
def test_the_answer_is_that_of_the_vendor(row):
    answer = ask(TABLE, asked(row), today=TODAY)

    assert WORDS[answer.result] == row["answer"], answer.checks
    deciding = [check for check in answer.checks if check.result == answer.result]
    assert any(row["says"] in f"{check.what} {check.why} {check.hint}" for check in deciding), answer.checks


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row["number"])
def test_every_answer_names_its_source_or_what_the_table_lacks(row):
    for check in ask(TABLE, asked(row), today=TODAY).checks:
        assert "read 20" in check.why or "dated 20" in check.what or check.result == "unknown", check


def said(row, cuda_compat):
    parts = ("gpu", "driver", "torch", "cuda", "machine")
    return WORDS[ask(TABLE, CompatQuestion(**{p: row[p] for p in parts}, cuda_compat=cuda_compat), today=None).result]


def test_the_answers_are_those_of_the_public_pages():
    rows = list(csv.DictReader(PUBLIC, delimiter="\t"))
    wrong, unknown = [], []
    for row in rows:
        answer = said(row, row["cuda-compat"])
        if row["answer"] == "compat":
            expected, answer = ("no", "yes"), (said(row, ""), answer)
        else:
            expected = row["answer"]
        if answer == expected:
            continue
        (unknown if "unknown" in answer else wrong).append(row)

    assert len(rows) >= 145
    assert all(row["source"] and row["read"] for row in rows)
    assert not wrong
    assert {(row["torch"], row["driver"] * (row["torch"] != "2.15.0+cu126")) for row in unknown} == OPEN


@pytest.mark.parametrize(
    ("gpu", "driver"),
    [
        ("L40S", "450.80.02"), ("L4", "515.48.07"), ("H100", "470.256.02"), ("B200", "560.35.05"), ("B200", "535.183.06"),
        ("GB200", "550.54.15"), ("RTX 5090", "550.54.14"), ("RTX 5090", "535.183.06"), ("GB300", "570.124.06"),
    ],
)  # fmt: skip
def test_a_driver_that_is_older_than_the_gpu_is_refused(gpu, driver):
    answer = ask(TABLE, CompatQuestion(gpu=gpu, driver=driver), today=TODAY)
    assert answer.result == "mismatch"
    assert any("is older than" in check.what for check in answer.checks)


@pytest.mark.parametrize(
    ("question", "hint"),
    [
        (CompatQuestion(gpu="MI300X"), "the table has no GPUs of AMD"),
        (CompatQuestion(gpu="MI250X", torch="2.9.1"), "the table has no GPUs of AMD"),
        (CompatQuestion(cuda="13.4.2"), "add --driver, or --gpu"),
        (CompatQuestion(gpu="GH200", torch="2.9.1"), "2.9.1+cu126 or 2.9.1+cu128 or 2.9.1+cu130"),
        (CompatQuestion(gpu="GH200", torch="2.11.0", driver="535.183.06"), "torch 2.14 (cu126) would run"),
    ],
    ids=str,
)
def test_what_to_do_instead_is_of_that_machine(question, hint):
    answer = ask(TABLE, question, today=TODAY)

    assert any(hint in check.hint for check in answer.checks)
    assert answer.result != "match"
    assert question.gpu[:2] != "MI" or answer.builds == ()


def test_a_tegra_is_told_apart_from_its_neighbours():
    (check,) = ask(TABLE, CompatQuestion(gpu="Jetson AGX Orin", torch="2.11.0"), today=TODAY).checks

    assert (check.result, check.why.split(";")[0]) == (
        "mismatch",
        "a Tegra runs only kernels that were compiled for it (CUDA Programming Guide, Binary Compatibility)",
    )


def test_without_torch_the_builds_that_run_are_listed_and_why_the_others_do_not():
    answer = ask(TABLE, CompatQuestion(gpu="A100", driver="535.183.06"), today=TODAY)

    assert answer.result == "match"
    by_torch = {build.torch: build for build in answer.builds}
    assert (by_torch["2.14.1"].result, by_torch["2.14.1"].cuda) == ("match", "12.6")
    assert (by_torch["2.10.0"].result, by_torch["2.10.0"].cuda, by_torch["2.10.0"].default) == ("match", "12.8", True)
    newest = by_torch["2.15.0"]
    assert newest.result == "mismatch"
    assert "needs >= 580.65.06" in newest.what
    assert newest.hint == "runs with cuda-compat-13-2 first on the loader's path"


def test_no_cuda_compat_is_offered_to_a_consumer_gpu():
    answer = ask(TABLE, CompatQuestion(gpu="RTX 3090", driver="535.183.06"), today=TODAY)

    assert {build.hint for build in answer.builds} == {""}


def test_a_release_lists_all_its_builds():
    answer = ask(TABLE, CompatQuestion(torch="2.8.0", gpu="P40"), today=TODAY)

    assert {build.cuda: build.result for build in answer.builds} == {
        "12.8": "mismatch",
        "12.6": "match",
        "12.9": "mismatch",
    }
    assert answer.builds[0].default


def test_a_minor_release_is_its_newest_patch_release():
    answer = ask(TABLE, CompatQuestion(torch="2.7", python="3.13"), today=TODAY)

    assert answer.question.torch == "2.7.1"
    assert answer.notes == ("torch 2.7 is read as 2.7.1, its newest patch release",)


def test_a_python_without_triton_is_said():
    answer = ask(TABLE, CompatQuestion(torch="2.5.1", python="3.13"), today=TODAY)

    assert answer.result == "match"
    assert answer.notes == ("on Python 3.13 torch 2.5.1 installs no triton, which torch.compile needs",)


def test_a_free_threaded_python_has_its_own_wheels():
    assert ask(TABLE, CompatQuestion(torch="2.14.1", python="3.14t"), today=TODAY).result == "match"
    assert ask(TABLE, CompatQuestion(torch="2.14.1", python="3.13t"), today=TODAY).result == "mismatch"


def test_builds_that_nobody_listed_are_unknown():
    table = replace(TABLE, torches=(replace(TABLE.torches[0], builds={"13.2": ()}), *TABLE.torches[1:]))

    assert ask(table, CompatQuestion(torch="2.15.0", gpu="H100"), today=TODAY).result == "unknown"
    assert ask(TABLE, CompatQuestion(torch="2.15.0", cuda="12.6"), today=TODAY).result == "unknown"
    assert ask(TABLE, CompatQuestion(torch="2.9.1", cuda="12.1"), today=TODAY).result == "mismatch"


def test_an_old_table_says_so():
    assert ask(TABLE, CompatQuestion(gpu="H100"), today=TODAY).notes == ()
    (note,) = ask(TABLE, CompatQuestion(gpu="H100"), today=TODAY + dt.timedelta(days=200)).notes
    assert "days old" in note


@pytest.mark.parametrize(
    "question",
    [
        CompatQuestion(torch="2.7.1+cu118", cuda="12.6"),
        CompatQuestion(torch="2.7.1+rocm6"),
        CompatQuestion(driver="banana"),
        CompatQuestion(gpu="A100", driver="v535"),
        CompatQuestion(torch="newest"),
        CompatQuestion(cuda="12"),
        CompatQuestion(cuda="cu126"),
        CompatQuestion(python="3"),
        CompatQuestion(driver="535.183.06", cuda_compat="newest"),
        CompatQuestion(torch="2.7.1", machine="ppc64"),
    ],
)
def test_a_question_that_contradicts_itself_is_refused(question):
    with pytest.raises(UsageError):
        ask(TABLE, question, today=TODAY)


def test_packages_are_named_with_their_version():
    assert version_of("torchvision==0.24.1+cu128") == ("torchvision", "0.24.1+cu128")
    for text in ("torchvision", "torchvision>=0.24", "==1.0", "torchvision==new"):
        with pytest.raises(UsageError):
            version_of(text)


@pytest.mark.parametrize("torch", ["", "2.9.1"])
@pytest.mark.parametrize(
    ("package", "driver", "gpu", "result", "says"),
    [
        ("jax-cuda13-plugin", "535.183.06", "", "mismatch", "too old for CUDA 13: needs >= 580.65.06"),
        ("jax_cuda12_plugin", "535.183.06", "", "match", "driver 535.183.06 runs CUDA 12"),
        ("jax[cuda13]", "580.95.05", "V100", "mismatch", "CUDA 13 has dropped V100"),
        ("jax[cuda12-local]", "580.95.05", "V100", "match", "runs CUDA 12"),
        ("jax-cuda13-plugin", "", "", "unknown", "is for CUDA 13, which needs driver >= 580.65.06"),
        ("jax-cuda99-plugin", "580.95.05", "", "unknown", "which driver CUDA 99 needs is not in the table"),
    ],
)
def test_the_driver_is_judged_for_the_plugin_of_jax(torch, package, driver, gpu, result, says):
    question = CompatQuestion(torch=torch, driver=driver, gpu=gpu, packages=((package, "0.10.2"),))
    (check,) = [one for one in ask(TABLE, question, today=TODAY).checks if one.part == "package"]
    assert (check.result, says in check.what) == (result, True), check


TEXTS = st.text(max_size=12)
NUMBERS = st.just("") | st.from_regex(r"[0-9]{1,2}\.[0-9]{1,2}", fullmatch=True)
DRIVERS = NUMBERS | st.from_regex(r"[0-9]{3,4}(\.[0-9]{1,3}){0,2}", fullmatch=True)


@given(
    st.builds(CompatQuestion, gpu=TEXTS, driver=TEXTS, python=TEXTS, cuda=TEXTS, cuda_compat=TEXTS)
    | st.builds(CompatQuestion, gpu=TEXTS, driver=DRIVERS, python=NUMBERS, cuda=NUMBERS, cuda_compat=NUMBERS)
)
def test_any_question_is_answered_and_never_fine_by_chance(question):
    try:
        answer = ask(TABLE, question, today=TODAY)
    except UsageError:
        return  # it is no version
    if question.driver and any(check.part == "driver" and check.result == "match" for check in answer.checks):
        assert question.driver[0].isdigit()
    if question.gpu and answer.result == "match":
        assert any(
            name in question.gpu.lower().replace(" ", "") for name in ("a", "b", "h", "l", "t", "v", "p", "k", "m", "0")
        )


def test_a_branch_of_drivers_is_read_as_its_first_driver_and_this_is_said() -> None:
    (note,) = ask(TABLE, CompatQuestion(torch="2.13.0", driver="580"), today=TODAY).notes
    assert note == (
        "driver 580 is read as the first one of its branch; exact is the whole version, as nvidia-smi shows it"
    )
    assert ask(TABLE, CompatQuestion(torch="2.13.0", driver="580.65.06"), today=TODAY).notes == ()


def test_an_empty_option_is_no_missing_one() -> None:
    done = CliRunner().invoke(cli, ["compat", "--torch", ""])
    assert isinstance(done.exception, UsageError), done.output
    assert "`--torch` is empty" in str(done.exception)
