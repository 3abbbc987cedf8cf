"""Wheels are found through real pip: an index on this machine, find-links folders, and the configured index."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import venv
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote

import pytest
from http_server import QuietServer

from hpcenv import incontainer
from hpcenv.locking.wheels.find import find_wheels
from hpcenv.locking.wheels.names import normal_name
from hpcenv.locking.wheels.proof import Index, InstalledDist, KnownFile, WheelProof
from hpcenv.locking.wheels.wheel_record import wheel_record_digests

PROBE = Path(incontainer.__file__).parent / "probe"


# ---- a small index ---------------------------------------------------------------------------------------------


def row(path, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([path, f"sha256={digest}", len(data)])
    return line.getvalue()


def make_wheel(name, version="1.0", *, build="", tag="py3-none-any", files=None, level=zipfile.ZIP_DEFLATED):
    """Return (file name, bytes); `files` maps paths to content, `{data}` is the .data folder."""
    stem = f"{name}-{version}"
    info = f"{stem}.dist-info"
    content = {f"{name.lower()}/__init__.py": f"NAME = {name!r}\n".encode()}
    content |= {path.replace("{data}", f"{stem}.data"): data for path, data in (files or {}).items()}
    lines = f"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\n{'Build: ' + build if build else ''}"
    content[f"{info}/WHEEL"] = (lines.rstrip("\n") + f"\nTag: {tag}\n").encode()
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    record = "".join(row(path, data) for path, data in content.items()) + f"{info}/RECORD,,\n"
    content[f"{info}/RECORD"] = record.encode()
    filename = "-".join([name, version, *([build] if build else []), tag]) + ".whl"
    return filename, zipped(content, level)


def zipped(content, level=zipfile.ZIP_DEFLATED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", level) as archive:
        for path, data in content.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), data, level)
    return out.getvalue()


def unzipped(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def ten_wheels():
    everything = {
        "{data}/data/share/all/x.txt": b"share",
        "{data}/data/bin/tool.sh": b"#!/bin/sh\n",
        "{data}/data/etc/all.conf": b"etc",
        "{data}/headers/all.h": b"int x;\n",
        "{data}/scripts/run": b"#!python\nprint(1)\n",
        "{data}/purelib/all_pure.py": b"P = 1\n",
        "{data}/platlib/all_plat.py": b"Q = 1\n",
    }
    return [
        make_wheel("plain"),
        make_wheel("under_score"),
        make_wheel("Mixed.Case"),
        make_wheel("local", "2.0+cu130"),
        make_wheel("pre", "3.0rc1"),
        make_wheel("built", build="3"),
        make_wheel("twotags", tag="py2.py3-none-any"),
        make_wheel("big", files={"big/blob.bin": os.urandom(3 << 20)}),
        make_wheel("Every_Thing", files=everything),
        make_wheel("quoted", files={"quoted/a b.py": b"", 'quoted/"q",.py': b""}),
    ]


class LocalIndex:
    """PEP 503 and PEP 691 over http, with the faults that real ones have."""

    def __init__(self, files):
        self.files = dict(files)
        self.stated = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        self.form = "html"
        self.ranges = True
        self.hang = False
        self.pretend_size = None
        self.password = None
        self.asked = []
        self.sent = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        self.where = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.where}/simple"

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request):
        self.asked.append(request.path)
        if self.hang:
            time.sleep(60)
        if self.password is not None:
            given = request.headers.get("Authorization", "").partition(" ")[2]
            if base64.b64decode(given).decode() != self.password:
                self.send(request, 401, b"", {"WWW-Authenticate": 'Basic realm="x"'})
                return
        kind, _, rest = request.path.strip("/").partition("/")
        if kind == "simple":
            self.page(request, rest.strip("/"))
        elif unquote(rest) in self.files:
            self.file(request, self.files[unquote(rest)])
        else:
            self.send(request, 404, b"")

    def page(self, request, project):
        names = [n for n in self.files if normal_name(n.split("-")[0]) == project]
        if not names:
            self.send(request, 404, b"")
        elif self.form == "json":
            files = [
                {"filename": n, "url": f"/files/{n}", "hashes": {"sha256": self.stated[n]} if n in self.stated else {}}
                for n in names
            ]
            page = {"meta": {"api-version": "1.0"}, "name": project, "files": files}
            kind = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
            self.send(request, 200, json.dumps(page).encode(), kind)
        else:
            links = [
                f'<a data-requires-python=">=3.6" href="../../files/{n.replace("+", "%2B")}'
                + (f"#sha256={self.stated[n]}" if n in self.stated else "")
                + f'">{n}</a><br/>'
                for n in names
            ]
            text = "<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>"
            self.send(request, 200, text.encode(), {"Content-Type": "text/html"})

    def file(self, request, data):
        wanted = request.headers.get("Range", "").removeprefix("bytes=")
        if self.pretend_size is not None:
            self.send(request, 200, b"", {"Content-Length": str(self.pretend_size), "Connection": "close"})
            request.close_connection = True
        elif wanted and self.ranges:
            first, _, last = wanted.partition("-")
            start, end = (int(first), int(last)) if first else (max(len(data) - int(last), 0), len(data) - 1)
            span = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
            self.send(request, 206, data[start : end + 1], span)
        else:
            self.send(request, 200, data)

    def send(self, request, status, body, headers=None):
        self.sent += len(body)
        request.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def serve():
    opened = []

    def start(files):
        opened.append(LocalIndex(files))
        return opened[-1]

    yield start
    for index in opened:
        index.close()


def environment(tmp_path, **settings):
    """A user's environment with no other configuration of pip than `settings`."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith("PIP_") and "proxy" not in key.lower()
    }
    fixed = {"PIP_CONFIG_FILE": "/dev/null", "HOME": str(home), "PIP_NO_CACHE_DIR": "1", "PIP_NO_INPUT": "0"}
    fixed |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring"}
    return kept | fixed | {f"PIP_{key.upper()}": value for key, value in settings.items()}


