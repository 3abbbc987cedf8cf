"""registry: a real HTTP server speaks the distribution API, well and badly."""

import base64
import contextlib
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from urllib.parse import parse_qs

import pytest
from http_server import DOCKER, OCI, Served, sha

from hpcenv.errors import FileUnusable, HpcenvError, ImageUnavailable, SpecError

# The client is imported here and not by the first test: tests measure time.
from hpcenv.image.reference import parse_platform, parse_reference
from hpcenv.image.registry import (
    client,  # noqa: F401
    source,
)
from hpcenv.image.registry import resolve as registry
from hpcenv.image.registry.source import Access


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A registry, with an empty home so that no user's credentials are used."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    it = Served()
    yield it
    it.close()


def ask(served, rest="1", **options):
    options = {"plain_http": True, "timeout": 5.0, "environ": {"HOME": os.environ["HOME"]}, **options}
    mark = "@" if rest.startswith("sha256:") else ":"
    if "platform" in options:
        options["platform"] = parse_platform(options["platform"])
    return registry.resolve(parse_reference(f"docker://{served.host}/lab/img{mark}{rest}"), **options)


def refused(served, rest="1", **options):
    with pytest.raises(ImageUnavailable) as error:
        ask(served, rest, **options)
    return error.value


# --- references ----------------------------------------------------------------------------

D = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("docker://python:3.12", "docker://docker.io/library/python:3.12"),
        ("docker://pytorch/pytorch:2.9", "docker://docker.io/pytorch/pytorch:2.9"),
        ("docker://index.docker.io/a/b:c", "docker://docker.io/a/b:c"),
        ("docker://docker.io/python", "docker://docker.io/library/python"),
        ("docker://localhost/a:1", "docker://localhost/a:1"),
        ("docker://localhost:5000/a/b/c", "docker://localhost:5000/a/b/c"),
        ("docker://r.example.org:5/a__b/c-d.e_f:T-1_.x", "docker://r.example.org:5/a__b/c-d.e_f:T-1_.x"),
        (f"docker://r.io/a@{D}", f"docker://r.io/a@{D}"),
        (f"docker://r.io/a:1@{D}", f"docker://r.io/a:1@{D}"),
        ("docker://[::1]:5000/a:1", "docker://[::1]:5000/a:1"),
        ("docker://UPPER/a:1", "docker://UPPER/a:1"),
    ],
)
def test_references_are_spelled_out(text, whole):
    assert str(parse_reference(text)) == whole


def test_docker_hub_is_asked_at_its_own_host():
    assert parse_reference("docker://python:3").api_host == "registry-1.docker.io"
    assert parse_reference("docker://ghcr.io/a:3").api_host == "ghcr.io"


@pytest.mark.parametrize(
    "text",
    [
        "", "python:3", "docker://", "docker:///a", "docker://r.io/", "docker://r.io//a", "docker://r.io/a/",
        "docker://r.io/A", "docker://r.io/a:", "docker://r.io/a:-x", "docker://r.io/a:" + "t" * 129,
        "docker://r.io/a@", "docker://r.io/a@sha256:abc", f"docker://r.io/a@{D}b", "docker://r.io/a@md5:" + "a" * 32,
        f"docker://r.io/a@{D.upper()}", "docker://r.io:0/a", "docker://r.io:99999/a", "docker://r.io:x/a",
        "docker://user:pw@r.io/a", "docker://-r.io/a", "docker://r..io/a", "docker://r.io/a b", "docker://r.io/a\n",
        "docker://r.io/../a", "docker://r.io/a?x=1", "docker://r.io/a#b", "docker://r.io/a:1:2", "docker://r.io/ü",
        "docker://r.io/a%2fb", "https://r.io/a", "oci:dir", "oci-archive://x", "docker://r.io/a$(id)", "docker://r.io/a:1\0",
        "docker://r.io/" + "a" * 300,
    ],
)  # fmt: skip
def test_nonsense_is_refused(text):
    with pytest.raises(SpecError) as error:
        parse_reference(text)
    assert error.value.why
    assert error.value.hint


