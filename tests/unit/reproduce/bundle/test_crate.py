"""The metadata of a bundle is a valid Process Run Crate, says the validator of the RO-Crate community.

Runs where `rocrate-validator` (roc-validator 0.13) is on PATH, or HPCENV_TEST_ROC_VALIDATOR names it. It asks the network
for the context of RO-Crate 1.1; here it finds the terms that a bundle uses in its cache, from ro_crate_terms.json.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcenv.reproduce.bundle.make import make

ROOT = Path(__file__).resolve().parents[4]
TERMS = Path(__file__).with_name("ro_crate_terms.json")
CONTEXT = "https://w3id.org/ro/crate/1.1/context"
# Fills the cache of the validator, with the library that the validator uses for it.
FILL = """
import sys, requests, requests_cache
place, address, name = sys.argv[1:]
answer = requests.get(address)
answer.url, answer.request = name, requests.Request("GET", name).prepare()
requests_cache.CachedSession(place, backend="sqlite").cache.save_response(answer)
"""


class _Terms(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = TERMS.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "application/ld+json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *values: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Terms)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def validator() -> str:
    found = os.environ.get("HPCENV_TEST_ROC_VALIDATOR") or shutil.which("rocrate-validator")
    if found is None:
        pytest.skip("NOT CHECKED: the validator of RO-Crates is not installed (pip install roc-validator)")
    return found


@pytest.fixture
def crate(tmp_path: Path) -> Path:
    made = make(ROOT / "tests" / "recorded_runs" / "table-1", tmp_path / "b.hpcenv.zip", authors=("Doe, Jane",))
    with zipfile.ZipFile(made.path) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "table-1"


def passes(validator: str, crate: Path, address: str) -> tuple[bool, set[str]]:
    """Return whether a crate is valid, and what is wrong with it."""
    cache, report = crate.parent / "cache", crate.parent / "report.json"
    subprocess.run([Path(validator).with_name("python"), "-c", FILL, cache, address, CONTEXT], check=True)
    words = [*("-p", "process-run-crate", "-l", "required", "--offline", "--cache-path"), cache, "--no-paging"]
    subprocess.run([validator, "validate", crate, *words, "-f", "json", "-o", report], capture_output=True, check=False)
    said = json.loads(report.read_text())
    assert said["skipped_checks"] == 0, said["skipped_check_details"]
    return said["passed"], {issue["message"] for issue in said["issues"]}


def test_a_bundle_is_a_process_run_crate(crate: Path, validator: str, address: str) -> None:
    assert passes(validator, crate, address) == (True, set())


def test_the_validator_sees_a_run_without_a_program(crate: Path, validator: str, address: str) -> None:
    metadata = crate / "ro-crate-metadata.json"
    metadata.write_text(metadata.read_text().replace('"instrument"', '"implement"'))
    valid, problems = passes(validator, crate, address)
    assert not valid
    assert any("instrument" in problem for problem in problems), problems


def test_the_terms_are_those_that_a_bundle_uses(crate: Path) -> None:
    """A term that is not in the file is no term for the validator either, and it would not say so."""
    used = set()
    for entity in json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]:
        kinds = entity["@type"]
        used |= {kinds} if isinstance(kinds, str) else set(kinds)
        used |= {name for name in entity if not name.startswith("@")}
    assert used <= set(json.loads(TERMS.read_text())["@context"])
