"""pip's configuration and session.

Runs on: LOGIN NODE, in the process beside pip: standard library and pip only.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

CONNECT_SECONDS = 5.0


class PipSession:
    """pip's configuration and session. Every use of a private name of pip is in this class.

    Attributes:
        deadline: the end of the time for all requests, in seconds of `time.monotonic()`.
        indexes: URLs of the indexes, the default one first.
        find_links: folders and pages of `find-links`.
    """

    def __init__(self, deadline: float) -> None:
        commands = importlib.import_module("pip._internal.commands")
        command = commands.create_command("install")
        options, _ = command.parse_args([])
        self.deadline = deadline
        self.indexes: list[str] = [] if options.no_index else [options.index_url, *options.extra_index_urls]
        self.find_links: list[str] = list(options.find_links)
        options.no_input = False  # with True, pip does not ask the keyring for a password
        options.retries = min(options.retries, 1)
        if options.cache_dir:
            options.cache_dir = os.path.abspath(os.path.expanduser(options.cache_dir))
        self.session = command._build_session(options)  # noqa: SLF001
        seconds = max(deadline - time.monotonic(), 1.0)
        self.session.timeout = (min(CONNECT_SECONDS, options.timeout), min(options.timeout, seconds))
        auth = self.session.auth
        if hasattr(auth, "_prompt_for_password"):
            auth._prompt_for_password = lambda _: (None, None, False)  # noqa: SLF001
        else:
            auth.prompting = False

    def get(self, url: str, headers: Mapping[str, str], *, stream: bool = False) -> Any:
        """Return the answer with any HTTP status.

        Raises:
            Unreachable: no answer.
        """
        if time.monotonic() > self.deadline:
            raise Unreachable("index not reachable: the time limit is reached")
        try:
            return self.session.get(url, headers=dict(headers), stream=stream)
        except Exception as error:
            raise Unreachable(f"index not reachable ({type(error).__name__})") from error


class Unreachable(Exception):
    """An index or server did not answer. The text is for the user and names no host."""


def limited(chunks: Iterable[bytes], limit: int, deadline: float) -> Iterator[bytes]:
    """Yield the chunks of an answer, up to `limit` bytes.

    Raises:
        Unreachable: the answer is longer, the connection broke, or the time limit is reached.
    """
    total = 0
    try:
        for chunk in chunks:
            total += len(chunk)
            if total > limit or time.monotonic() > deadline:
                raise Unreachable("index not reachable: an answer was too long")
            yield chunk
    except (Unreachable, GeneratorExit):
        raise
    except Exception as error:
        raise Unreachable(f"index not reachable ({type(error).__name__})") from error


def raw_chunks(answer: Any) -> Iterable[bytes]:
    """Return the bytes as they are on the server. They are not decompressed."""
    return cast("Iterable[bytes]", answer.raw.stream(1 << 16, decode_content=False))


def hash_chunks(chunks: Iterable[bytes], deadline: float) -> str:
    """Return the sha256 of the chunks.

    Raises:
        Unreachable: the time limit is reached.
    """
    sha256 = hashlib.sha256()
    for chunk in chunks:
        if time.monotonic() > deadline:
            raise Unreachable("the time limit is reached")
        sha256.update(chunk)
    return sha256.hexdigest()
