"""A small HTTP server for tests, on the loopback, and a registry that speaks through it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import ssl
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OCI = "application/vnd.oci.image."
DOCKER = "application/vnd.docker."


def sha(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


class QuietServer(ThreadingHTTPServer):
    """Takes a client that hangs up for what it is: clients under test do so on purpose."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, ssl.SSLError)):
            super().handle_error(request, client_address)


class Served:
    """A registry in a thread: `paths` maps a path to (status, headers, body) or a function.

    A function gets the request's handler, and returns such a triple, or None when it has
    answered by itself.
    """

    def __init__(self, tls=None):
        """`tls`: an ssl.SSLContext to speak https."""
        self.paths = {"/v2/": (200, {}, b"{}")}
        self.requests = []
        self.commands = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.requests.append((self.path, self.headers))
                outer.commands.append(self.command)
                # Unread, it would be taken for the next request.
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                missing = (404, {}, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"unknown"}]}')
                answer = outer.paths.get(path, missing)
                if answer is missing:
                    answer = outer.other(self, path) or missing
                if callable(answer):
                    answer = answer(self)
                    if answer is None:
                        return
                status, headers, body = answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            do_POST = do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def other(self, handler, path):
        """Answer a request for a path that is not in `paths`; None is 404."""
        return None

    def put(self, name, body, media):
        document = json.dumps(body).encode() if not isinstance(body, bytes) else body
        for path in (name, sha(document)):
            self.paths[f"/v2/lab/img/manifests/{path}"] = (200, {"Content-Type": media}, document)
        return {"mediaType": media, "digest": sha(document), "size": len(document)}

    def image(self, tag="1", *, arch="amd64", family=OCI, config=None, manifest=None, env=()):
        """Store an image and return its manifest's descriptor."""
        settings = {"Env": ["PATH=/bin", *env], "Cmd": ["sh"], "WorkingDir": "/w"}
        diff_ids = [sha(b"tar one"), sha(b"tar two"), sha(b"tar three")]
        whole = {
            "architecture": arch,
            "os": "linux",
            "created": "2026-01-02T03:04:05Z",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
        blob = json.dumps({**whole, **(config or {})}).encode()
        self.paths[f"/v2/lab/img/blobs/{sha(blob)}"] = (200, {}, blob)
        oci = family == OCI
        layer = OCI + "layer.v1.tar+gzip" if oci else DOCKER + "image.rootfs.diff.tar.gzip"
        media = OCI + "manifest.v1+json" if oci else DOCKER + "distribution.manifest.v2+json"
        document = {
            "schemaVersion": 2,
            "mediaType": media,
            "config": {
                "mediaType": OCI + "config.v1+json" if oci else DOCKER + "container.image.v1+json",
                "digest": sha(blob),
                "size": len(blob),
            },
            "layers": [{"mediaType": layer, "digest": sha(n), "size": len(n)} for n in (b"a", b"bb", b"ccc")],
            **(manifest or {}),
        }
        return self.put(tag, document, media)

    def index(self, entries, tag="1", family=OCI):
        oci = family == OCI
        media = OCI + "index.v1+json" if oci else DOCKER + "distribution.manifest.list.v2+json"
        body = {"schemaVersion": 2, "mediaType": media, "manifests": entries}
        return self.put(tag, body, media)

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def blob(self, body, *, ranges=True, faults=()):
        """Store a blob; each of `faults` answers one request before the blob itself does."""
        left = list(faults)
        path = f"/v2/lab/img/blobs/{sha(body)}"

        def answer(handler):
            if left:
                fault = left.pop(0)
                return fault(handler, body) if callable(fault) else fault
            begin = asked_from(handler) if ranges else 0
            if not begin:
                return 200, {"Content-Type": "application/octet-stream"}, body
            if begin >= len(body):
                return 416, {"Content-Range": f"bytes */{len(body)}"}, b""
            return 206, {"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"}, body[begin:]

        self.paths[path] = answer
        return sha(body)

    def asked(self, digest):
        """Return the Range header of each request for a blob."""
        return [headers.get("Range") for path, headers in self.requests if path.endswith(f"/blobs/{digest}")]


def asked_from(handler):
    """Return where a request's Range begins; 0 without one."""
    return int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))


def break_after(count):
    """Return a fault: as announced, but the connection ends after `count` bytes."""

    def fault(handler, body):
        begin = asked_from(handler)
        handler.send_response(206 if begin else 200)
        if begin:
            handler.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        handler.send_header("Content-Length", str(len(body) - begin))
        handler.end_headers()
        handler.wfile.write(body[begin : begin + count])
        handler.close_connection = True

    return fault


@dataclass(frozen=True, kw_only=True)
class KeptSif:
    """A SIF in a registry: two names of it, and its digest in hexadecimal and size in bytes."""

    reference: str
    by_digest: str
    sha256: str
    size: int


class SifServed(Served):
    """A registry that keeps SIFs as `apptainer push` does (apptainer 1.4, `internal/pkg/client/oras/`, 2026-11-23).

    `blobs` and `manifests` hold what was kept, by repository and name.
    """

    def __init__(self):
        super().__init__()
        self.blobs, self.manifests = {}, {}

    def keep(self, sif, repository="lab/train", tag="1"):
        """Keep a SIF, given as a path, under a tag."""
        content = sif.read_bytes()
        self.blobs[repository, sha(content)] = content
        document = {
            "schemaVersion": 2,
            "mediaType": OCI + "manifest.v1+json",
            "config": {"mediaType": "application/vnd.sylabs.sif.config.v1+json", "digest": sha(b"{}"), "size": 2},
            "layers": [
                {
                    "mediaType": "application/vnd.sylabs.sif.layer.v1.sif",
                    "digest": sha(content),
                    "size": len(content),
                    "annotations": {"org.opencontainers.image.title": sif.name},
                }
            ],
        }
        manifest = json.dumps(document).encode()
        for name in (tag, sha(manifest)):
            self.manifests[repository, name] = (document["mediaType"], manifest)
        return KeptSif(
            reference=f"oras://{self.host}/{repository}:{tag}",
            by_digest=f"oras://{self.host}/{repository}@{sha(manifest)}",
            sha256=sha(content).removeprefix("sha256:"),
            size=len(content),
        )

    def other(self, handler, path):
        match = re.fullmatch(r"/v2/(?P<name>.+?)/(?P<kind>blobs|manifests)/(?P<rest>.+?)", path)
        if match is None:
            return None
        name, kind, rest = match.group("name", "kind", "rest")
        if kind == "blobs":
            body = self.blobs.get((name, rest))
            return None if body is None else (200, {"Content-Type": "application/octet-stream"}, body)
        found = self.manifests.get((name, rest))
        if found is None:
            return None
        return 200, {"Content-Type": found[0], "Docker-Content-Digest": sha(found[1])}, found[1]
