"""Download files of a hub into the folder of blobs: in parallel, resumable, and compared with their digests.

Runs on: LOGIN NODE.

    FOLDER/sha256/HEX, FOLDER/git-sha1/HEX          a complete file, mode 0444, named by its digest
    FOLDER/parts/models--ORG--NAME/HEX.part         a partial file; the next call continues it

The caller holds the lease of the repository, so only one process writes to a part. When a partial file is complete, its
bytes are read, and its digest is compared. Then it is moved to the folder of the complete files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.errors import DataUnavailable
from hpcenv.hub.repository_files import HubFile
from hpcenv.progress import Event, OnEvent, ignore
from hpcenv.project.hub_reference import HubReference

if TYPE_CHECKING:
    from hpcenv.hub.client import HubClient

_CHUNK = 4 << 20
_WORKERS = 8
_EVENT_SECONDS = 0.2


def blob_path(place: Path, digest: str) -> Path:
    """Return the path of a complete file, which may not exist yet."""
    algorithm, _, name = digest.partition(":")
    return place / algorithm / name


def read_digest(path: Path, file: HubFile, *, on_event: OnEvent = ignore) -> str:
    """Return the digest of a file, in the form in which the hub lists it.

    Args:
        path: path of the file.
        file: the expected path, size and digest.
        on_event: function that is called with each progress event.

    Raises:
        OSError: the file cannot be read.
    """
    algorithm = file.digest.partition(":")[0]
    # git's digest of a file also covers its kind and size (git-hash-object(1)). This digest is used as a name, not as a
    # signature.
    in_git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    digest = hashlib.sha256() if algorithm == "sha256" else in_git
    done = 0
    with open(path, "rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            on_event(Event(phase="verify", what=file.path, done=done, total=file.size, unit="bytes"))
    return f"{algorithm}:{digest.hexdigest()}"


def download_all(
    files: Sequence[HubFile], client: HubClient, wanted: HubReference, place: Path, parts: Path, *, on_event: OnEvent
) -> None:
    """Download files, and move each complete file to the folder of blobs.

    Args:
        files: the files, each content once.
        client: client of the hub.
        wanted: the repository and the commit.
        place: folder of the blobs; its folders exist.
        parts: folder of the partial downloads; no other process writes to it.
        on_event: function that is called with each progress event of all files together.

    Raises:
        DataUnavailable: the hub refuses a file, cannot be reached, or sends a file that does not have the listed
            digest.
        OSError: a folder cannot be written to.
    """
    need = sum(file.size for file in files)
    there = sum(path.stat().st_size for path in parts.glob("*.part"))
    client.begin_files(need)
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="hub") as pool:
        # Begin with large files, because they take longest.
        ordered = sorted(files, key=lambda one: -one.size)
        left = {pool.submit(_download, file, client, wanted, place, parts) for file in ordered}
        try:
            while left:
                finished, left = wait(left, timeout=_EVENT_SECONDS, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                done = min(there + client.received, need) if left else need
                on_event(Event(phase="fetch", what=str(wanted), done=done, total=need, unit="bytes"))
        except BaseException:
            client.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _download(file: HubFile, client: HubClient, wanted: HubReference, place: Path, parts: Path) -> None:
    """Download one file; try a second time if its bytes are wrong, because the partial file may have been damaged."""
    blob, received = blob_path(place, file.digest), ""
    part = parts / f"{blob.name}.part"
    if part.exists() and (part.stat().st_size > file.size or not os.access(part, os.W_OK)):
        part.unlink()  # damaged, or it belongs to a different member of a shared store
    for _ in range(2):
        path = client.download(wanted, file, part)
        received = read_digest(path, file)
        if received == file.digest:
            path.chmod(0o444)
            os.replace(path, blob)
            return
        path.unlink()
    raise DataUnavailable(
        f"the file {file.path} arrived twice with wrong bytes",
        why=f"expected {file.digest}\nreceived {received}",
        hint="a proxy or mirror may change it; do not use this repository from there",
    )
