"""scripts/renew-compat: new releases from an index, drivers from a page, and no row lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpcenv.errors import SpecError
from hpcenv.judge.compat import table_file
from hpcenv.judge.compat.compat_table import PACKAGED
from hpcenv.project import compatibility, toml_files

ROOT = Path(__file__).resolve().parents[3]
TABLE = compatibility.table()
METADATA = """Metadata-Version: 2.1
Name: torch
Version: 2.16.0
Requires-Python: >=3.11
Requires-Dist: nvidia-cudnn-cu13==9.30.0.1; platform_system == "Linux"
Requires-Dist: nvidia-nccl-cu13==2.32.3
Requires-Dist: cuda-toolkit[cublas,cudart]==13.4.2
Requires-Dist: triton~=3.10.0; python_version < "3.16"

caf\xe9 = not a header
"""


def wheel(name, version, python="cp311-cp311", platform="manylinux_2_28_x86_64", **more):
    url = f"{name}-{version}-{python}-{platform}.whl"
    return {"filename": url, "url": url, "upload-time": "2026-11-20T10:00:00Z", "core-metadata": True, **more}


def torch_files():
    files = []
    for one in TABLE.torches:
        for python in one.python:
            tag = f"cp{python.replace('.', '')}"
            files.append(wheel("torch", one.version, f"{tag}-{tag}"))
    new = [wheel("torch", "2.16.0", f"cp3{n}-cp3{n}") for n in (11, 15)]
    new += [wheel("torch", "2.16.0", "cp315-cp315t"), wheel("torch", "2.16.0", platform="manylinux_2_28_aarch64")]
    new += [wheel("torch", "2.17.0", yanked="broken"), wheel("torch", "2.18.0rc1"), wheel("torch", "nonsense version")]
    return files + new


def pair_files(name, new):
    return [wheel(name, version, "py3-none") for version in (*TABLE.pairs[name].torch, new)]


@pytest.fixture
def index():
    """A small package index; `pages` is what it lists."""
    pages = {
        "torch": torch_files(),
        "torchvision": pair_files("torchvision", "0.31.0"),
        "torchaudio": pair_files("torchaudio", "2.11.1"),
    }
    texts = {
        "torch-2.16.0": METADATA.encode("latin-1"),
        "torchvision-0.31.0": b"Name: torchvision\nRequires-Dist: torch>=2.16.0\n",
        "torchaudio-2.11.1": b"Name: torchaudio\n",
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            parts = self.path.strip("/").split("/")
            if len(parts) == 2 and parts[1] in pages:
                self.reply(json.dumps({"files": pages[parts[1]]}).encode(), "application/vnd.pypi.simple.v1+json")
            elif self.path.endswith(".metadata"):
                self.reply(next((v for k, v in texts.items() if parts[-1].startswith(k)), b""), "text/plain")
            else:
                self.send_error(404)

        def reply(self, content, kind):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple", pages
    server.shutdown()
    server.server_close()


def renew(tmp_path, *words, index="http://127.0.0.1:9/simple"):
    environ = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_NO_CACHE_DIR": "1"}
    environ = {k: v for k, v in environ.items() if k not in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")}
    argv = [sys.executable, str(ROOT / "scripts/renew-compat"), "-o", str(tmp_path / "new.toml"), *words]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_new_releases_are_added_and_nothing_is_lost(index, tmp_path):
    done = renew(tmp_path, index=index[0])

    assert done.returncode == 0, done
    table = table_file.parse(toml_files.read(tmp_path / "new.toml", error=SpecError))
    assert {one.version for one in TABLE.torches} < {one.version for one in table.torches}
    new = table.torch("2.16.0")
    assert (new.pypi, new.python, new.free_threaded, new.uploaded) == (
        "13.4",
        ("3.11", "3.15"),
        ("3.15",),
        "2026-11-20",
    )
    assert new.libraries == {"cudnn": "==9.30.0.1", "nccl": "==2.32.3", "triton": "~=3.10.0"}
    assert (new.builds, new.aarch64) == ({"13.4": ()}, {"13.4": ()}), "which kernels it holds is not known"
    assert table.torch("2.17.0") is None, "it is yanked"
    assert table.torch("2.18.0rc1") is None
    assert table.pairs["torchvision"].torch["0.31.0"] == ">=2.16.0"
    assert "torchaudio 2.11.1 is new, and its wheel requires no version of torch" in done.stdout
    # Parts that no source was asked for keep their date.
    assert table.dated == TABLE.dated


def test_a_release_that_is_gone_writes_nothing(index, tmp_path):
    index[1]["torch"] = [file for file in index[1]["torch"] if "-2.9.1-" not in file["filename"]]
    done = renew(tmp_path, index=index[0])

    assert done.returncode == 1
    assert "torch 2.9.1 is in the table, and not in the index" in done.stderr
    assert not (tmp_path / "new.toml").exists()


def test_wheels_for_another_python_write_nothing(index, tmp_path):
    index[1]["torch"].append(wheel("torch", "2.9.1", "cp316-cp316"))
    done = renew(tmp_path, index=index[0])

    assert (done.returncode, (tmp_path / "new.toml").exists()) == (1, False)
    assert "wheels of torch 2.9.1 are for Python 3.10-3.16" in done.stderr


def test_an_index_that_does_not_answer_writes_nothing(tmp_path):
    done = renew(tmp_path)

    assert (done.returncode, (tmp_path / "new.toml").exists()) == (1, False)
    assert "nothing was written: index not reachable" in done.stderr


ROWS = [
    ("CUDA 13.4 Update 1", "&gt;=615.50.01", "&gt;=616.10"),
    ("CUDA 13.3 GA", "&gt;=610.43.02", "&gt;=611.01"),
    ("CUDA 12.8 Update 1", "&gt;=570.124.06", "&gt;=572.61"),
    ("CUDA 12.6 GA", "&gt;=560.28.03", "&gt;=560.76"),
    ("CUDA 11.8 GA", "&gt;=520.61.05", "&gt;=520.06"),
]


def page(rows):
    cells = "".join(f"<tr>\n<td><p>{a}</p></td>\n<td>{b}</td><td>{c}</td></tr>\n" for a, b, c in rows)
    return f"<html><table><tr><td>CUDA 13.x</td><td>&gt;=580</td></tr>{cells}</table></html>"


def test_new_drivers_come_from_the_release_notes(tmp_path):
    (tmp_path / "notes.html").write_text(page(ROWS))
    done = renew(tmp_path, "--no-index", "--release-notes", str(tmp_path / "notes.html"))

    assert done.returncode == 0, done
    table = table_file.parse(toml_files.read(tmp_path / "new.toml", error=SpecError))
    assert table.packaged == {**TABLE.packaged, (13, 4, 1): "615.50.01"}
    assert PACKAGED.read_text().count("13.4.1") + 1 == (tmp_path / "new.toml").read_text().count("13.4.1")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (ROWS[:3], "3 rows of toolkits and drivers"),
        (
            [*ROWS, ("CUDA 12.9 GA", "&gt;=1.2.3", "")],
            "CUDA 12.9.0 came with driver 575.51.03 by the table, with 1.2.3",
        ),
    ],
)
def test_a_page_that_contradicts_the_table_writes_nothing(rows, says, tmp_path):
    (tmp_path / "notes.html").write_text(page(rows))
    done = renew(tmp_path, "--no-index", "--release-notes", str(tmp_path / "notes.html"))

    assert (done.returncode, (tmp_path / "new.toml").exists()) == (1, False)
    assert says in done.stderr