def test_floating_references_are_refused_unless_allowed(served):
    served.image("latest")
    for name in map(parse_reference, (f"docker://{served.host}/lab/img", f"docker://{served.host}/lab/img:latest")):
        with pytest.raises(SpecError, match="means a new image") as error:
            registry.resolve(name, plain_http=True)
        assert "--allow-floating" in error.value.hint
        assert registry.resolve(name, plain_http=True, allow_floating=True).manifest_digest
    assert served.requests  # only of the two that were allowed


@pytest.mark.parametrize("platform", ["", "linux", "linux/amd64/v1/x", "LINUX/amd64", "linux/", "a b/c"])
def test_a_bad_platform_is_refused(platform):
    with pytest.raises(SpecError, match="not a platform"):
        parse_platform(platform)


# --- what is found -------------------------------------------------------------------------


@pytest.mark.parametrize("family", [OCI, DOCKER])
def test_an_image_is_described_by_digests_of_what_was_received(served, family):
    stored = served.image(family=family, env=["NVIDIA_REQUIRE_CUDA=cuda>=13.0 brand=tesla"])
    found = ask(served)
    assert found.reference == f"docker://{served.host}/lab/img:1"
    assert (found.registry, found.repository, found.tag) == (served.host, "lab/img", "1")
    assert (found.index_digest, found.manifest_digest) == (None, stored["digest"])
    assert found.platform == "linux/amd64"
    assert found.created == "2026-01-02T03:04:05Z"
    assert found.nvidia_require == "cuda>=13.0 brand=tesla"
    assert found.config_digest.removeprefix("sha256:") in str(list(served.paths))
    assert [(layer.digest, layer.size) for layer in found.layers] == [
        (sha(b"a"), 1),
        (sha(b"bb"), 2),
        (sha(b"ccc"), 3),
    ]
    # ChainID by hand, image-spec config.md
    one, two, three = (layer.diff_id for layer in found.layers)
    assert found.rootfs_chain_id == sha(f"{sha(f'{one} {two}'.encode())} {three}".encode())


def test_the_very_bytes_are_kept(served):
    stored = served.image()
    found = ask(served)
    assert sha(found.manifest) == found.manifest_digest == stored["digest"]
    assert sha(found.config_bytes) == found.config_digest
    assert (found.platforms, found.digest_origin) == (("linux/amd64",), "registry")


def test_by_digest_and_by_tag_with_digest(served):
    stored = served.image()
    assert ask(served, stored["digest"]).tag is None
    both = ask(served, f"other@{stored['digest']}")
    assert (both.tag, both.manifest_digest) == ("other", stored["digest"])


@pytest.mark.parametrize("family", [OCI, DOCKER])
def test_an_index_is_resolved_to_the_platform(served, family):
    amd = {**served.image("x", family=family), "platform": {"os": "linux", "architecture": "amd64"}}
    arm = {
        **served.image("y", arch="arm64", family=family),
        "platform": {"os": "linux", "architecture": "arm64", "variant": "v8"},
    }
    proof = {**amd, "platform": {"os": "unknown", "architecture": "unknown"}}
    stored = served.index([proof, amd, arm], family=family)
    found = ask(served)
    assert (found.index_digest, found.manifest_digest) == (stored["digest"], amd["digest"])
    assert found.platforms == ("linux/amd64", "linux/arm64/v8")
    for platform in ("linux/arm64", "linux/arm64/v8", "linux/aarch64"):
        assert ask(served, platform=platform).manifest_digest == arm["digest"]
    error = refused(served, platform="linux/ppc64le")
    assert error.what.endswith("has no image for linux/ppc64le")
    assert error.why == "available platforms: linux/amd64, linux/arm64/v8"


def test_platforms_of_an_index_do_not_reach_the_terminal_raw(served):
    served.index([{**served.image("x"), "platform": {"os": "\x1b[31mlinux", "architecture": "\ud800"}}])
    assert refused(served).why == "available platforms: ?[31mlinux/?"


def test_a_single_image_for_another_platform_is_refused(served):
    served.image(arch="arm64")
    assert refused(served).why == "it is an image for linux/arm64"


