"""Where a distribution came from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from probe_world import Venv, package


def test_build_and_tags_come_from_wheel(env: Venv) -> None:
    text = b"Wheel-Version: 1.0\nGenerator: x\nTag: cp311-cp311-linux_x86_64\nBuild: 3\nTag: cp311-abi3-linux_x86_64\n"
    env.install("built", {"built-1.0.dist-info/WHEEL": text})
    built = package(env.probe(), "built")
    assert (built["build"], built["source"]) == ("3", "wheel")
    assert built["tags"] == ["cp311-abi3-linux_x86_64", "cp311-cp311-linux_x86_64"]
    assert package(env.probe(), "demo")["source"] == "unknown"


@pytest.mark.parametrize(
    ("origin", "source", "direct"),
    [
        (
            {
                "url": "https://user:secret@host.example/x/y.git?token=secret",
                "vcs_info": {"vcs": "git", "commit_id": "ab12"},
            },
            "vcs",
            {"url": "https://host.example/x/y.git", "commit-id": "ab12"},
        ),
        (
            {"url": "https://host.example/d-1.0.tar.gz#sha256=1", "archive_info": {"hash": "sha256=12"}},
            "archive",
            {"url": "https://host.example/d-1.0.tar.gz", "hash": "sha256=12"},
        ),
        (
            {"url": "file:///home/me/d-1.0-py3-none-any.whl", "archive_info": {"hashes": {"md5": "1", "sha256": "34"}}},
            "wheel",
            {"url": "file:d-1.0-py3-none-any.whl", "hash": "sha256=34"},
        ),
        ({"url": "file:///home/me/d", "dir_info": {}}, "directory", {"url": "file:d"}),
        (
            {"url": "ssh://git@host.example/d", "vcs_info": {}},
            "vcs",
            {"url": "ssh://host.example/d", "commit-id": ""},
        ),
        ({"url": "git@host.example:secret", "dir_info": {}}, "directory", {"url": "?"}),
    ],
)
def test_direct_urls_are_kept_without_secrets_and_places(
    env: Venv, origin: dict[str, Any], source: str, direct: dict[str, str]
) -> None:
    info = env.install("d", {"d.py": b"1"})
    (info / "direct_url.json").write_text(json.dumps(origin))
    entry = package(env.probe(), "d")
    assert (entry["source"], entry["direct-url"]) == (source, direct)
    assert entry["record-sha256"] is not None
