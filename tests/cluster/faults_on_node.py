"""Runs on a node of the testbed, as its user: breaks conversions and says what is left.

test_image_faults.py copies it there. Standard library only; prints one JSON document.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import http.server
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPOCH = 1714979289
HPCENV = ["hpcenv", "image", "pull"]


# -- a small image in the registry ----------------------------------------------------------


def layer(members: list[tuple[str, bytes | None]]) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.mtime, member.mode = EPOCH, 0o755
            member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return body.getvalue()


def push(registry: str, name: str) -> dict[str, Any]:
    """Push an image of 25 MB, always the same bytes; say what it is made of."""
    rng = random.Random(4)
    words = [b"%08x " % rng.getrandbits(24) for _ in range(4000)]
    tars = [
        layer([("opt", None), *((f"opt/data{n}", rng.randbytes(4 << 20)) for n in range(4))]),
        layer([("srv", None), *((f"srv/text{n}", b"".join(rng.choices(words, k=60000))) for n in range(40))]),
        layer([("opt", None), ("opt/.wh.data3", b""), ("etc", None), ("etc/os-release", b"ID=none\n")]),
    ]
    base = f"http://{registry}/v2/{name}"

    def call(method: str, url: str, data: bytes | None = None, kind: str = "application/octet-stream") -> Any:
        request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind})
        return urllib.request.urlopen(request, timeout=60)

    def put(body: bytes, kind: str) -> dict[str, Any]:
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        try:
            call("HEAD", f"{base}/blobs/{digest}")
        except urllib.error.HTTPError:
            where = call("POST", f"{base}/blobs/uploads/", b"").headers["Location"]
            call("PUT", f"{where}{'&' if '?' in where else '?'}digest={digest}", body)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": len(body)}

    packed = [put(gzip.compress(tar, 1, mtime=0), "layer.v1.tar+gzip") for tar in tars]
    config = {
        "architecture": "amd64", "os": "linux", "created": "2024-05-06T07:08:09Z", "config": {},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(tar).hexdigest() for tar in tars]},
    }  # fmt: skip
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {
        "schemaVersion": 2, "mediaType": kind, "layers": packed,
        "config": put(json.dumps(config).encode(), "config.v1+json"),
    }  # fmt: skip
    body = json.dumps(manifest).encode()
    call("PUT", f"{base}/manifests/1", body, kind)
    return {"digest": "sha256:" + hashlib.sha256(body).hexdigest(), "layers": [blob["digest"] for blob in packed]}


# -- a registry that breaks -----------------------------------------------------------------


def proxy(upstream: str, fault: str, rate: str = "0") -> None:
    """Pass requests on to a registry. `flip` changes a byte of each large blob, `cut` breaks every transfer off.

    `rate`: bytes per second of a blob, 0 for all that goes.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = http.client.HTTPConnection(upstream, timeout=30)
            wanted = {k: v for k, v in self.headers.items() if k.lower() in ("accept", "range")}
            asked.request(self.command, self.path, headers=wanted)
            answer = asked.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("date", "server", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            left = len_ = int(answer.getheader("Content-Length") or 0)
            large = len_ > 1 << 20 and "/blobs/" in self.path
            while left and self.command == "GET":
                piece = answer.read(min(left, 1 << 18))
                if large and fault == "flip" and left == len_:
                    piece = piece[:5000] + bytes([piece[5000] ^ 1]) + piece[5001:]
                if large and fault == "cut" and left < len_ - (3 << 20):
                    self.close_connection = True
                    return
                left -= len(piece)
                self.wfile.write(piece)
                if large and float(rate):
                    time.sleep(len(piece) / float(rate))

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextlib.contextmanager
def proxied(upstream: str, fault: str, rate: int = 0) -> Any:
    argv = [sys.executable, __file__, "proxy", upstream, fault, str(rate)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield int(child.stdout.readline()), child  # type: ignore[union-attr]
        finally:
            child.kill()


# -- what is there --------------------------------------------------------------------------


def sha(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def finals(store: Path) -> dict[str, str]:
    """Every file under a final name that is of some use to somebody, and its content's digest."""
    found = {}
    for name in ("blobs/sha256", "indexes/sha256", "images"):
        for path in sorted((store / name).glob("[!.]*")):
            found[f"{name}/{path.name}"] = "" if path.suffix == ".json" else sha(path)
            if path.suffix == ".json":
                json.loads(path.read_text())
    return found


def wrong(store: Path, good: dict[str, str]) -> list[str]:
    """Names that are there and should not be, or hold something else than in a good store."""
    return [name for name, digest in finals(store).items() if good.get(name) != digest]


def leftovers(store: Path) -> list[str]:
    """What no call should leave: unfinished files, held leases, running processes."""
    # A damaged SIF stays aside for a day: a job may run from it.
    unfinished = [path for path in store.glob("tmp/*") if not path.name.startswith("damaged.")]
    places = [*unfinished, *store.glob("leases/*"), *store.glob("leases/.*")]
    places += [
        path for name in ("blobs/sha256", "indexes/sha256", "images", "roots") for path in store.glob(f"{name}/.*")
    ]
    return [str(path.relative_to(store)) for path in places] + processes(store)


def processes(store: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            ours = any(str(store) in word for word in words) and "faults.py" not in " ".join(words)
            if ours and ("hpcenv" in " ".join(words[:2]) or "mksquashfs" in words[0]):
                found.append(f"pid {path.parent.name}: {' '.join(words)}"[:300])
    return found


def plain(reference: str) -> list[str]:
    """The registries here, and the broken ones before them, speak http."""
    return ["--plain-http", reference.split("/")[2]] if reference.startswith("docker://") else []


def pull(reference: str, store: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HPCENV, *plain(reference), "--store", str(store), reference, *more],
        capture_output=True,
        text=True,
        check=False,
    )


def start(reference: str, store: Path, *more: str) -> subprocess.Popen[str]:
    argv = [*HPCENV, *plain(reference), "--store", str(store), reference, *more]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def after(reference: str, store: Path, good: dict[str, str]) -> dict[str, Any]:
    """The next call, and what it leaves."""
    done = pull(reference, store)
    return {
        "status": done.returncode,
        "stderr": done.stderr,
        "wrong": wrong(store, good),
        "missing": sorted(set(good) - set(finals(store))),
        "left": leftovers(store),
    }


# -- faults ---------------------------------------------------------------------------------


def prepare(folder: str, registry: str) -> dict[str, Any]:
    image = push(registry, "hpcenv/faults")
    reference, store = f"docker://{registry}/hpcenv/faults:1", Path(folder, "good")
    began = time.monotonic()
    done = pull(reference, store)
    assert done.returncode == 0, done.stderr
    image["seconds"] = time.monotonic() - began
    image["good"] = finals(store)
    image["reference"], image["registry"] = reference, registry
    image["left"] = leftovers(store)
    return image


def registry_dies(image: dict[str, Any], store: Path) -> dict[str, Any]:
    """Kill the registry when some megabytes of a layer are there."""
    with proxied(image["registry"], "none", 4 << 20) as (port, child):
        call = start(f"docker://127.0.0.1:{port}/hpcenv/faults:1", store)
        while sum(path.stat().st_size for path in store.glob("blobs/sha256/.*.part")) < 3 << 20:
            time.sleep(0.02)
        child.kill()
        _, said = call.communicate(timeout=100)
    before = {"status": call.returncode, "stderr": said, "wrong": wrong(store, image["good"]), "there": finals(store)}
    return {"fault": before, "after": after(image["reference"], store, image["good"])}


def registry_lies(image: dict[str, Any], store: Path, fault: str = "flip") -> dict[str, Any]:
    with proxied(image["registry"], fault) as (port, _):
        done = pull(f"docker://127.0.0.1:{port}/hpcenv/faults:1", store)
    before = {"status": done.returncode, "stderr": done.stderr, "wrong": wrong(store, image["good"])}
    return {"fault": before, "after": after(image["reference"], store, image["good"])}


def damage(path: Path, how: str) -> None:
    """Change a file in place: same name, same mode; for `flip` also the same size and time."""
    was = path.stat()
    path.chmod(0o644)
    with open(path, "r+b") as file:
        if how == "truncate":
            file.truncate(was.st_size // 2)
        else:
            file.seek(was.st_size // 2)
            byte = file.read(1)
            file.seek(was.st_size // 2)
            file.write(bytes([byte[0] ^ 1]))
    path.chmod(was.st_mode & 0o777)
    if how == "flip":
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def damaged(image: dict[str, Any], store: Path, good_store: str) -> dict[str, Any]:
    """Damage what a store keeps, one thing at a time, and pull again."""
    shutil.copytree(good_store, store)
    found: dict[str, Any] = {}
    blob = f"blobs/sha256/{image['layers'][1][7:]}"
    index = next(name for name in image["good"] if name.startswith("indexes/"))
    sif = next(name for name in image["good"] if name.endswith(".sif"))
    cases: list[tuple[str, str, str, list[str]]] = [
        ("blob truncated, index kept", blob, "truncate", ["images"]),
        ("blob flipped, index kept", blob, "flip", ["images"]),
        ("blob flipped, no index", blob, "flip", ["images", "indexes"]),
        ("index truncated", index, "truncate", ["images"]),
        ("index flipped", index, "flip", ["images"]),
        ("sif truncated", sif, "truncate", []),
        ("record damaged", sif.replace(".sif", ".json"), "truncate", []),
    ]
    for name, victim, how, gone in cases:
        for folder in gone:
            for path in (store / folder).rglob("*"):
                if path.is_file():
                    path.unlink()
        if (store / victim).exists():
            damage(store / victim, how)
        found[name] = after(image["reference"], store, image["good"])
    return found


def broken_by(
    image: dict[str, Any], store: Path, seed: str, rounds: str, signals: str, longest: str
) -> list[dict[str, Any]]:
    """Send a signal at random moments, spread evenly over the length of a pull; then pull again."""
    rng, results = random.Random(int(seed)), []
    for number in range(int(rounds)):
        moment = (number + rng.random()) / int(rounds) * float(longest)
        kind = signals.split(",")[number % len(signals.split(","))]
        call = start(image["reference"], store)
        time.sleep(moment)
        victim = call.pid
        if kind == "CHILD":
            while call.poll() is None:
                children = Path(f"/proc/{call.pid}/task/{call.pid}/children").read_text().split()
                packers = [c for c in children if "-tar" in _words(int(c)) and str(store) in " ".join(_words(int(c)))]
                if packers:
                    victim = int(packers[0])
                    time.sleep(rng.random() * 0.2)
                    break
                time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGINT if kind == "INT" else signal.SIGKILL)
        _, said = call.communicate(timeout=100)
        phases = [line.split()[0] for line in said.splitlines() if line.strip()]
        result = {"moment": round(moment, 2), "kind": kind, "status": call.returncode, "stderr": said}
        result |= {"phase": phases[-1] if phases else "start", "wrong": wrong(store, image["good"])}
        result["left_by_fault"] = leftovers(store)
        result["after"] = after(image["reference"], store, image["good"])
        results.append(result)
        shutil.rmtree(store)
    return results


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def holder_stops(image: dict[str, Any], store: Path) -> dict[str, Any]:
    """Stop the holder while it packs; another one takes over; the first wakes up and goes on."""
    holder = start(image["reference"], store)
    while not list(store.glob("tmp/*/image.sif")):
        assert holder.poll() is None, holder.communicate()
        time.sleep(0.002)
    os.kill(holder.pid, signal.SIGSTOP)
    second = pull(image["reference"], store)
    between = wrong(store, image["good"])
    os.kill(holder.pid, signal.SIGCONT)
    _, said = holder.communicate(timeout=100)
    return {
        "second": {"status": second.returncode, "stderr": second.stderr, "wrong": between},
        "first": {"status": holder.returncode, "stderr": said},
        "after": after(image["reference"], store, image["good"]),
    }


def disk_fills(image: dict[str, Any], store: Path) -> dict[str, Any]:
    """Take all space that is left when the packer begins to write; give it back afterwards."""
    call, filler = start(image["reference"], store), store.parent / "filler"
    while not list(store.glob("tmp/*/image.sif")):
        assert call.poll() is None, call.communicate()
        time.sleep(0.002)
    call.send_signal(signal.SIGSTOP)  # what feeds the packer waits until the disk is full
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    call.send_signal(signal.SIGCONT)
    _, said = call.communicate(timeout=100)
    filler.unlink()
    fault = {"status": call.returncode, "stderr": said, "wrong": wrong(store, image["good"])}
    return {"fault": fault, "after": after(image["reference"], store, image["good"])}


def times(image: dict[str, Any], store: Path, when: str) -> dict[str, Any]:
    """Kill a call, give all that it left the times of another clock, and call again."""
    call = start(image["reference"], store)
    while not list(store.glob("tmp/*/image.sif")):
        assert call.poll() is None, call.communicate()
        time.sleep(0.002)
    call.kill()
    call.communicate()
    for path in [store, *store.rglob("*")]:
        subprocess.run(["touch", "-h", "-d", when, str(path)], check=True)
    return {"fault": {"wrong": wrong(store, image["good"])}, "after": after(image["reference"], store, image["good"])}


def many(image: dict[str, Any], store: Path, count: str) -> list[dict[str, Any]]:
    """Several converters at once on this node."""
    calls = [start(image["reference"], store, "--json") for _ in range(int(count))]
    results = []
    for call in calls:
        out, said = call.communicate(timeout=200)
        phases = {json.loads(line)["event"]["phase"] for line in said.splitlines() if line.startswith('{"event"')}
        results.append({"status": call.returncode, "phases": sorted(phases), "out": out, "stderr": said[-2000:]})
    return results


def main() -> None:
    words = sys.argv[1:]
    verbs: dict[str, Callable[..., Any]] = {
        "prepare": prepare, "registry_dies": registry_dies, "registry_lies": registry_lies, "damaged": damaged,
        "broken_by": broken_by, "holder_stops": holder_stops, "many": many,
        "disk_fills": disk_fills, "times": times,
    }  # fmt: skip
    if words[0] == "proxy":
        proxy(*words[1:])
    elif words[0] == "prepare":
        print(json.dumps(prepare(*words[1:])))
    elif words[0] == "after":
        image = json.loads(Path(words[1]).read_text())
        print(json.dumps(after(image["reference"], Path(words[2]), image["good"])))
    else:
        image = json.loads(Path(words[1]).read_text())
        print(json.dumps(verbs[words[0]](image, Path(words[2]), *words[3:])))


if __name__ == "__main__":
    main()