def test_env_digest_ignores_order_and_spelling_of_nothing(served):
    served.image("1", config={"config": {"Env": ["A=1", "B=2"], "Cmd": None, "User": ""}})
    served.image("2", config={"config": {"Env": ["B=2", "A=1"], "Entrypoint": []}})
    served.image("3", config={"config": {"Env": ["B=2", "A=1"], "User": "7"}})
    first, second, third = (ask(served, tag).env_digest for tag in "123")
    assert first == second
    assert first != third
    canonical = b'{"Cmd":[],"Entrypoint":[],"Env":["A=1","B=2"],"User":"","WorkingDir":""}'
    assert first == sha(canonical)


# --- what is refused -----------------------------------------------------------------------


def test_unknown_image(served):
    error = refused(served, "nope")
    assert error.what == f"`docker://{served.host}/lab/img:nope` does not exist"
    assert error.why == "MANIFEST_UNKNOWN: unknown"


def test_wrong_bytes_for_a_digest(served):
    stored = served.image()
    path = f"/v2/lab/img/manifests/{stored['digest']}"
    status, headers, body = served.paths[path]
    served.paths[path] = (status, headers, body + b" ")
    error = refused(served, stored["digest"])
    assert "sent a wrong manifest" in error.what
    assert f"expected {stored['digest']}\nreceived {sha(body + b' ')}" == error.why


def test_wrong_bytes_for_a_tag_that_the_registry_itself_contradicts(served):
    served.image()
    status, headers, body = served.paths["/v2/lab/img/manifests/1"]
    served.paths["/v2/lab/img/manifests/1"] = (status, {**headers, "Docker-Content-Digest": D}, body)
    assert "sent a wrong manifest" in refused(served).what


def test_wrong_bytes_for_the_configuration(served):
    served.image()
    path = next(path for path in served.paths if "/blobs/" in path)
    served.paths[path] = (200, {}, b"{}")
    assert "sent a wrong configuration" in refused(served).what


@pytest.mark.parametrize("body", [b"<html>login</html>", b"", b"[]", b"null", b"\xff\xfe", b"[" * 200000])
def test_garbage(served, body):
    served.put("1", body, OCI + "manifest.v1+json")
    assert "not an image manifest" in refused(served).what


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"config": None}, "names no configuration"),
        ({"config": {"digest": 7, "mediaType": "x"}}, "names no configuration"),
        ({"config": {"digest": D, "mediaType": "application/vnd.cncf.helm.config.v1+json"}}, "Helm chart"),
        (
            {"config": {"digest": D, "mediaType": "application/vnd.oci.empty.v1+json"}, "artifactType": "a/b"},
            "type 'a/b'",
        ),
        ({"config": {"digest": D, "mediaType": "application/vnd.sylabs.sif.config.v1"}}, "it is a SIF in a registry"),
        ({"config": {"digest": "sha256:x", "mediaType": OCI + "config.v1+json"}}, "not a sha256 one"),
        ({"layers": []}, "no layers"),
        ({"layers": None}, "no layers"),
        ({"layers": [{}]}, "has 1 layers, its configuration 3"),
        ({"layers": [{}, {}, {}]}, "not a sha256 one"),
        ({"layers": [{"digest": D, "size": -1, "mediaType": OCI + "layer.v1.tar"}] * 3}, "has the size"),
        ({"layers": [{"digest": D, "size": True, "mediaType": OCI + "layer.v1.tar"}] * 3}, "has the size"),
        (
            {"layers": [{"digest": D, "size": 1, "mediaType": OCI + "layer.v1.tar+gzip+encrypted"}] * 3},
            "is of type",
        ),
        ({"mediaType": "text/plain"}, "is of type"),
    ],
)
def test_manifests_that_are_no_container_image(served, change, why):
    served.image(manifest=change)
    assert why in refused(served).why


@pytest.mark.parametrize(
    "change", [{"rootfs": None}, {"rootfs": {"diff_ids": [1, 2, 3]}}, {"config": []}, {"config": {"Env": [1]}}, {"config": "x"}]
)  # fmt: skip
def test_damaged_configurations(served, change):
    if change == {"config": []}:
        served.image(config=change)
        assert ask(served).nvidia_require is None  # empty is "not set"
        return
    served.image(config=change)
    assert "not an image that hpcenv can use" in refused(served).what


