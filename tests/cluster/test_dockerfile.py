"""Dockerfiles of five common kinds, built without docker, by buildah and podman.

The testbed has both on its login node.

The bases are the lowest layer of the testbed's image (Debian 12 with Python), and an image that says of itself what
conda's images say: another shell, a user, an entry point. There is no conda in it: the testbed has no network.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import IMAGE, Cluster
from .test_cuda_image import give_to_alice
from .test_image_init import PUSH, fabric_packages, index_of, wheels

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]

HOST = IMAGE.removeprefix("docker://").split("/", 1)[0]
PIP = "python3 -m pip install --break-system-packages --no-cache-dir --no-index --find-links"

# As in mambaorg/micromamba (its Dockerfile, read 2026-11-23): RUN goes through a shell that activates the environment.
CONDA_SHELL = '#!/bin/sh\nexport CONDA_PREFIX=/opt/conda\nexec /bin/bash -o pipefail -c "$1"\n'
CONDA_ENTRY = '#!/bin/sh\nexport CONDA_PREFIX=/opt/conda\nexec "$@"\n'
CONDA_CONFIG = {
    "Shell": ["/usr/local/bin/_dockerfile_shell.sh"],
    "Entrypoint": ["/usr/local/bin/_entrypoint.sh"],
    "Cmd": ["/bin/bash"],
    "User": "mambauser",
    "WorkingDir": "/tmp",
    "Env": ["PATH=/opt/conda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "MAMBA_USER=mambauser"],
}
PUSH_LAYER = """
import hashlib, json, sys, urllib.request
host, digest, layer, settings = sys.argv[1], sys.argv[2], open(sys.argv[3], "rb").read(), json.loads(sys.argv[4])
url, kind = f"http://{host}/v2", "application/vnd.oci.image.manifest.v1+json"
def call(method, where, data=None, **headers):
    request = urllib.request.Request(where, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, answer.read()
def put(body):
    name = "sha256:" + hashlib.sha256(body).hexdigest()
    place = call("POST", f"{url}/hpcenv/base/blobs/uploads/", data=b"")[0]["Location"]
    place = place if "://" in place else f"http://{host}{place}"
    where = f"{place}{'&' if '?' in place else '?'}digest={name}"
    call("PUT", where, data=body, **{"Content-Type": "application/octet-stream"})
    return {"digest": name, "size": len(body)}
manifest = json.loads(call("GET", f"{url}/hpcenv/base/manifests/{digest}", Accept=kind)[1])
config = json.loads(call("GET", f"{url}/hpcenv/base/blobs/{manifest['config']['digest']}")[1])
config["rootfs"]["diff_ids"] += ["sha256:" + hashlib.sha256(layer).hexdigest()]
config["history"] += [{"created_by": "test"}]
config["config"] = settings
manifest["layers"] += [{**put(layer), "mediaType": "application/vnd.oci.image.layer.v1.tar"}]
manifest["config"] |= put(json.dumps(config, sort_keys=True).encode())
body = json.dumps(manifest, sort_keys=True).encode()
name = "sha256:" + hashlib.sha256(body).hexdigest()
call("PUT", f"{url}/hpcenv/base/manifests/{name}", data=body, **{"Content-Type": kind})
print(name)
"""

DOCKERFILES = {
    "pip": f"""
FROM @BASE@
WORKDIR /app
COPY requirements.txt ./
COPY wheels wheels/
RUN {PIP} wheels -r requirements.txt \\
    && rm -r wheels
COPY . .
CMD ["python3", "/app/app.py"]
""",
    "apt-and-pip": f"""
FROM @BASE@
COPY debs /debs
RUN echo "deb [trusted=yes] file:/debs ./" > /etc/apt/sources.list \\
 && rm -f /etc/apt/sources.list.d/* \\
 && apt-get update -o APT::Sandbox::User=root \\
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libibverbs1 \\
 && rm -rf /var/lib/apt/lists/* /debs
RUN --mount=type=cache,target=/root/.cache/pip python3 --version
ADD wheels.tar.gz /
RUN {PIP} /wheels filelock
COPY app.py /app/
CMD python3 /app/app.py; ls /usr/lib/x86_64-linux-gnu/libibverbs.so.1
""",
    "stages": """
ARG BASE=@BASE@
FROM ${BASE} AS builder
RUN python3 -m venv /opt/venv
COPY wheels /wheels
RUN /opt/venv/bin/pip install --no-index --find-links /wheels filelock
FROM builder AS unused
RUN false
FROM $BASE
COPY --from=builder /opt/venv /opt/venv
COPY --chmod=755 <<'EOF' /usr/local/bin/start
#!/bin/sh
exec python3 /app.py "$@"
EOF
ENV PATH=/opt/venv/bin:$PATH
COPY app.py /app.py
ENTRYPOINT ["start"]
""",
    "conda-like": """
FROM @CONDA@
COPY --chown=$MAMBA_USER:$MAMBA_USER app.py /opt/app.py
ARG MAMBA_DOCKERFILE_ACTIVATE=1
RUN test "$CONDA_PREFIX" = /opt/conda && test "$HOME" = /home/mambauser \\
 && echo "$MAMBA_DOCKERFILE_ACTIVATE" > ~/activated
RUN mkdir -p /opt/conda/bin && ln -s /usr/bin/python3 /opt/conda/bin/python3
CMD ["sh", "-c", "echo $CONDA_PREFIX; cat /home/mambauser/activated; which python3; python3 /opt/app.py"]
""",
    "settings": """
FROM @BASE@
ARG NAME=world
ARG GREETING
ENV TITLE="hello $NAME" EMPTY= \\
    # a comment inside
    WHERE=/srv/${NAME}
LABEL org.opencontainers.image.title="greeter of $NAME"
RUN useradd --create-home greeter && mkdir -m 777 $WHERE
WORKDIR $WHERE
USER greeter
COPY app.py link.py* ./
RUN echo "$GREETING" > greeting && pwd > where && echo "$HOME" > home
EXPOSE 8080
HEALTHCHECK CMD true
SHELL ["/bin/bash", "-c"]
ENTRYPOINT ["sh", "-c", "echo $TITLE; cat /srv/*/greeting /srv/*/where /srv/*/home; echo \\"$@\\"", "--"]
CMD ["no", "words"]
""",
}

SAYS = {
    "pip": ((), ["app filelock True"]),
    "apt-and-pip": ((), ["app filelock True", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"]),
    "stages": (("more",), ["app filelock True more"]),
    "conda-like": ((), ["/opt/conda", "1", "/opt/conda/bin/python3", "app filelock False"]),
    "settings": ((), ["hello reader", "good day", "/srv/reader", "/home/greeter", "no words"]),
}
OPTIONS = {"settings": ("--build-arg", "NAME=reader", "--build-arg", "GREETING=good day")}
APP = """
import importlib.util, os, sys
assert not os.path.exists("/app/secret.env"), "what .dockerignore names was copied"
print("app filelock", importlib.util.find_spec("filelock") is not None, *sys.argv[1:])
"""


def conda_layer(passwd: str, group: str) -> bytes:
    files = {
        "usr/local/bin/_dockerfile_shell.sh": (CONDA_SHELL, 0o755),
        "usr/local/bin/_entrypoint.sh": (CONDA_ENTRY, 0o755),
        "etc/passwd": (passwd, 0o644),
        "etc/group": (group, 0o644),
    }
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, (text, mode) in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text.encode()), mode
            archive.addfile(member, io.BytesIO(text.encode()))
        for name in ("home/mambauser", "opt/conda"):
            place = tarfile.TarInfo(name)
            place.type, place.mode, place.uid, place.gid = tarfile.DIRTYPE, 0o755, 57439, 57439
            archive.addfile(place)
    return held.getvalue()


@pytest.fixture(scope="module")
def bases(cluster: Cluster) -> dict[str, str]:
    name = IMAGE.removeprefix("docker://").split("/", 1)[1]
    plain = cluster.must("python3", "-", HOST, name, stdin=PUSH).strip()
    execute = ("apptainer", "exec", "--no-https", f"docker://{HOST}/hpcenv/base@{plain}")
    passwd, group = (cluster.must(*execute, "cat", path) for path in ("/etc/passwd", "/etc/group"))
    layer = conda_layer(f"{passwd}mambauser:x:57439:57439::/home/mambauser:/bin/bash\n", f"{group}mambauser:x:57439:\n")
    held = f"/home/alice/hpcenv-tests/conda-{uuid.uuid4().hex[:6]}.tar"
    cluster.write(held, os.fsdecode(layer))
    conda = cluster.must("python3", "-", HOST, plain, held, json.dumps(CONDA_CONFIG), stdin=PUSH_LAYER).strip()
    cluster.run("rm", held)
    return {"@BASE@": f"{HOST}/hpcenv/base@{plain}", "@CONDA@": f"{HOST}/hpcenv/base@{conda}"}


@pytest.fixture(scope="module")
def folder(cluster: Cluster) -> Iterator[str]:
    """alice's folder with what the Dockerfiles copy."""
    inside = f"/home/alice/hpcenv-tests/docker-{uuid.uuid4().hex[:6]}"
    place = Path(json.loads(cluster.testbed("status", "--json").stdout)["state"]) / inside.lstrip("/")
    (place / "wheels").mkdir(parents=True)
    (wheel,) = [path for path in wheels() if path.name.startswith("filelock")]
    shutil.copy(wheel, place / "wheels")
    with tarfile.open(place / "wheels.tar.gz", "w:gz") as archive:
        archive.add(place / "wheels", "wheels")
    (place / "debs").mkdir()
    for path in fabric_packages():
        shutil.copy(path, place / "debs")
    (place / "debs" / "Packages").write_text(index_of(fabric_packages()))
    (place / "app.py").write_text(APP)
    (place / "link.py").symlink_to("app.py")
    (place / "requirements.txt").write_text("filelock\n")
    (place / "secret.env").write_text("PASSWORD=1\n")
    (place / ".dockerignore").write_text("*.env\n**/*.pyc\nstore\n")
    give_to_alice(place)
    yield inside
    cluster.run("sh", "-c", f"chmod -R u+w {inside}; rm -rf {inside}", timeout=600)


@pytest.mark.parametrize("engine", ["buildah", "podman"])
@pytest.mark.parametrize("kind", DOCKERFILES)
def test_a_dockerfile_is_built_without_docker(
    cluster: Cluster, folder: str, bases: dict[str, str], kind: str, engine: str
) -> None:
    if cluster.run("which", engine).status != 0:
        pytest.skip(f"NOT RUN: {engine} is not installed on the testbed's login node")
    text = DOCKERFILES[kind]
    for hole, base in bases.items():
        text = text.replace(hole, base)
    file = f"Dockerfile.{kind}"
    cluster.write(f"{folder}/{file}", text)
    words = ("image", "build", file, "--engine", engine, "--plain-http", HOST, "--store", f"{folder}/store")
    words += OPTIONS.get(kind, ())
    # The testbed's machines have no /sys/fs/cgroup, which a container of buildah and podman needs.
    done = cluster.run("env", "BUILDAH_ISOLATION=chroot", "hpcenv", *words, cwd=folder, timeout=600)
    assert done.status == 0, done.text[-6000:]
    arguments, expected = SAYS[kind]
    said = cluster.run("apptainer", "-q", "run", "--cleanenv", done.stdout.split()[-1], *arguments, cwd=folder)
    assert said.stdout.splitlines() == expected, said.text
    assert os.path.basename(file) in done.stderr
