"""Requests to a hub through its library: resolve a revision, list the files of a commit, download them.

Runs on: LOGIN NODE. Needs the extra `hub`, and loads its library (0.3 s), so import it only where a hub is contacted.

huggingface_hub 2.4 sends the requests, repeats them, and continues a download that was interrupted. This module adds
the hooks that check each request (hub/guard.py), and explains errors. hub/fetch.py compares the digests of the files
that arrived, because the library checks only their sizes. docs/decisions/0036 says what else was tried.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
from huggingface_hub import HfApi, close_session, constants, hf_hub_download, hf_hub_url, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils.tqdm import disable_progress_bars

from hpcenv.errors import DataUnavailable, FileUnusable
from hpcenv.hub import repository_files
from hpcenv.hub.access import HubAccess
from hpcenv.hub.guard import Guard
from hpcenv.hub.refusals import HubRefusals
from hpcenv.hub.repository_files import HubFile
from hpcenv.project.hub_reference import HubReference
from hpcenv.version import VERSION

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile, RepoFolder

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds before the second and the third attempt for a file, if the hub answers that it cannot send the file now.
_PAUSES = (0.5, 2.0)
_CANNOT_NOW = frozenset({408, 429, 500, 502, 503, 504})
# Errors that the library raises for an unexpected answer.
_UNEXPECTED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


class HubClient:
    """A connection to a hub.

    The library uses one HTTP client for the whole process. Until `close`, the library uses the HTTP client that
    HubClient makes.

    Args:
        access: hub and token.
        timeout: seconds until an answer begins, and between two parts of an answer.
    """

    def __init__(self, access: HubAccess, *, timeout: float = 30.0) -> None:
        self._access = access
        self._refusals = HubRefusals(access=access, timeout=timeout)
        self._guard = Guard(access.endpoint, timeout=timeout)
        # `False`: the library does not look for a token by itself.
        self._token = access.token or False
        self._api = HfApi(
            endpoint=access.endpoint, token=self._token, library_name="hpcenv", library_version=VERSION
        )  # fmt: skip
        # The library's warnings quote signed addresses of a storage, and its progress bars would disturb those of
        # hpcenv.
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        disable_progress_bars()
        try:
            verify = ssl.create_default_context(cafile=access.ca_file) if access.ca_file else True
        except OSError as error:
            why = f"REQUESTS_CA_BUNDLE names it: {error.strerror or error}"
            raise FileUnusable(f"cannot read the certificates `{access.ca_file}`", why=why) from error
        set_client_factory(lambda: self._make_client(verify))
        self._most = 0

    def _make_client(self, verify: ssl.SSLContext | bool) -> httpx2.Client:
        # The digest covers the stored bytes, so forbid transfer compression.
        return httpx2.Client(
            verify=verify, follow_redirects=True, max_redirects=5, headers={"Accept-Encoding": "identity"},
            event_hooks={"request": [self._guard.on_request], "response": [self._guard.on_response]},
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        close_session()

    def resolve_commit(self, wanted: HubReference) -> str:
        """Return the commit that a branch, tag or commit names now.

        Raises:
            DataUnavailable: the hub does not know the revision, refuses access, or cannot be reached.
        """
        with self._explained(wanted):
            found = self._api.repo_info(wanted.name, revision=wanted.revision, repo_type=wanted.kind)
            commit: object = found.sha
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise self._refusals.unusable(wanted, "it names no commit")
        return commit

    def list_files(self, wanted: HubReference) -> tuple[HubFile, ...]:
        """Return the files of a commit, sorted by path.

        Raises:
            DataUnavailable: see `resolve_commit`; or the hub lists a name or a size that cannot be used.
        """
        return repository_files.parse_entries(self._entries(wanted), origin=f"`{wanted}`")

    def _entries(self, wanted: HubReference) -> Iterator[RepoFile | RepoFolder]:
        with self._explained(wanted):
            yield from self._api.list_repo_tree(
                wanted.name, revision=wanted.revision, repo_type=wanted.kind, recursive=True
            )

    def begin_files(self, size: int) -> None:
        """Allow downloads of `size` bytes in total.

        A file that arrived with wrong bytes may be downloaded a second time.
        """
        self._guard.files = True
        self._most = self._guard.left = 2 * size + (1 << 20)

    @property
    def received(self) -> int:
        """How many bytes of files have arrived since `begin_files`."""
        return self._most - self._guard.left

    def stop(self) -> None:
        """End all downloads as soon as the next bytes arrive."""
        self._guard.stopped = True

    def download(self, wanted: HubReference, file: HubFile, part: Path) -> Path:
        """Download a file, or the part of it that is still missing; return the file's path. The size is not compared.

        Args:
            wanted: the repository and the commit.
            file: the path and size of the file.
            part: path of the partial file, which a download continues. Xet writes to a folder beside the partial file.

        Raises:
            DataUnavailable: the hub refuses the request or cannot be reached.
            OSError: the folder cannot be written to.
        """
        if self._access.xet:
            return self._download_by_xet(wanted, file, Path(f"{part}.xet"))
        if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise DataUnavailable(
                f"the file {file.path} of `{wanted}` is too large for a download without Xet",
                why=f"it has {file.size / 1e9:.0f} GB; the hub sends up to 50 GB without it",
                hint="export HF_HUB_DISABLE_XET=0",
            )
        url = hf_hub_url(
            wanted.name, file.path, repo_type=wanted.kind, revision=wanted.revision, endpoint=self._access.endpoint
        )
        headers = build_hf_headers(token=self._token, library_name="hpcenv", library_version=VERSION)
        for pause in (*_PAUSES, None):
            with contextlib.suppress(_CannotNow), open(part, "ab") as target:
                try:
                    with self._explained(wanted, last=pause is None):
                        http_get(url, target, resume_size=target.tell(), headers=headers, expected_size=file.size)
                except OSError as error:
                    # An error without a number means a wrong size. Ignore it, because the caller compares the digest.
                    if error.errno is not None:
                        raise
                return part
            time.sleep(pause or 0)
        raise AssertionError("the last attempt returns or raises")

    def _download_by_xet(self, wanted: HubReference, file: HubFile, folder: Path) -> Path:
        with self._explained(wanted):
            return Path(
                hf_hub_download(
                    wanted.name, file.path, repo_type=wanted.kind, revision=wanted.revision, local_dir=folder,
                    endpoint=self._access.endpoint, token=self._token,
                )
            )  # fmt: skip

    @contextlib.contextmanager
    def _explained(self, wanted: HubReference, *, last: bool = True) -> Iterator[None]:
        """Turn the errors of the library into hpcenv's errors.

        Args:
            last: whether this is the last attempt. Before the last attempt, `_CannotNow` is raised if a further attempt
                may succeed.
        """
        try:
            yield
        except HfHubHTTPError as error:
            status = error.response.status_code
            # The signed address of the storage expires; the hub then gives a new one.
            expired = bool(error.response.history) and status in (400, 401, 403)
            if not last and (status in _CANNOT_NOW or expired):
                raise _CannotNow from None
            raise self._refusals.status(error.response, wanted, error.server_message or "") from None
        except LocalEntryNotFoundError as error:
            raise self._refusals.unreachable(error) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise self._refusals.unreachable(error) from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise self._refusals.unusable(wanted, "the answer is not JSON") from None
        except _UNEXPECTED as error:
            raise self._refusals.unusable(wanted, f"{type(error).__name__}: {error}") from None


class _CannotNow(Exception):
    """A further attempt may succeed."""