def test_schema_1_is_refused_with_a_reason(served):
    served.put("1", {"schemaVersion": 1, "fsLayers": []}, DOCKER + "distribution.manifest.v1+prettyjws")
    assert "schema 1" in refused(served).why


AMD = {"os": "linux", "architecture": "amd64"}


@pytest.mark.parametrize("platform", [None, AMD], ids=["no platform", "the platform"])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_index_in_an_index_is_followed(served, platform, depth):
    """Image trial 5. image-spec 1.1 allows it, and an index in an index names no platform as a rule."""
    other = {**served.image("arm", arch="arm64"), "platform": {"os": "linux", "architecture": "arm64"}}
    image = {**served.image("amd"), "platform": AMD}
    entry = served.index([{**other}, image], tag="inner")
    for _ in range(depth):
        outer = {**entry, "platform": platform} if platform else entry
        entry = served.index([outer])
    found = ask(served)
    assert (found.manifest_digest, found.index_digest) == (image["digest"], entry["digest"])
    if platform is None:
        assert found.platforms == ("linux/amd64", "linux/arm64")


def test_the_first_image_that_fits_counts_also_across_indexes(served):
    first = {**served.image("a"), "platform": AMD}
    second = {**served.image("b", config={"created": "2027-01-01T00:00:00Z"}), "platform": AMD}
    empty = served.index(
        [{**served.image("c", arch="arm64"), "platform": {"os": "linux", "architecture": "arm64"}}], "e"
    )
    inner = served.index([first], tag="inner")
    served.index([empty, inner, second])
    assert ask(served).manifest_digest == first["digest"]


def test_indexes_that_never_end_are_refused(served):
    entry = served.index([{**served.image("a"), "platform": AMD}], tag="0")
    for _ in range(6):
        entry = served.index([entry])
    assert refused(served).why == "too many indexes are inside its index"
    wide = [served.index([], tag=f"w{at}") | {"size": at} for at in range(1)]
    served.index([*wide, *wide])
    assert refused(served).why == "an index inside it names itself"


def test_a_single_entry_without_a_platform_is_looked_at(served):
    image = served.image("only")
    served.index([image])
    assert ask(served).manifest_digest == image["digest"]
    served.index([image, served.image("other", arch="arm64")])
    refusal = refused(served)
    assert (refusal.why, refusal.hint) == (
        "its index names no platform for any entry",
        "check the name and the tag; registries hold more than images",
    )


def test_bad_entries_of_an_index(served):
    served.index([{"digest": "x", "platform": AMD}])
    assert "not a sha256 one" in refused(served).why
    served.index(None)
    assert refused(served).why == "its index names no platform for any entry"


def test_an_image_for_other_machines_is_offered_with_the_option(served):
    """Image trial 9: the hint said "set platform to that", and no option has that name."""
    served.image(arch="arm64")
    hint = refused(served).hint
    assert f"hpcenv image pull docker://{served.host}/lab/img:1 --platform linux/arm64" in hint
    assert 'in hpcenv.toml: platform = "linux/arm64"' in hint


@pytest.mark.parametrize(
    ("media", "hint"),
    [
        (OCI + "layer.v1.tar+gzip+encrypted", "skopeo copy --decryption-key"),
        (DOCKER + "image.rootfs.foreign.diff.tar.gzip", "choose an image for linux"),
        ("application/vnd.example.layer.v1.tar+gzip", "push the image again"),
    ],
)
def test_layers_of_another_type_have_a_hint_each(served, media, hint):
    served.image(manifest={"layers": [{"digest": D, "size": 1, "mediaType": media}] * 3})
    assert hint in refused(served).hint


