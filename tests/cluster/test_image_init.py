"""`hpcenv image init` makes what it says: a definition file that alice builds, and an image that passes lint."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import IMAGE, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]

CACHE = Path(os.environ.get("HPCENV_TESTBED_CACHE") or Path.home() / ".cache" / "hpcenv-testbed")
DEBS = ("libibverbs1", "ibverbs-providers", "librdmacm1", "libnl-3-200", "libnl-route-3-200")

# The lowest layer of the test image is Debian 12 with Python: pushed as an image of its own, it is a base.
PUSH = """
import hashlib, json, sys, urllib.request
host, name = sys.argv[1], sys.argv[2]
url, kind = f"http://{host}/v2", "application/vnd.oci.image.manifest.v1+json"
def call(method, where, data=None, **headers):
    request = urllib.request.Request(where, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, answer.read()
repository, tag = name.split(":")
manifest = json.loads(call("GET", f"{url}/{repository}/manifests/{tag}", Accept=kind)[1])
config = json.loads(call("GET", f"{url}/{repository}/blobs/{manifest['config']['digest']}")[1])
layer = manifest["layers"][0]
config["rootfs"]["diff_ids"], config["history"] = config["rootfs"]["diff_ids"][:1], config["history"][:1]
config["config"] = {"Env": config["config"]["Env"][:1], "Cmd": ["bash"]}
body = json.dumps(config, sort_keys=True).encode()
digest = "sha256:" + hashlib.sha256(body).hexdigest()
call("POST", f"{url}/hpcenv/base/blobs/uploads/?mount={layer['digest']}&from={repository}", data=b"")
place = call("POST", f"{url}/hpcenv/base/blobs/uploads/", data=b"")[0]["Location"]
place = place if "://" in place else f"http://{host}{place}"
where = f"{place}{'&' if '?' in place else '?'}digest={digest}"
call("PUT", where, data=body, **{"Content-Type": "application/octet-stream"})
manifest["config"] |= {"digest": digest, "size": len(body)}
manifest["layers"] = [layer]
body = json.dumps(manifest, sort_keys=True).encode()
digest = "sha256:" + hashlib.sha256(body).hexdigest()
call("PUT", f"{url}/hpcenv/base/manifests/{digest}", data=body, **{"Content-Type": kind})
print(digest)
"""


def wheels() -> list[Path]:
    """torch and what it needs: those of the testbed's own image."""
    kept = next(place for place in CACHE.glob("wheels-torch-*") if place.is_dir())
    return sorted(kept.glob("*.whl"))


def fabric_packages() -> list[Path]:
    """Debian 12's own packages, by this machine's apt and the mirror that the testbed's image was made from."""
    return debian_packages("fabric-debs", DEBS)


def debian_packages(shelf_name: str, names: tuple[str, ...], root: Path | None = None) -> list[Path]:
    """Packages with all that they require and a root lacks; without one, Debian 12 and the testbed's image."""
    shelf = CACHE / shelf_name
    if (shelf / "complete").exists():
        return sorted(shelf.glob("*.deb"))
    root = root or next(CACHE.glob("image-base-*/etc/apt/sources.list")).parents[2]
    (shelf / "state" / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (shelf / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::Etc::SourceList": f"{root}/etc/apt/sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::TrustedParts": f"{root}/etc/apt/trusted.gpg.d",
        "Dir::State": str(shelf / "state"),
        "Dir::State::status": f"{root}/var/lib/dpkg/status",
        "Dir::Cache": str(shelf / "cache"),
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "--quiet", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    subprocess.run([*apt, "update"], check=True, capture_output=True, timeout=300)
    install = ["--yes", "--download-only", "--no-install-recommends", "install"]
    subprocess.run([*apt, *install, *names], check=True, capture_output=True, timeout=600)
    for path in (shelf / "cache" / "archives").glob("*.deb"):
        path.rename(shelf / path.name)
    (shelf / "complete").touch()
    return sorted(shelf.glob("*.deb"))


def index_of(packages: list[Path]) -> str:
    """A `Packages` file of a flat repository."""
    said = []
    for path in packages:
        fields = ("Package", "Version", "Architecture", "Multi-Arch", "Pre-Depends", "Depends", "Provides")
        control = subprocess.run(["dpkg-deb", "-f", path, *fields], check=True, capture_output=True, text=True).stdout
        plain = "".join(line for line in control.splitlines(keepends=True) if not line.startswith(" "))
        raw = path.read_bytes()
        said.append(f"{plain}Filename: ./{path.name}\nSize: {len(raw)}\nSHA256: {hashlib.sha256(raw).hexdigest()}\n")
    return "\n".join(said)


@pytest.fixture(scope="module")
def folder(cluster: Cluster) -> Iterator[str]:
    """A folder of alice's with a lock, and what her site would give: pip.conf, apt.sources, wheels and packages."""
    place = f"/home/alice/hpcenv-tests/init-{uuid.uuid4().hex[:6]}"
    pins = []
    for wheel in wheels():
        cluster.write(f"{place}/site/wheels/{wheel.name}", os.fsdecode(wheel.read_bytes()))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        name, version = wheel.name.split("-")[:2]
        pins.append(f"{name}=={version} --hash=sha256:{digest}\n")
    packages = fabric_packages()
    for path in packages:
        cluster.write(f"{place}/site/debs/{path.name}", os.fsdecode(path.read_bytes()))
    cluster.write(f"{place}/site/debs/Packages", index_of(packages))
    cluster.write(f"{place}/site/apt.sources", "Types: deb\nURIs: file:/mnt/debs\nSuites: ./\nTrusted: yes\n")
    cluster.write(f"{place}/site/pip.conf", "[global]\nno-index = true\nfind-links = /mnt/wheels\n")
    cluster.write(f"{place}/requirements.txt", "".join(pins))
    yield place
    cluster.run("rm", "-rf", place)


def test_alice_builds_what_init_wrote_and_it_passes_lint(cluster: Cluster, folder: str) -> None:
    host, name = IMAGE.removeprefix("docker://").split("/", 1)
    digest = cluster.must("python3", "-", host, name, stdin=PUSH).strip()
    words = ("--torch", "2.13.0", "--cuda", "cpu", "--pylock", "requirements.txt", "--tag", "tiny", "--output", "image")
    done = cluster.run("hpcenv", "image", "init", *words, "--base", f"{host}/hpcenv/base@{digest}", cwd=folder)
    assert done.status == 0, done.text
    assert "tiny:v2.13.0-cpu-bookworm" in done.stdout

    quick = ("--mksquashfs-args", "-comp zstd -Xcompression-level 1")
    bind = ("--bind", f"{folder}/site:/mnt:ro")
    build = ("apptainer", "build", "--no-https", *quick, *bind, "tiny.sif", "image.def")
    done = cluster.run(*build, cwd=f"{folder}/image", timeout=600)
    assert done.status == 0, done.text[-4000:]

    paths = [f"image/{one}" for one in ("Dockerfile", "image.def", "tiny.sif")]
    done = cluster.run("hpcenv", "image", "lint", *paths, "--fail-on", "warn", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert done.status == 0, done.text
    assert found["data"]["counts"]["error"] == found["data"]["counts"]["warn"] == 0
    assert [one["kind"] for one in found["data"]["checked"]] == ["dockerfile", "definition", "sif"]

    look = (
        "import sys, os, json, ctypes, torch; ctypes.CDLL('libibverbs.so.1')\n"
        "report = json.load(open('/usr/share/hpcenv/pip-report.json'))\n"
        "print(json.dumps([sys.prefix, sys.version_info[:2], os.getuid(), os.listdir('/mnt'),"
        " torch.__version__, sorted(one['metadata']['name'].lower() for one in report['install'])]))"
    )
    run = ("apptainer", "-q", "exec", "--cleanenv", "image/tiny.sif", "python3", "-c", look)
    inside = json.loads(cluster.must(*run, cwd=folder))
    names = [wheel.name.split("-")[0].lower() for wheel in wheels()]
    assert inside == ["/opt/venv", [3, 11], 2001, [], "2.13.0+cpu", sorted(names)]
