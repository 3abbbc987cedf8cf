"""The hub's own libraries read what was fetched, without network; and the server of these tests is one that they accept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcenv.hub.access import find_access
from hpcenv.hub.fetch import fetch
from hpcenv.image.store.store_folder import open_store
from hpcenv.project.hub_reference import parse_locked
from hpcenv.project.spec import DataTable
from hpcenv.project.store_config import StorePlace
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission import hub_cache
from tests.hub_server import COMMIT, Hub

MODEL = {
    "config.json": json.dumps({"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}).encode(),
    "vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n",
    "tokenizer_config.json": b'{"tokenizer_class": "BertTokenizer"}',
    "model.safetensors": os.urandom(100_000),
}
ROWS = {"README.md": b"# rows\n", "data/train.jsonl": b'{"x": 1}\n{"x": 2}\n'}


# The libraries bring a hundred packages, so they may be in an environment of their own.
PYTHON = os.environ.get("HPCENV_TEST_HUB_PYTHON") or sys.executable


def need(name: str) -> None:
    words = [PYTHON, "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{name}') is None)"]
    if subprocess.run(words, check=False).returncode != 0:
        pytest.skip(
            f"NOT RUN: {name} is not installed, so it read nothing that hpcenv fetched (HPCENV_TEST_HUB_PYTHON names "
            "a Python that has it)"
        )


def python(code: str, environ: dict[str, str], folder: Path) -> list[str]:
    """Run a script with only the variables of a run; return its lines."""
    plain = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **environ}
    done = subprocess.run([PYTHON, "-c", code], env=plain, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Path]]:
    """The variables and the folder of a run whose hub cannot be reached any more."""
    folder = tmp_path_factory.mktemp("run")
    place = StorePlace(root=folder / "store")
    store = open_store(place.root, create=True)
    found = []
    for name, files, lfs in (("lab/tiny", MODEL, "model.safetensors"), ("datasets/lab/rows", ROWS, "data/train.jsonl")):
        hub, wanted = Hub(files, repository=name, lfs=(lfs,)), f"{name}@{COMMIT}"
        fetch(parse_locked(wanted), (), find_access(hub.environ()), store)
        hub.close()
        found.append(hub_cache.find_fetched(DataTable(hub=wanted), place))
    cache = hub_cache.plan_cache(found)
    hub_cache.write(cache, RunFolder(folder / "run"))
    settings = hub_cache.variables(cache, folder / "run")
    yield {setting.name: setting.value for setting in settings}, folder


def test_the_server_of_the_tests_is_a_hub_for_the_library(tmp_path: Path) -> None:
    need("huggingface_hub")
    hub = Hub(MODEL, lfs=("model.safetensors",), page=2, token="hf_x")
    try:
        code = "import huggingface_hub as h; print(h.snapshot_download('lab/tiny'))"
        (folder,) = python(code, hub.environ(HF_TOKEN="hf_x", HF_HUB_DISABLE_XET="1"), tmp_path)
        assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == MODEL
        asked = [path for path in hub.asked() if "/tree/" in path]
        assert asked[0] == f"/api/models/lab/tiny/tree/{COMMIT}?recursive=true&expand=false", (
            "the request of hpcenv, too"
        )
    finally:
        hub.close()


def test_the_library_finds_models_and_data_sets_without_network(run: tuple[dict[str, str], Path]) -> None:
    need("huggingface_hub")
    environ, folder = run
    lines = python(
        f"""
import huggingface_hub as h
print(h.snapshot_download("lab/tiny"))
print(h.snapshot_download("lab/tiny", revision="{COMMIT}", local_files_only=True))
print(h.hf_hub_download("lab/tiny", "model.safetensors"))
print(h.snapshot_download("lab/rows", repo_type="dataset"))
print([(one.repo_id, [x.commit_hash for x in one.revisions]) for one in h.scan_cache_dir().repos if one.refs])
print(h.scan_cache_dir().warnings)
try:
    h.hf_hub_download("lab/tiny", "other.json")
except h.errors.LocalEntryNotFoundError:
    print("not there")
""",
        environ,
        folder,
    )
    place = f"{folder}/run/hub/models--lab--tiny/snapshots/{COMMIT}"
    assert lines[:3] == [place, place, f"{place}/model.safetensors"]
    assert Path(lines[2]).read_bytes() == MODEL["model.safetensors"]
    assert {path.name: path.read_bytes() for path in Path(lines[3], "data").iterdir()} == {
        "train.jsonl": ROWS["data/train.jsonl"]
    }
    assert f"('lab/tiny', ['{COMMIT}'])" in lines[4]
    assert lines[5:] == ["[]", "not there"]


def test_transformers_reads_a_model_without_network(run: tuple[dict[str, str], Path]) -> None:
    need("transformers")
    environ, folder = run
    code = f"""
from transformers import AutoConfig, AutoTokenizer
print(AutoConfig.from_pretrained("lab/tiny").hidden_size)
print(AutoConfig.from_pretrained("lab/tiny", revision="{COMMIT}").hidden_size)
print(AutoTokenizer.from_pretrained("lab/tiny")("hello")["input_ids"])
"""
    assert python(code, environ, folder) == ["32", "32", "[2, 5, 3]"]


def test_datasets_reads_the_folder_and_not_the_name(run: tuple[dict[str, str], Path]) -> None:
    need("datasets")
    environ, folder = run
    code = """
import datasets, huggingface_hub
folder = huggingface_hub.snapshot_download("lab/rows", repo_type="dataset")
print(datasets.load_dataset(folder)["train"]["x"][:])
try:
    datasets.load_dataset("lab/rows")
except ConnectionError:
    print("docs/how-to/hub.md says that it does not find a repository by name")
"""
    lines = python(code, environ, folder)
    assert lines[0] == "[1, 2]"
    assert len(lines) == 2, "then docs/how-to/hub.md can say that load_dataset finds it by name"