def test_a_request_that_is_sent_again_is_told(served):
    """Image trial 10: a wait without a message looks like a hang."""
    image = served.image()
    manifest = served.paths["/v2/lab/img/manifests/1"]
    answers = [(429, {"Retry-After": "1"}, b"{}"), (503, {}, b"{}")]
    served.paths["/v2/lab/img/manifests/1"] = lambda _: answers.pop(0) if answers else manifest
    events = []
    assert ask(served, on_event=events.append).manifest_digest == image["digest"]
    assert [event.what for event in events] == [
        f"the registry `{served.host}` answered with status 429: asking again in 1 s",
        f"the registry `{served.host}` answered with status 503: asking again in 1 s",
    ]


def test_a_token_server_without_tls_is_named_and_not_the_registry(served):
    """Fault trial R3: the registry was blamed for not speaking https."""
    other = Served()
    challenge = f'Bearer realm="https://{other.host}/token",service="x"'
    served.paths["/v2/"] = (401, {"WWW-Authenticate": challenge}, b"{}")
    served.image()
    error = refused(served)
    other.close()
    assert error.what == f"`{other.host}`, which the registry `{served.host}` named, cannot be used with https"
    assert error.hint == "report this to the administrators of the registry"


def test_a_manifest_that_drips_ends_at_the_deadline(served):
    """Fault trial R3: one byte each second kept hpcenv waiting for hours."""
    gate = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not gate.wait(0.05):
                handler.wfile.write(b" ")

    served.paths["/v2/lab/img/manifests/1"] = drip
    begin = time.monotonic()
    assert "did not answer within 0.5 s" in refused(served, timeout=0.5).what
    gate.set()
    assert time.monotonic() - begin < 3


def test_too_large_documents_are_not_read_to_the_end(served):
    served.put("1", b" " * (4 * 1024 * 1024 + 1), OCI + "manifest.v1+json")
    assert "more than 4 MiB" in refused(served).what
    served.image("2", config={"x": "y" * (8 * 1024 * 1024)})
    assert "more than 8 MiB" in refused(served, "2").what


# --- the network ---------------------------------------------------------------------------


def test_registry_down_is_said_within_two_seconds(served):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(ImageUnavailable, match="is down") as error:
        registry.resolve(parse_reference(f"docker://127.0.0.1:{port}/a:1"), plain_http=True)
    assert f"no program listens at 127.0.0.1:{port}" in error.value.why
    assert time.monotonic() - begin < 4


def test_https_to_a_plain_http_registry_names_the_setting(served):
    error = refused(served, plain_http=False)
    assert error.what == f"`{served.host}` does not use https"
    assert f'add "{served.host}" to plain-http in hpcenv.toml' in error.hint


def test_unknown_host():
    with pytest.raises(ImageUnavailable, match="is not a known host"):
        registry.resolve(parse_reference("docker://no-such-host.invalid/a:1"), timeout=20)


def test_a_silent_registry(served):
    served.paths["/v2/"] = lambda handler: time.sleep(3) or (200, {}, b"")
    begin = time.monotonic()
    assert "did not answer within 0.5 s" in refused(served, timeout=0.5).what
    assert time.monotonic() - begin < 2.5


def test_a_dripping_registry(served):
    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(40):
                handler.wfile.write(b"x" * 20000)
                time.sleep(0.1)
        return 200, {}, b""

    served.paths["/v2/lab/img/manifests/1"] = drip
    begin = time.monotonic()
    assert "did not answer within 0.5 s" in refused(served, timeout=0.5).what
    assert time.monotonic() - begin < 3


def test_a_broken_connection(served):
    def hang_up(handler):
        handler.connection.shutdown(socket.SHUT_RDWR)
        return 200, {}, b""

    served.paths["/v2/"] = hang_up
    assert "closed the connection too early" in refused(served).what


def test_the_name_of_a_repository_is_not_taken_for_a_cause():
    with pytest.raises(ImageUnavailable) as error:
        registry.resolve(
            parse_reference("docker://127.0.0.1:1/resolve/refused:1"), plain_http=True, timeout=1.0, environ={}
        )
    assert error.value.what == "the registry `127.0.0.1:1` is down"
    with pytest.raises(ImageUnavailable) as error:
        registry.resolve(
            parse_reference("docker://nothing.invalid/refused:1"), plain_http=True, timeout=5.0, environ={}
        )
    assert error.value.what == "the registry `nothing.invalid` is not a known host"