@pytest.fixture
def find(tmp_path):
    def run(dists, *, timeout=30.0, sources=(), cache=None, **settings):
        index = Index(env=environment(tmp_path, **settings))
        found = find_wheels(
            dists, sources=sources, index=index, cache=cache or tmp_path / "cache", timeout=timeout, workers=4
        )
        assert [proof.name for proof in found] == [dist.name for dist in dists]
        assert "127.0.0.1" not in repr(found), "a host name must not leave"
        return found

    return run


# ---- what is installed -------------------------------------------------------------------------------------------


def pip(env, *argv):
    done = subprocess.run([sys.executable, "-m", "pip", *argv], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(python):
    """The probe's packages, with build and tags as its WHEEL says them."""
    done = subprocess.run([python, "-B", PROBE, "--level", "full"], capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout.splitlines()[-1])
    prefix = Path(python).parents[1]
    dists = []
    for entry in report["packages"]:
        [text] = [
            path.read_text()
            for path in (prefix / entry["location"]).glob("*.dist-info/WHEEL")
            if normal_name(path.parent.name.split("-")[0]) == entry["name"]
        ] or [""]
        said = [line.partition(": ") for line in text.splitlines()]
        tags = [value for key, _, value in said if key == "Tag"]
        build = "".join(value for key, _, value in said if key == "Build")
        dists.append(InstalledDist.from_probe({**entry, "tags": tags, "build": build}))
    return dists


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """Ten wheels, installed by pip from an index, and what pip's report says of them."""
    tmp_path = tmp_path_factory.mktemp("ten")
    files = dict(ten_wheels())
    index = LocalIndex(files)
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    env = environment(tmp_path, index_url=index.url)
    wanted = [f"{name.split('-')[0]}=={name.split('-')[1]}" for name in files]
    pip(env, "--python", python, "install", "-q", "--no-deps", "--report", str(tmp_path / "report.json"), *wanted)
    index.close()
    report = json.loads((tmp_path / "report.json").read_text())["install"]
    told = {
        normal_name(entry["metadata"]["name"]): (
            unquote(entry["download_info"]["url"].rsplit("/", 1)[1]),
            entry["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for entry in report
    }
    return files, told, installed(python)


def one(ten, name):
    return [dist for dist in ten[2] if dist.name == name]


@pytest.mark.parametrize("form", ["html", "json"])
def test_ten_wheels_have_the_sha256_that_pip_reports(ten, serve, find, form):
    files, told, dists = ten
    index = serve(files)
    index.form = form
    found = find(dists, index_url=index.url)
    assert {proof.name: (proof.filename, proof.sha256) for proof in found} == told
    assert {(proof.proof, proof.index, proof.reason) for proof in found} == {("record", "pypi", "")}
    assert len(found) == 10


@pytest.mark.parametrize("place", ["scripts", "data/bin"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_repacked_wheel_with_another_program_proves_nothing(serve, tmp_path, find, place, whole):
    """Its RECORD digest is the same: the rows of programs do not count there, since installers rewrite them."""
    blob = {} if whole else {"x/blob.bin": os.urandom(2 << 20)}
    path = f"{{data}}/{place}/run"
    [name, of_index], [_, repacked] = [
        make_wheel("x", files={path: b"#!python\nprint('%s')\n" % word, **blob}) for word in (b"one", b"two")
    ]
    (tmp_path / name).write_bytes(repacked)
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env/bin/python")
    env = environment(tmp_path)
    argv = ("install", "-q", "--no-index", "--find-links", str(tmp_path), "--no-deps", "x")
    pip(env, "--python", python, *argv)
    index = serve({name: of_index})
    [proof] = find(installed(python), index_url=index.url)
    assert (proof.proof, proof.sha256) == ("none", None)
    assert proof.reason == f"the program `run` of `{name}` in the index is not the installed one"
    index.files[name] = repacked
    index.stated[name] = hashlib.sha256(repacked).hexdigest()
    [proof] = find(installed(python), index_url=index.url)
    assert (proof.proof, proof.sha256) == ("record", index.stated[name])


def test_a_file_that_was_changed_after_the_installation_takes_the_proof_away(ten, find, serve):
    [dist] = one(ten, "plain")
    changed = replace(dist, content_sha256="0" * 64)
    [proof] = find([changed], index_url=serve(ten[0]).url)
    assert (proof.proof, proof.reason) == ("none", "its files were changed after it was installed")


@pytest.fixture(scope="module")
def local(ten, tmp_path_factory):
    """A wheel that pip installed from a file of this machine: its path, and the package as the probe reports it."""
    place = tmp_path_factory.mktemp("local")
    name, data = next((name, data) for name, data in ten[0].items() if name.startswith("plain-"))
    (place / name).write_bytes(data)
    venv.create(place / "env", with_pip=False)
    python = str(place / "env/bin/python")
    pip(environment(place), "--python", python, "install", "-q", "--no-index", "--no-deps", str(place / name))
    [dist] = installed(python)
    return place / name, dist


def edited(dist):
    """The package after somebody changed a file and its line in RECORD: both digests are another one."""
    return replace(dist, record_sha256="0" * 64, content_sha256="0" * 64)


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_local_wheel_is_compared_with_what_it_installed(local, tmp_path):
    wheel, dist = local
    [proof] = find_wheels([dist], index=None, cache=tmp_path)
    assert (proof.proof, proof.sha256, proof.filename) == ("direct-url", sha(wheel), wheel.name)
    [proof] = find_wheels([edited(dist)], index=None, cache=tmp_path)
    assert (proof.proof, proof.sha256) == ("none", None)
    assert proof.reason == f"the RECORD of `{wheel.name}` that it was installed from is not the installed one"


@pytest.mark.parametrize("now", ["gone", "another", "no wheel"])
def test_a_local_wheel_that_is_not_there_any_more_is_only_claimed(local, tmp_path, now):
    wheel, dist = local
    there = tmp_path / wheel.name
    if now != "gone":
        there.write_bytes(make_wheel("plain", files={"plain/new.py": b"1"})[1] if now == "another" else b"text")
    for one_dist in (replace(dist, wheel_file=str(there)), edited(replace(dist, wheel_file=str(there)))):
        [proof] = find_wheels([one_dist], index=None, cache=tmp_path)
        assert (proof.proof, proof.sha256, proof.filename) == ("claimed", sha(wheel), wheel.name)
        assert proof.reason == "only direct_url.json names this sha256: no index was asked"


def test_uv_writes_no_hash_of_a_local_wheel(local, tmp_path):
    wheel, dist = local
    [proof] = find_wheels([replace(dist, direct_url={"url": f"file:{wheel.name}"})], index=None, cache=tmp_path)
    assert (proof.proof, proof.sha256) == ("direct-url", sha(wheel))


def test_the_local_wheel_of_an_image_is_read_in_the_image(local, tmp_path):
    wheel, dist = local
    asked = []

    def in_image(path):
        asked.append(path)
        return io.BytesIO(wheel.read_bytes())

    [proof] = find_wheels([replace(dist, wheel_file="/w/x.whl")], index=None, cache=tmp_path, open_wheel=in_image)
    assert (proof.proof, proof.sha256, asked) == ("direct-url", sha(wheel), ["/w/x.whl"])


def test_a_forged_direct_url_loses_against_the_index(ten, local, serve, find):
    """Its hash is that of no file; the index has the wheel that is installed."""
    wheel, dist = local
    forged = replace(dist, wheel_file="", direct_url={"url": f"file:{wheel.name}", "hash": "sha256=" + "0" * 64})
    index = serve(ten[0])
    [proof] = find([forged], index_url=index.url)
    assert (proof.proof, proof.sha256, proof.index) == ("record", sha(wheel), "pypi")
    honest = replace(forged, direct_url={"url": f"file:{wheel.name}", "hash": f"sha256={sha(wheel)}"})
    [proof] = find([edited(honest)], index_url=index.url)
    assert (proof.proof, proof.sha256) == ("none", None)
    assert "in the index is not the installed one" in proof.reason


@pytest.mark.parametrize("size", [0, 2 << 20], ids=["whole", "in parts"])
def test_a_wheel_of_a_url_is_compared_with_the_file_there(serve, find, size):
    name, data = make_wheel("plain", files={"plain/blob.bin": os.urandom(size)} if size else None)
    index = serve({name: data})
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        [record] = wheel_record_digests(wheel, name, whole=True)
    url = f"http://{index.where}/files/{name}"
    said = hashlib.sha256(data).hexdigest()

    def found(record, said):
        dist = replace(direct(url, hash=f"sha256={said}"), record_sha256=record, tags=("py3-none-any",))
        [proof] = find([dist], no_index="1")
        return proof.proof, proof.sha256

    assert found(record, said) == ("direct-url", said)
    assert found("0" * 64, said) == ("none", None)
    assert found(record, "0" * 64) == ("claimed", "0" * 64)


def test_a_folder_of_wheels_proves_them_without_an_index(ten, tmp_path, find):
    files, told, dists = ten
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = find(dists, no_index="1", find_links=str(tmp_path))
    assert {proof.name: (proof.filename, proof.sha256) for proof in found} == told
    assert {(proof.proof, proof.index) for proof in found} == {("record", "find-links")}


def test_an_index_on_a_file_system_is_read_without_a_server(ten, tmp_path, find):
    files, told, dists = ten
    for name, data in files.items():
        page = tmp_path / "simple" / normal_name(name.split("-")[0])
        page.mkdir(parents=True)
        (page / name).write_bytes(data)
        (page / "index.html").write_text(f'<a href="{name.replace("+", "%2B")}">x</a>')
    found = find(dists, index_url=(tmp_path / "simple").as_uri())
    assert {proof.name: (proof.filename, proof.sha256) for proof in found} == told


def test_wheels_are_found_when_the_tags_are_not_known(ten, serve, find):
    files, told, dists = ten
    index = serve(files)
    unknown = [InstalledDist(name=d.name, version=d.version, record_sha256=d.record_sha256) for d in dists]
    found = find(unknown, index_url=index.url)
    assert {proof.name: (proof.filename, proof.sha256) for proof in found} == told


# ---- what must not be believed -----------------------------------------------------------------------------------


def rewritten(ten, name, change, *, record=False):
    """The wheel's name and its bytes after `change` of its content; with `record` its RECORD fits again."""
    filename = next(n for n in ten[0] if normal_name(n.split("-")[0]) == name)
    content = unzipped(ten[0][filename])
    change(content)
    if record:
        [path] = [p for p in content if p.endswith(".dist-info/RECORD")]
        del content[path]
        content[path] = ("".join(row(p, d) for p, d in content.items()) + f"{path},,\n").encode()
    return filename, zipped(content)


def set_file(content):
    content["plain/__init__.py"] = b"NAME = 'PLAIN'\n"  # as long as before


@pytest.mark.parametrize("place", ["server", "folder"])
@pytest.mark.parametrize(
    ("change", "record", "reason"),
    [
        (set_file, True, "the RECORD of `plain-1.0-py3-none-any.whl` in the index is not the installed one"),
        (set_file, False, "`plain/__init__.py` in it is not what its RECORD says"),
        (lambda c: c.update({"plain/__init__.py": b"longer, too\n" * 9}), False, "its RECORD says 15"),
        (lambda c: c.update({"plain/extra.py": b"x"}), False, "in the index is not the installed one"),
        (lambda c: c.pop("plain/__init__.py"), False, "which is not in it"),
        (lambda c: c.pop("plain-1.0.dist-info/RECORD"), False, "it is not a valid wheel"),
    ],
    ids=["rebuilt", "same size", "other size", "file added", "file gone", "no RECORD"],
)
def test_a_tampered_wheel_proves_nothing(ten, serve, tmp_path, find, place, change, record, reason):
    filename, data = rewritten(ten, "plain", change, record=record)
    settings = {"index_url": serve({filename: data}).url}
    if place == "folder":
        (tmp_path / filename).write_bytes(data)
        settings = {"no_index": "1", "find_links": str(tmp_path)}
    [proof] = find(one(ten, "plain"), **settings)
    assert (proof.proof, proof.sha256) == ("none", None)
    assert reason in proof.reason


def test_a_file_that_is_not_what_its_index_states_proves_nothing(ten, serve, find):
    filename, data = rewritten(ten, "plain", lambda c: None)
    index = serve({filename: data + b"\0"})
    index.stated[filename] = hashlib.sha256(data).hexdigest()
    [proof] = find(one(ten, "plain"), index_url=index.url)
    assert (proof.proof, proof.sha256) == ("none", None)


def test_a_changed_size_in_a_large_remote_wheel_is_seen_without_reading_it(ten, serve, find):
    filename, data = rewritten(ten, "big", lambda c: c.update({"big/__init__.py": b"x"}))
    index = serve({filename: data})
    [proof] = find(one(ten, "big"), index_url=index.url)
    assert proof.proof == "none"
    assert "in it has 1 bytes, its RECORD says 13" in proof.reason
    assert index.sent < 1 << 20


def test_an_archive_that_is_no_zip_proves_nothing(ten, serve, find):
    filename = next(iter(ten[0]))
    [proof] = find(one(ten, "plain"), index_url=serve({filename: b"<html>login</html>" * 9}).url)
    assert proof == WheelProof(
        name="plain", filename=filename, proof="none", reason=f"`{filename}`: it is not a valid wheel (BadZipFile)"
    )


def test_the_same_content_zipped_twice_is_ambiguous(ten, serve, find):
    filename, data = rewritten(ten, "plain", lambda c: None)
    again = zipped(unzipped(data), zipfile.ZIP_STORED)
    first, second = serve({filename: data}), serve({filename: again})
    settings = {"index_url": first.url, "extra_index_url": second.url}
    [proof] = find(one(ten, "plain"), **settings)
    assert (proof.proof, proof.reason) == ("none", "2 wheels with different sha256 have this RECORD")
    stated = hashlib.sha256(again).hexdigest()
    claim = KnownFile(name="plain", version="1.0", filename=filename, sha256=stated, proof="install-report")
    [proof] = find(one(ten, "plain"), sources=[claim], **settings)
    assert (proof.proof, proof.sha256, proof.index) == ("record", stated, "extra-1")


def test_the_right_one_of_several_builds_is_found(serve, tmp_path, find):
    old, new = make_wheel("built", build="2"), make_wheel("built", build="3")
    index = serve(dict([old, new]))
    with zipfile.ZipFile(io.BytesIO(old[1])) as wheel:
        [digest, *_] = wheel_record_digests(wheel, old[0], whole=True)
    dist = InstalledDist(name="built", version="1.0", build="2", tags=("py3-none-any",), record_sha256=digest)
    [proof] = find([dist], index_url=index.url)
    assert (proof.filename, proof.proof) == (old[0], "record")


def test_a_package_that_no_index_knows_has_no_proof(ten, serve, find):
    [proof] = find(one(ten, "plain"), index_url=serve({}).url)
    assert (proof.proof, proof.reason) == ("none", "no index lists a wheel of plain 1.0")


def test_a_server_cannot_point_at_files_of_this_machine(ten, serve, tmp_path, find):
    filename, data = rewritten(ten, "plain", lambda c: None)
    (tmp_path / filename).write_bytes(data)
    index = serve({filename: data})
    index.page = lambda request, _: index.send(
        request, 200, f'<a href="file://{tmp_path}/{filename}">x</a>'.encode(), {"Content-Type": "text/html"}
    )
    [proof] = find(one(ten, "plain"), index_url=index.url)
    assert proof.proof == "none"


# ---- what servers can and cannot do --------------------------------------------------------------------------------


def test_a_large_wheel_is_read_in_parts(ten, serve, find):
    index = serve(ten[0])
    [proof] = find(one(ten, "big"), index_url=index.url)
    assert proof.proof == "record"
    assert index.sent < 200_000


@pytest.mark.parametrize("name", ["plain", "big"])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_hash_that_the_index_does_not_state_is_computed(ten, serve, find, name, ranges):
    index = serve(ten[0])
    index.ranges = ranges
    index.stated.clear()
    [proof] = find(one(ten, name), index_url=index.url)
    assert (proof.filename, proof.sha256) == ten[1][name]
    assert proof.proof == "record"


def test_a_server_without_partial_reads_sends_all_of_it(ten, serve, find):
    index = serve(ten[0])
    index.ranges = False
    found = find(ten[2], index_url=index.url)
    assert {proof.proof for proof in found} == {"record"}


def test_a_wheel_that_is_too_large_to_read_rests_on_the_index(ten, serve, find):
    index = serve(ten[0])
    index.pretend_size = 900 << 20
    [proof] = find(one(ten, "plain"), index_url=index.url)
    assert (proof.filename, proof.sha256) == ten[1]["plain"]
    assert (proof.proof, proof.reason) == ("index-only", "the server allows no partial reads, and it has 900 MiB")


def test_index_only_needs_the_tags(ten, serve, find):
    index = serve(ten[0])
    index.pretend_size = 900 << 20
    [known] = one(ten, "plain")
    dist = InstalledDist(name="plain", version="1.0", record_sha256=known.record_sha256)
    [proof] = find([dist], index_url=index.url)
    assert (proof.proof, proof.sha256) == ("none", None)


def test_extra_indexes_are_called_by_number(ten, serve, find):
    filename = ten[1]["plain"][0]
    empty, full = serve({}), serve({filename: ten[0][filename]})
    [proof] = find(one(ten, "plain"), index_url=empty.url, extra_index_url=f"{empty.url} {full.url}")
    assert (proof.proof, proof.index) == ("record", "extra-2")


def test_an_index_that_asks_for_a_password_gets_the_users(ten, serve, tmp_path, find):
    index = serve(ten[0])
    index.password = "ada:secret"
    (tmp_path / "home").mkdir()
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine 127.0.0.1 login ada password secret\n")
    netrc.chmod(0o600)
    [proof] = find(one(ten, "plain"), index_url=index.url)
    assert proof.proof == "record"
    netrc.unlink()
    given = index.url.replace("//", "//ada:secret@")
    [proof] = find(one(ten, "plain"), index_url=given, cache=tmp_path / "other")
    assert proof.proof == "record"
    assert "secret" not in repr(proof)


def test_an_index_that_refuses_is_not_waited_for(ten, serve, find):
    index = serve(ten[0])
    index.password = "ada:secret"
    start = time.monotonic()
    [proof] = find(one(ten, "plain"), index_url=index.url)
    assert (proof.proof, proof.reason) == ("none", "index not reachable (HTTP 401): pypi")
    assert time.monotonic() - start < 10


# ---- no network ----------------------------------------------------------------------------------------------------


def test_without_a_network_there_is_a_reason_soon(ten, find):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        start = time.monotonic()
        found = find(ten[2], index_url=url)
    assert time.monotonic() - start < 10
    assert {proof.proof for proof in found} == {"none"}
    # One reason for all: after three packages the index is not asked again, and `lock` counts the packages by reason.
    (reason,) = {proof.reason for proof in found}
    assert re.fullmatch(r"index not reachable \(Connection\w*Error\): pypi", reason)


def test_an_index_that_never_answers_costs_the_time_limit_and_no_more(ten, serve, find):
    index = serve(ten[0])
    index.hang = True
    start = time.monotonic()
    found = find(ten[2], index_url=index.url, timeout=3.0)
    assert time.monotonic() - start < 6
    assert {(proof.proof, proof.reason) for proof in found} == {("none", "index not reachable within 3 s")}


def test_nobody_is_asked_when_offline_is_wanted(ten, tmp_path):
    found = find_wheels(ten[2], index=None, cache=tmp_path)
    assert {(proof.proof, proof.reason) for proof in found} == {("none", "no index was asked")}


def test_a_reachable_folder_proves_although_the_index_is_down(ten, tmp_path, find):
    filename = ten[1]["plain"][0]
    (tmp_path / filename).write_bytes(ten[0][filename])
    [proof] = find(one(ten, "plain"), index_url="http://127.0.0.1:9/simple", find_links=str(tmp_path))
    assert (proof.proof, proof.index) == ("record", "find-links")


def test_a_configuration_that_pip_refuses_is_a_reason(ten, tmp_path):
    broken = tmp_path / "pip.conf"
    broken.write_text("this is no configuration\n")
    index = Index(env=environment(tmp_path) | {"PIP_CONFIG_FILE": str(broken)})
    [proof] = find_wheels(one(ten, "plain"), index=index, cache=tmp_path / "cache", timeout=20)
    assert proof.proof == "none"
    assert proof.reason.startswith("pip could not be set up (")


def test_a_python_without_pip_is_a_reason(ten, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    index = Index(env=environment(tmp_path), python=str(tmp_path / "bare" / "bin" / "python"))
    [proof] = find_wheels(one(ten, "plain"), index=index, cache=tmp_path / "cache", timeout=20)
    assert proof.reason == "the Python that runs hpcenv has no pip to ask an index with"


def test_a_python_that_is_not_there_is_a_reason(ten, tmp_path):
    index = Index(env=environment(tmp_path), python=str(tmp_path / "no-python"))
    [proof] = find_wheels(one(ten, "plain"), index=index, cache=tmp_path / "cache", timeout=20)
    assert (proof.proof, "pip could not be started" in proof.reason) == ("none", True)


# ---- what was found before -----------------------------------------------------------------------------------------


def test_what_was_proved_is_not_asked_again(ten, serve, find):
    index = serve(ten[0])
    first = find(ten[2], index_url=index.url)
    index.asked.clear()
    assert find(ten[2], index_url=index.url) == first
    assert index.asked == []


def test_a_proof_holds_for_one_configuration_only(ten, serve, find):
    empty, index = serve({}), serve(ten[0])
    [first] = find(one(ten, "plain"), index_url=index.url)
    [second] = find(one(ten, "plain"), index_url=empty.url, extra_index_url=index.url)
    assert (first.index, second.index) == ("pypi", "extra-1")


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "edited", "list", "folder"])
def test_a_damaged_cache_is_ignored(ten, serve, tmp_path, find, damage):
    index = serve(ten[0])
    truth = find(ten[2], index_url=index.url)
    entries = sorted((tmp_path / "cache").iterdir())
    texts = [entry.read_text() for entry in entries]
    for number, entry in enumerate(entries):
        if damage == "folder":
            entry.unlink()
            entry.mkdir()
            continue
        entry.write_text(
            {
                "cut": texts[number][: len(texts[number]) // 2],
                "empty": "",
                "other": texts[number - 1],
                "edited": texts[number].replace('"sha256": "', '"sha256": "0'),
                "list": "[" * 5000,
            }[damage]
        )
    assert find(ten[2], index_url=index.url) == truth


def test_a_cache_that_cannot_be_written_is_no_error(ten, serve, tmp_path, find):
    (tmp_path / "file").write_text("")
    [proof] = find(one(ten, "plain"), index_url=serve(ten[0]).url, cache=tmp_path / "file")
    assert proof.proof == "record"


def test_a_failure_is_not_remembered(ten, serve, find):
    index = serve({})
    [proof] = find(one(ten, "plain"), index_url=index.url)
    assert proof.proof == "none"
    index.files.update(ten[0])
    index.stated = {name: hashlib.sha256(data).hexdigest() for name, data in index.files.items()}
    [proof] = find(one(ten, "plain"), index_url=index.url)
    assert proof.proof == "record"


# ---- what the installation itself says -----------------------------------------------------------------------------

SHA = "ab" * 32


def direct(url, **origin):
    """A package as the probe reports it: `hash`, `commit-id` and `editable` of direct_url.json beside the URL."""
    named = {name.replace("_", "-"): value for name, value in origin.items()}
    return InstalledDist(name="plain", version="1.0", direct_url={"url": url, **named})


def test_the_hash_of_a_direct_url_is_claimed_where_nothing_can_be_compared(tmp_path):
    dists = [
        direct("file:plain-1.0-py3-none-any.whl", hash=f"sha256={SHA}"),
        direct("https://h/w/plain-1.0-1-py3-none-any.whl", hash=f"sha256={SHA}"),
    ]
    found = find_wheels(dists, index=None, cache=tmp_path)
    assert [(p.proof, p.sha256, p.filename, p.index) for p in found] == [
        ("claimed", SHA, "plain-1.0-py3-none-any.whl", None),
        ("claimed", SHA, "plain-1.0-1-py3-none-any.whl", None),
    ]


@pytest.mark.parametrize(
    ("dist", "reason"),
    [
        (direct("https://h/x", commit_id="0" * 40), "installed from a version control system, not from a wheel"),
        (direct("file:src", editable=True), "installed from a directory, not from a wheel"),
        (
            direct("file:plain-1.0.tar.gz", hash=f"sha256={SHA}"),
            "installed from an archive that is not a wheel of this name and version",
        ),
        (
            direct("file:plain-2.0-py3-none-any.whl", hash=f"sha256={SHA}"),
            "installed from an archive that is not a wheel of this name and version",
        ),
        (
            direct("file:plain-1.0-py3-none-any.whl", hash="sha256=short"),
            "it has no RECORD digest that a wheel could be compared with",
        ),
    ],
)
def test_other_direct_urls_are_no_proof(tmp_path, dist, reason):
    [proof] = find_wheels([dist], index=None, cache=tmp_path)
    assert (proof.proof, proof.sha256, proof.reason) == ("none", None, reason)


def claim(ten, *, sha256=None, filename=None, proof="embedded-lock"):
    name, stated = ten[1]["plain"]
    return KnownFile(name="Plain", version="1.0.0", filename=filename or name, sha256=sha256 or stated, proof=proof)


@pytest.mark.parametrize("proof", ["embedded-lock", "install-report"])
def test_a_lock_or_report_in_the_image_serves_where_no_index_answers(ten, tmp_path, proof):
    [found] = find_wheels(one(ten, "plain"), sources=[claim(ten, proof=proof)], index=None, cache=tmp_path)
    assert (found.proof, (found.filename, found.sha256)) == (proof, ten[1]["plain"])
    assert found.reason == "no index was asked"


def test_a_lock_that_names_several_fitting_wheels_is_no_proof(ten, tmp_path):
    claims = [claim(ten), claim(ten, sha256=SHA)]
    [found] = find_wheels(one(ten, "plain"), sources=claims, index=None, cache=tmp_path)
    assert found.proof == "none"


def test_a_lock_that_names_other_tags_is_no_proof(ten, tmp_path):
    claims = [claim(ten, filename="plain-1.0-cp311-cp311-linux_x86_64.whl")]
    [found] = find_wheels(one(ten, "plain"), sources=claims, index=None, cache=tmp_path)
    assert found.proof == "none"


def test_an_index_that_contradicts_the_lock_in_the_image_wins(ten, serve, find):
    filename, data = rewritten(ten, "plain", set_file, record=True)
    stale = claim(ten, sha256=hashlib.sha256(data).hexdigest())
    [found] = find(one(ten, "plain"), sources=[stale], index_url=serve({filename: data}).url)
    assert (found.proof, found.sha256) == ("none", None)


# ---- this machine's own index ----------------------------------------------------------------------------------------


def test_wheels_of_this_python_equal_what_pip_reports_from_the_configured_index(tmp_path):
    dists = [
        dist for dist in installed(sys.executable) if dist.record_sha256 and dist.name not in ("pip", "setuptools")
    ][:20]  # ten are compared, and the index may lack some
    found = find_wheels(dists, index=Index(env=dict(os.environ)), cache=tmp_path / "cache", timeout=60)
    proved = [(dist, proof) for dist, proof in zip(dists, found, strict=True) if proof.proof == "record"][:10]
    if not proved:
        reasons = sorted({proof.reason for proof in found})
        pytest.skip(f"NOT TESTED: the configured index proves nothing: {reasons}")
    report = tmp_path / "report.json"
    argv = [
        "install",
        "-q",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--report",
        report,
    ]
    pip(dict(os.environ), *map(str, argv), *(f"{dist.name}=={dist.version}" for dist, _ in proved))
    told = {
        normal_name(entry["metadata"]["name"]): (
            unquote(entry["download_info"]["url"].rsplit("/", 1)[1]),
            entry["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for entry in json.loads(report.read_text())["install"]
    }
    assert {proof.name: (proof.filename, proof.sha256) for _, proof in proved} == told