def test_a_transient_fault_is_asked_again(served):
    served.image()
    good = served.paths["/v2/lab/img/manifests/1"]
    faults = [(503, {}, b""), (500, {}, b"")]
    served.paths["/v2/lab/img/manifests/1"] = lambda handler: faults.pop() if faults else good
    assert ask(served).manifest_digest
    assert not faults


@pytest.mark.parametrize(
    ("status", "body", "part"),
    [
        (500, b"boom", "status 500"),
        (429, b'{"errors":[{"code":"TOOMANYREQUESTS","message":"slow down"}]}', "more requests"),
        (418, b"\x1b[31mred", "status 418"),
    ],
)
def test_other_statuses(served, status, body, part):
    served.paths["/v2/lab/img/manifests/1"] = (status, {}, body)
    error = refused(served)
    assert part in error.what
    assert "\x1b" not in str(error)


def test_http_to_an_https_registry(served):
    body = b"Client sent an HTTP request to an HTTPS server.\n"
    served.paths["/v2/"] = (400, {}, body)
    assert "requires https, and hpcenv used http" in refused(served).what


# --- access --------------------------------------------------------------------------------


def demand_token(served, *, secret=None, token="t0k3n"):
    """Let manifests and blobs want a bearer token, which /token gives (for `secret`)."""
    challenge = f'Bearer realm="http://{served.host}/token",service="reg",scope="repository:lab/img:pull"'

    def guarded(answer):
        def respond(handler):
            if handler.headers.get("Authorization") == f"Bearer {token}":
                return answer
            return 401, {"Www-Authenticate": challenge}, b'{"errors":[{"code":"UNAUTHORIZED"}]}'

        return respond

    def give(handler):
        if secret and handler.headers.get("Authorization") != f"Basic {secret}":
            return 401, {}, b"{}"
        return 200, {}, json.dumps({"token": token}).encode()

    for path, answer in list(served.paths.items()):
        served.paths[path] = guarded(answer)
    served.paths["/token"] = give


def log_in(home, host, user="u", password="pw-s3cret"):
    secret = base64.b64encode(f"{user}:{password}".encode()).decode()
    folder = home / ".docker"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": secret}}}))
    return secret


def test_an_anonymous_token_is_fetched(served):
    served.image()
    demand_token(served)
    assert ask(served).manifest_digest


def test_dockers_credentials_buy_a_token(served, tmp_path):
    served.image()
    demand_token(served, secret=log_in(tmp_path, served.host))
    assert ask(served).manifest_digest


def test_basic_authentication(served, tmp_path):
    served.image()
    secret = log_in(tmp_path, f"https://{served.host}")
    for path, answer in list(served.paths.items()):

        def respond(handler, answer=answer):
            if handler.headers.get("Authorization") == f"Basic {secret}":
                return answer
            return 401, {"Www-Authenticate": 'Basic realm="Registry"'}, b""

        served.paths[path] = respond
    assert ask(served).manifest_digest


@pytest.mark.parametrize("scheme", ["Basic", "Bearer", None])
@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_is_said_without_secrets(served, tmp_path, capfd, caplog, scheme, status):
    secret = log_in(tmp_path, served.host)
    realm = f'{scheme} realm="http://{served.host}/token",service="x"'
    headers = {"Www-Authenticate": realm} if scheme else {}
    body = b'{"errors":[{"code":"DENIED","message":"no"}]}'
    for path in ("/v2/", "/v2/lab/img/manifests/1", "/token"):
        served.paths[path] = (status, headers, body)
    with caplog.at_level(logging.DEBUG):
        error = refused(served)
    assert error.what == f"access to `docker://{served.host}/lab/img:1` was denied"
    assert "docker login" in error.hint
    said = "".join([str(error), *capfd.readouterr(), caplog.text])
    for hidden in ("pw-s3cret", secret):
        assert hidden not in said


def identity(home, host):
    folder = home / ".docker"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"identitytoken": "refresh-s3cret"}}}))


def test_an_identity_token_buys_a_token_by_post(served, tmp_path):
    served.image()
    identity(tmp_path, served.host)
    demand_token(served)
    forms = []

    def give(handler):
        assert handler.command == "POST"
        forms.append(parse_qs(handler.body.decode()))
        return 200, {}, b'{"access_token":"t0k3n"}'

    served.paths["/token"] = give
    assert ask(served).manifest_digest
    assert forms[0] == {
        "grant_type": ["refresh_token"],
        "client_id": ["hpcenv"],
        "refresh_token": ["refresh-s3cret"],
        "service": ["reg"],
        "scope": ["repository:lab/img:pull"],
    }
    assert not any("refresh-s3cret" in path or "refresh-s3cret" in str(said) for path, said in served.requests)


def test_an_identity_token_is_not_sent_on_by_a_redirect(served, tmp_path):
    served.image()
    identity(tmp_path, served.host)
    demand_token(served)
    served.paths["/token"] = (307, {"Location": f"http://localhost:{served.server.server_port}/elsewhere"}, b"")
    assert "answered 307" in refused(served).why
    assert not any(path == "/elsewhere" for path, _ in served.requests)


def test_a_registry_token_is_shown_as_it_is(served, tmp_path):
    served.image()
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text(json.dumps({"auths": {served.host: {"registrytoken": "t0k3n"}}}))
    demand_token(served)
    assert ask(served).manifest_digest
    assert not any(path.startswith("/token") for path, _ in served.requests)


def test_apptainers_login_is_used(served, tmp_path):
    served.image()
    secret = log_in(tmp_path, served.host)
    (tmp_path / ".apptainer").mkdir()
    (tmp_path / ".docker/config.json").rename(tmp_path / ".apptainer/docker-config.json")
    demand_token(served, secret=secret)
    assert ask(served).manifest_digest


def test_bearer_is_preferred_where_both_are_offered(served, tmp_path):
    served.image()
    secret = log_in(tmp_path, served.host)
    demand_token(served, secret=secret)
    for path, answer in list(served.paths.items()):

        def respond(handler, answer=answer):
            status, headers, body = answer(handler)
            if "Www-Authenticate" in headers:
                headers = {"Www-Authenticate": f'Basic realm="x, Bearer", {headers["Www-Authenticate"]}'}
            return status, headers, body

        served.paths[path] = respond
    assert ask(served).manifest_digest
    assert [headers.get("Authorization") for path, headers in served.requests if path.startswith("/token")] == [
        f"Basic {secret}"
    ]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"token": 7}', b'{"token": ""}', b'{"token": "a\\r\\nX: y"}', b" " * (1 << 21)]
)  # fmt: skip
def test_a_token_server_that_gives_none(served, body):
    served.image()
    demand_token(served)
    served.paths["/token"] = (200, {}, body)
    assert "the token server answered with" in refused(served).why


@pytest.mark.parametrize("realm", ["", "http://", "ftp://x/y", "http://user:pw@x/y", "http://[::1", "//x"])
def test_a_realm_that_is_none(served, realm):
    served.image()
    served.paths["/v2/lab/img/manifests/1"] = (401, {"Www-Authenticate": f'Bearer realm="{realm}"'}, b"")
    assert "access to" in refused(served, timeout=1.0).what


def test_a_failed_helper_is_named_when_access_is_denied(served, tmp_path):
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text('{"credsStore": "nowhere"}')
    served.paths["/v2/lab/img/manifests/1"] = (401, {"Www-Authenticate": "Basic"}, b"")
    why = refused(served).why
    assert "no credentials for it were found" in why
    assert "`docker-credential-nowhere` is not on PATH" in why


def test_a_refused_password_says_where_it_is_from(served, tmp_path):
    log_in(tmp_path, served.host)
    served.paths["/v2/lab/img/manifests/1"] = (401, {"Www-Authenticate": "Basic"}, b"")
    assert f"used: the password of u from {tmp_path}/.docker/config.json" in refused(served).why
    # Shown once, not again and again.
    assert len(served.requests) == 3


def test_a_password_goes_over_plain_http_only_where_the_user_named_the_registry(served, tmp_path):
    """In plain-http of hpcenv.toml a repository names it: a password could be read on the way."""
    served.image()
    secret = log_in(tmp_path, served.host)
    demand_token(served, secret=secret)
    reference, environ = parse_reference(f"docker://{served.host}/lab/img:1"), {"HOME": os.environ["HOME"]}
    by_project = Access(plain_http=(served.host,), without_password=(served.host,), environ=environ)
    with pytest.raises(ImageUnavailable) as error:
        source.resolve(reference, by_project, platform=parse_platform("linux/amd64"))
    assert f"a saved password is not sent to {served.host}" in error.value.why
    assert f"--plain-http {served.host}" in error.value.why
    sent = [headers.get("Authorization", "") for _path, headers in served.requests]
    assert not any(secret in header for header in sent)
    typed = Access(plain_http=(served.host,), environ=environ)
    assert source.resolve(reference, typed, platform=parse_platform("linux/amd64")).manifest_digest


# --- https ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of this machine that no program trusts, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", *words.split(), *names, *files], check=True, capture_output=True)
    return folder / "cert.pem"


@pytest.fixture
def secured(served, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    it = Served(tls=context)
    yield it
    it.close()


def test_a_certificate_is_trusted_by_setting_only(secured, certificate, monkeypatch):
    stored = secured.image()
    error = refused(secured, plain_http=False)
    assert error.what == f"the certificate of `{secured.host}` is not trusted"
    assert ask(secured, plain_http=False, ca_file=certificate).manifest_digest == stored["digest"]
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    assert ask(secured, plain_http=False).manifest_digest == stored["digest"]


def test_a_ca_file_counts_before_the_variable(secured, certificate, monkeypatch, tmp_path):
    stored = secured.image()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "nowhere.pem"))
    assert ask(secured, plain_http=False, ca_file=certificate).manifest_digest == stored["digest"]


@pytest.mark.parametrize(
    "text", [None, "", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_ca_file_that_is_none(served, tmp_path, text):
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FileUnusable, match="cannot be used as a CA file"):
        ask(served, ca_file=path)


@pytest.mark.parametrize("location", ["https://[x", "http://[", "//127.0.0.1:abc/x"])
def test_a_redirect_to_something_that_is_no_address_is_refused(served, location):
    served.paths["/v2/lab/img/manifests/1"] = (307, {"Location": location}, b"")
    assert "redirects to something that is not an address" in refused(served).what


def test_https_is_not_left_by_a_redirect(served, secured, certificate):
    secured.image()
    path = "/v2/lab/img/manifests/1"
    served.paths[path] = secured.paths[path]
    secured.paths[path] = (307, {"Location": f"http://{served.host}{path}"}, b"")
    assert "redirects to an address without encryption" in refused(secured, plain_http=False, ca_file=certificate).what
    assert served.requests == []


def test_a_password_is_not_sent_without_encryption(served, secured, certificate, tmp_path):
    secured.image()
    log_in(tmp_path, secured.host)
    realm = f'Bearer realm="http://{served.host}/token"'
    secured.paths["/v2/lab/img/manifests/1"] = (401, {"Www-Authenticate": realm}, b"")
    assert (
        "uses no encryption; hpcenv did not send the login there"
        in refused(secured, plain_http=False, ca_file=certificate).why
    )
    assert served.requests == []


def test_basic_without_credentials(served):
    served.paths["/v2/"] = (401, {"Www-Authenticate": 'Basic realm="r"'}, b"")
    assert "none is known" in refused(served).why


@pytest.mark.parametrize("text", ["{", "[]", '{"auths": []}', '{"auths": {"HOST": 7}}'])
def test_damaged_credentials_file(served, tmp_path, text):
    served.image()
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text(text.replace("HOST", served.host))
    with contextlib.suppress(HpcenvError):
        ask(served)


def test_netrc_is_not_used(served, tmp_path):
    served.image()
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password hidden\n")
    (tmp_path / ".netrc").chmod(0o600)
    ask(served)
    assert not any("Authorization" in headers for _, headers in served.requests)


def test_importing_the_module_loads_no_http_library():
    import subprocess
    import sys

    code = "import sys, hpcenv.image.registry.resolve; print('requests' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
