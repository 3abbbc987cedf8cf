"""Find the wheel that an installed package came from, and its sha256, with the proof.

Runs on: LOGIN NODE. The first half in hpcenv; the second half (from `serve` on) in a process of its own
beside pip: `python wheels.py`, standard library and pip only.

An installed package does not remember its wheel's sha256. Found again it is like this, and never guessed:

    direct-url      the installer wrote the hash of a file or URL install into direct_url.json (PEP 610)
    record          a wheel of an index has the RECORD digest (hpcenv-env-v1, see incontainer/probe.py) of the
                    installed package, and its list of content does not contradict its own RECORD
    embedded-lock   a lockfile in the image names exactly one wheel of this version and these tags,
    install-report  or pip's own report of the installation does; used where no index has proved it
                    or contradicted it
    index-only      the index has exactly one wheel with this version, build and tags, and says its hash, but
                    it could not be opened (no partial reads, too large, the time was over)
    none            none of these, with the reason

Which files there are is asked of pip's own session. The choice was between
  - `pip install --dry-run --report`: public, but it resolves: it names one file of its own choice (an older
    build of the same version never), fails as a whole when one package of many is unknown, needs half a second
    of CPU per run, downloads whole wheels where an index has no PEP 658 metadata, and needs
    --platform/--abi/--python-version for an environment in a container.
  - `pip config list` and own HTTP: public, but certificates, proxies, netrc, keyring, trusted hosts and the
    system's trust store would all be written a second time, a little differently.
  - pip's session without its resolver. Three names inside pip are used, the same from 22.3 to 26:
    `create_command("install").parse_args`, `_build_session`, and the fields of its options. The lists (PEP 503,
    PEP 691) are read here. So `index-url`, `extra-index-url`, `find-links`, `no-index`, `cert`, `client-cert`,
    `proxy`, `trusted-host`, netrc, keyring and every PIP_* variable mean what they mean to pip, files are found
    for any Python and platform, and all packages share one connection pool.
A pip that lacks these names gives `none` with that reason, not an error.

pip is run by hpcenv's own Python (or the one the caller names), never by the one in the image: that one may
have no pip, no network and no configuration, and is what is being examined.

The sha256 is the one that the index states, or computed where the file was read as a whole: always for local
files and for wheels up to WHOLE_BYTES (then every file in it is compared with its RECORD too). Of larger ones the
list of content is compared with RECORD by name and size, so a change that keeps a file's size in a large remote
wheel, whose index states the changed file's hash, is not seen here; `pip install` would not see it either.

No URL and no host name leaves the second half: an index is called `pypi` (the user's default index), `extra-1`,
`extra-2` (in the order of extra-index-url) or `find-links`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Our own folder: its `process.py` and others must not stand in for what pip imports.
    del sys.path[0]

import contextlib
import csv
import hashlib
import importlib
import io
import json
import os
import re
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import unescape
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

__all__ = ["Index", "InstalledDist", "KnownFile", "Proof", "WheelProof", "find_wheels", "wheel_record_digests"]

Proof = Literal["direct-url", "embedded-lock", "install-report", "record", "index-only", "none"]

CACHE_SCHEMA = 1
TAIL_BYTES = 64 << 10  # holds the list of content and the RECORD of a wheel with up to some 400 files
WHOLE_BYTES = 1 << 20  # up to here one more read gets all of it, and everything can be checked
LOCAL_WHOLE_BYTES = 64 << 20  # likewise, where reading costs no network
DOWNLOAD_BYTES = 64 << 20  # where a server allows no partial reads or states no hash
PAGE_BYTES = 64 << 20  # the largest list seen is 6 MB
RANGE_BYTES = 32 << 20  # of a partial read; the list of content of torch has 1.2 MB
RECORD_BYTES = 16 << 20
OTHERS_READ = 12  # wheels that are tried when none has the installed tags
CONNECT_SECONDS = 5.0
GRACE_SECONDS = 5.0  # for the start of Python and the last answer
HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledDist:
    """One installed package, as the probe describes it.

    Attributes:
        build: `Build:` of its WHEEL file, "" for none.
        tags: `Tag:` lines of its WHEEL file; empty when they are not known.
        record_sha256: its RECORD digest (hpcenv-env-v1).
        direct_url: its direct_url.json.
    """

    name: str
    version: str
    build: str = ""
    tags: tuple[str, ...] = ()
    record_sha256: str | None = None
    direct_url: Mapping[str, Any] | None = None

    @classmethod
    def from_probe(cls, entry: Mapping[str, Any]) -> InstalledDist:
        """Take what is needed from one entry of the probe's `packages`."""
        return cls(
            name=entry["name"],
            version=entry["version"],
            build=entry.get("build") or "",
            tags=tuple(sorted(entry.get("tags") or ())),
            record_sha256=entry.get("record-sha256"),
            direct_url=entry.get("direct-url"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFile:
    """A wheel that a lockfile in the image, or a report of the installation, names."""

    name: str
    version: str
    filename: str
    sha256: str
    proof: Literal["embedded-lock", "install-report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Who asks, and with which configuration.

    Attributes:
        env: the user's whole environment; pip finds its configuration through it.
        python: the Python whose pip asks; hpcenv's own unless the user chose another (3.10 or newer).
    """

    env: Mapping[str, str]
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelProof:
    """A package's wheel, or why it is not known.

    Attributes:
        index: `pypi`, `extra-N` or `find-links`; None where no index was needed.
        reason: why the proof is not stronger; empty for `record` and `direct-url`.
    """

    name: str
    filename: str | None = None
    sha256: str | None = None
    index: str | None = None
    proof: Proof
    reason: str = ""


def find_wheels(
    dists: Sequence[InstalledDist],
    *,
    sources: Sequence[KnownFile] = (),
    index: Index | None,
    cache: Path,
    timeout: float = 60.0,
    workers: int = 8,
) -> tuple[WheelProof, ...]:
    """Return one proof per package, in the same order. Never raises for what an index does or does not do.

    Args:
        sources: what lockfiles and reports inside the image say.
        index: how to ask; None asks nobody (offline).
        cache: a folder for what was learned; made when it is missing, any entry may be deleted.
        timeout: seconds for all packages together.
        workers: connections at a time.
    """
    known = _by_package(sources)
    setting = _setting(index)
    found: list[WheelProof | None] = []
    for dist in dists:
        key = _proof_key(dist, known.get(_package(dist), ()), setting)
        found.append(_from_direct_url(dist) or (_cached_proof(dist, cache, key) if setting else None))
    open_ = [number for number, proof in enumerate(found) if proof is None]
    asked = [dists[number] for number in open_ if dists[number].record_sha256 is not None]
    reply = _ask(asked, index=index, cache=cache, timeout=timeout, workers=workers) if asked else {}
    answers = iter(reply.get("dists", ()))
    for number in open_:
        dist = dists[number]
        answer: Mapping[str, Any] = next(answers, {}) if dist.record_sha256 is not None else {}
        claims = known.get(_package(dist), ())
        proof = _decide(dist, answer, claims, problem=reply.get("error", ""))
        found[number] = proof
        if proof.proof == "record":
            _store(cache, "proof", _proof_key(dist, claims, setting), {"proof": asdict(proof)})
    return tuple(proof for proof in found if proof is not None)


def _package(dist: InstalledDist | KnownFile) -> tuple[str, str]:
    return _normal(dist.name), _version(dist.version)


def _by_package(sources: Sequence[KnownFile]) -> dict[tuple[str, str], tuple[KnownFile, ...]]:
    found: dict[tuple[str, str], tuple[KnownFile, ...]] = {}
    for source in sources:
        found[_package(source)] = (*found.get(_package(source), ()), source)
    return found


# ---- what needs no index ------------------------------------------------------------------------------------


def _from_direct_url(dist: InstalledDist) -> WheelProof | None:
    """PEP 610: what the installer itself wrote; None when an index may still tell."""
    origin = dist.direct_url
    if not isinstance(origin, Mapping):
        return None
    archive = origin.get("archive_info")
    if not isinstance(archive, Mapping):
        kind = "a version control system" if "vcs_info" in origin else "a directory"
        return _none(dist, f"installed from {kind}, not from a wheel")
    filename = unquote(urlsplit(str(origin.get("url", ""))).path.rsplit("/", 1)[-1])
    wheel = _wheel_name(filename)
    if wheel is None or (wheel.name, wheel.version) != _package(dist):
        return _none(dist, "installed from an archive that is not a wheel of this name and version")
    hashes = archive.get("hashes")
    sha256 = hashes.get("sha256") if isinstance(hashes, Mapping) else None
    sha256 = sha256 or str(archive.get("hash", "")).removeprefix("sha256=")
    if not HEX_SHA256.fullmatch(str(sha256)):
        return None
    return WheelProof(name=dist.name, filename=filename, sha256=str(sha256), proof="direct-url")


def _none(dist: InstalledDist, reason: str, filename: str | None = None) -> WheelProof:
    return WheelProof(name=dist.name, filename=filename, proof="none", reason=reason)


def _claimed(dist: InstalledDist, claims: Sequence[KnownFile]) -> KnownFile | None:
    """The one file that a lock or report in the image can mean; None when it could be several."""
    fitting = [claim for claim in claims if _fits(dist, claim.filename) and HEX_SHA256.fullmatch(claim.sha256)]
    if len({(claim.filename, claim.sha256) for claim in fitting}) != 1:
        return None
    return min(fitting, key=lambda claim: claim.proof)


def _fits(dist: InstalledDist, filename: str) -> bool:
    wheel = _wheel_name(filename)
    if wheel is None or (wheel.name, wheel.version) != _package(dist):
        return False
    return not dist.tags or (wheel.build == dist.build and wheel.tags == frozenset(dist.tags))


# ---- what the index said ------------------------------------------------------------------------------------


def _decide(dist: InstalledDist, answer: Mapping[str, Any], claims: Sequence[KnownFile], *, problem: str) -> WheelProof:
    """Weigh what the lists and wheels say against what is installed."""
    files = [_Seen(**seen) for seen in answer.get("files", ())]
    same = [seen for seen in files if dist.record_sha256 in seen.records and not seen.problem]
    hashes = {seen.sha256 for seen in same if seen.sha256 is not None}
    if len(hashes) > 1:
        # Zipped twice, the same content: only a lock or a report can tell which one it was.
        hashes = (hashes & {claim.sha256 for claim in claims if _fits(dist, claim.filename)}) or hashes
    if len(hashes) == 1:
        seen = min((s for s in same if s.sha256 in hashes), key=_preference)
        return WheelProof(name=dist.name, filename=seen.filename, sha256=seen.sha256, index=seen.label, proof="record")
    if hashes:
        return _none(dist, f"{len(hashes)} wheels with different sha256 have this RECORD", same[0].filename)
    if same:
        reason = f"the wheel has this RECORD, but the index states no sha256 and {same[0].unread or 'it was not read'}"
        return _none(dist, reason, same[0].filename)
    claim = _claimed(dist, claims)
    contradicted = [seen for seen in files if seen.records or seen.problem]
    if claim is not None and claim.sha256 not in {seen.sha256 for seen in contradicted}:
        return WheelProof(
            name=dist.name,
            filename=claim.filename,
            sha256=claim.sha256,
            proof=claim.proof,
            reason=_why_not(dist, answer, files, problem),
        )
    exact = [seen for seen in files if seen.exact]
    stated = {seen.sha256 for seen in exact}
    if exact and not any(s.records or s.problem for s in exact) and len(stated) == 1 and None not in stated:
        seen = min(exact, key=_preference)
        return WheelProof(
            name=dist.name,
            filename=seen.filename,
            sha256=seen.sha256,
            index=seen.label,
            proof="index-only",
            reason=seen.unread,
        )
    return _none(dist, _why_not(dist, answer, files, problem), files[0].filename if len(files) == 1 else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """One wheel of the installed name and version, as the second half reports it.

    Attributes:
        exact: its name has the installed build and tags.
        records: the digests that an installation of it has; empty when it was not read.
        problem: it contradicts itself or its index.
        unread: why it was not read, or not read as a whole.
    """

    label: str
    filename: str
    sha256: str | None
    exact: bool
    records: Sequence[str] = ()
    problem: str = ""
    unread: str = ""


def _preference(seen: _Seen) -> tuple[int, int, str]:
    """The default index first, then the extra ones in their order, then find-links."""
    kinds = ("pypi", "extra", "find-links")
    kind, _, number = (seen.label, "", "") if seen.label == "find-links" else seen.label.partition("-")
    return kinds.index(kind), int(number or 0), seen.filename


def _why_not(dist: InstalledDist, answer: Mapping[str, Any], files: Sequence[_Seen], problem: str) -> str:
    if dist.record_sha256 is None:
        return "it has no RECORD digest that a wheel could be compared with"
    if problem:
        return problem
    if not answer:
        return "index not asked"
    for seen in files:
        if seen.problem:
            return f"`{seen.filename}`: {seen.problem}"
    trouble = "; ".join(answer.get("trouble", ()))
    read = [seen for seen in files if seen.records]
    if read and (read[0].exact or not dist.tags):
        said = f"the RECORD of `{read[0].filename}` in the index is not the installed one"
        more = f" (and of {len(read) - 1} more wheels)" if len(read) > 1 else ""
        return said + more + (f"; {trouble}" if trouble else "")
    unread = [seen for seen in files if seen.unread]
    if unread:
        return f"`{unread[0].filename}` was not read: {unread[0].unread}" + (f"; {trouble}" if trouble else "")
    if trouble:
        return trouble
    tags = " with its build and tags" if files else ""
    return f"no index lists a wheel of {dist.name} {dist.version}{tags}"


def _ask(
    dists: Sequence[InstalledDist], *, index: Index | None, cache: Path, timeout: float, workers: int
) -> dict[str, Any]:
    """Start the second half and return its answer; what goes wrong is one sentence under `error`."""
    if index is None:
        return {}
    from hpcenv.adapters import process
    from hpcenv.errors import HpcenvError

    request = {
        "dists": [asdict(dist) | {"direct_url": None} for dist in dists],
        "cache": os.path.abspath(cache),
        "seconds": timeout,
        "workers": workers,
    }
    argv = [index.python, "-B", os.path.abspath(__file__)]
    try:
        done = process.run(argv, timeout=timeout + GRACE_SECONDS, env=index.env, stdin=json.dumps(request))
        reply = json.loads(done.stdout.splitlines()[-1])
        return reply if isinstance(reply, dict) else {"error": "pip's process gave no answer"}
    except HpcenvError as error:
        # Not its text: pip's messages hold URLs.
        status = getattr(error, "status", None)
        if status is None:
            return {"error": f"index not reachable: no answer within {timeout:g} s, or pip could not be started"}
        return {"error": f"pip's process ended with status {status}"}
    except (ValueError, IndexError):
        return {"error": "pip's process gave no answer"}


# ---- names of wheels (both halves) --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _WheelName:
    name: str
    version: str
    build: str
    tags: frozenset[str]


def _wheel_name(filename: str) -> _WheelName | None:
    """The parts of a wheel's file name (PEP 427), None when it is none."""
    parts = filename.removesuffix(".whl").split("-")
    if not filename.endswith(".whl") or len(parts) not in (5, 6) or "/" in filename:
        return None
    pythons, abis, platforms = (part.lower().split(".") for part in parts[-3:])
    if len(pythons) * len(abis) * len(platforms) > 1000:
        return None
    tags = frozenset(f"{p}-{a}-{s}" for p in pythons for a in abis for s in platforms)
    return _WheelName(_normal(parts[0]), _version(parts[1]), parts[2] if len(parts) == 6 else "", tags)


def _is_of(filename: str, package: tuple[str, str]) -> bool:
    """Whether a file name starts with this name and version; quicker than to take all of it apart."""
    parts = filename.split("-", 2)
    return len(parts) == 3 and (_normal(parts[0]), _version(parts[1])) == package


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(text: str) -> str:
    """A form in which equal versions (PEP 440) are equal: `1.0` and `1.0.0`, `2.0-rc1` and `2.0rc1`."""
    known = _VERSIONS.get(text)
    if known is None:
        module = _packaging("version")
        try:
            key = module.Version(text)
        except ValueError:
            return text
        public = str(key).partition("+")
        head = re.match(r"((?:\d+!)?\d+(?:\.\d+)*)(.*)", public[0])
        assert head is not None
        known = re.sub(r"(\.0)+$", "", head[1]) + head[2] + public[1] + public[2]
        _VERSIONS[text] = known
    return known


_VERSIONS: dict[str, str] = {}


def _packaging(name: str) -> Any:
    """`packaging`, or in a Python that has only pip the copy that pip carries."""
    try:
        return importlib.import_module(f"packaging.{name}")
    except ImportError:
        return importlib.import_module(f"pip._vendor.packaging.{name}")


# ---- the cache (both halves) --------------------------------------------------------------------------------


def _setting(index: Index | None) -> str:
    """A digest over what configures pip: a proof names an index, so it holds for this configuration only."""
    if index is None:
        return ""
    env = index.env
    home = env.get("HOME", "")
    places = [env.get("PIP_CONFIG_FILE", ""), "/etc/pip.conf", f"{home}/.pip/pip.conf"]
    places += [f"{base}/pip/pip.conf" for base in env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    places.append((env.get("XDG_CONFIG_HOME") or f"{home}/.config") + "/pip/pip.conf")
    places.append(os.path.join(os.path.dirname(os.path.dirname(index.python)), "pip.conf"))
    parts = [f"{name}={value}" for name, value in sorted(env.items()) if name.startswith("PIP_")]
    for place in places:
        with contextlib.suppress(OSError):
            parts.append(place + "=" + hashlib.sha256(Path(place).read_bytes()).hexdigest())
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _proof_key(dist: InstalledDist, claims: Sequence[KnownFile], setting: str) -> list[Any]:
    said = sorted([claim.filename, claim.sha256] for claim in claims)
    return [*_package(dist), dist.build, sorted(dist.tags), dist.record_sha256, said, setting]


def _cached_proof(dist: InstalledDist, cache: Path, key: list[Any]) -> WheelProof | None:
    """Only proofs by RECORD are kept: they stay true whatever an index does later."""
    entry = _cached(cache, "proof", key)
    try:
        proof = WheelProof(**entry["proof"]) if entry else None
    except (TypeError, KeyError):
        return None
    if proof is None or proof.proof != "record" or proof.name != dist.name:
        return None
    sound = HEX_SHA256.fullmatch(str(proof.sha256)) and re.fullmatch(r"pypi|extra-\d+|find-links", str(proof.index))
    return proof if sound and _is_of(str(proof.filename), _package(dist)) else None


def _cached(cache: Path, kind: str, key: list[Any]) -> dict[str, Any] | None:
    """An entry, when it is ours, whole, and about this key; any other is as good as none."""
    try:
        with _entry(cache, kind, key).open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None  # somebody else's word
            entry = json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("key") != key or entry.pop("check", "") != _checksum(entry):
        return None
    return entry


def _store(cache: Path, kind: str, key: list[Any], values: Mapping[str, Any]) -> None:
    """Write aside, then rename; a cache that cannot be written is no cache, not an error."""
    entry = {"key": key, **values}
    place = _entry(cache, kind, key)
    text = json.dumps(entry | {"check": _checksum(entry)})
    temporary = f"{place}.{os.getpid()}.{threading.get_ident()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        Path(temporary).write_text(text, encoding="utf-8")
        os.replace(temporary, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _entry(cache: Path, kind: str, key: list[Any]) -> Path:
    name = hashlib.sha256(json.dumps([CACHE_SCHEMA, kind, key]).encode()).hexdigest()
    return cache / f"{kind}-{name}.json"


def _checksum(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([CACHE_SCHEMA, entry], sort_keys=True).encode()).hexdigest()


# ==== the second half: in a process of its own, beside pip =====================================================


def serve() -> None:
    """Read the request from stdin, write one line of JSON to stdout, and end at the time limit whatever hangs."""
    request = json.load(sys.stdin)
    deadline = time.monotonic() + request["seconds"]
    answers: list[dict[str, Any]] = [{"files": [], "trouble": []} for _ in request["dists"]]
    reply: dict[str, Any] = {"dists": answers}
    # pip may print (a keyring, a warning): stdout is for the answer only.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    work = threading.Thread(target=_serve_all, args=(request, reply, deadline), daemon=True)
    work.start()
    work.join(max(deadline - time.monotonic(), 0))
    for answer in answers:
        if not answer.get("done") and "error" not in reply:
            answer["trouble"] = [*answer["trouble"], f"index not reachable within {request['seconds']:g} s"]
    # A copy: threads that hang in a read may still write into the lists.
    out.write(json.dumps({**reply, "dists": [{k: list(a[k]) for k in ("files", "trouble")} for a in answers]}) + "\n")
    out.flush()
    os._exit(0)


def _serve_all(request: Mapping[str, Any], reply: dict[str, Any], deadline: float) -> None:
    from concurrent.futures import ThreadPoolExecutor

    try:
        pip = _Pip(deadline)
    except ImportError:
        reply["error"] = "the Python that runs hpcenv has no pip to ask an index with"
        return
    except BaseException as error:  # noqa: BLE001 - SystemExit for a broken pip.conf, AttributeError for a new pip
        reply["error"] = f"pip could not be set up ({type(error).__name__}): its configuration or version"
        return
    cache = Path(request["cache"])
    links = _Lists(pip)

    def look(number: int) -> None:
        dist = InstalledDist(**request["dists"][number])
        answer = reply["dists"][number]
        try:
            _look_up(dist, answer, lists=links, pip=pip, cache=cache)
        except Exception as error:  # noqa: BLE001 - one odd page or wheel must not hide the others
            answer["trouble"].append(f"its wheel could not be looked up ({type(error).__name__})")
        answer["done"] = True

    with ThreadPoolExecutor(max(1, request["workers"])) as pool:
        list(pool.map(look, range(len(request["dists"]))))


class _Pip:
    """pip's configuration and session: everything that is private to pip is in here."""

    def __init__(self, deadline: float) -> None:
        commands = importlib.import_module("pip._internal.commands")
        command = commands.create_command("install")
        options, _ = command.parse_args([])
        self.deadline = deadline
        self.indexes: list[str] = [] if options.no_index else [options.index_url, *options.extra_index_urls]
        self.find_links: list[str] = list(options.find_links)
        options.no_input = False  # else pip asks no keyring
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
        """Like `requests.get`.

        Raises:
            _Unreachable: no answer; an answer with any status is returned.
        """
        if time.monotonic() > self.deadline:
            raise _Unreachable("index not reachable: the time is over")
        try:
            return self.session.get(url, headers=dict(headers), stream=stream)
        except Exception as error:
            raise _Unreachable(f"index not reachable ({type(error).__name__})") from error


class _Unreachable(Exception):
    """No answer; the text is for the user and names no host."""


@dataclass(kw_only=True)
class _Link:
    """One wheel in a list: a URL, or a path on this machine."""

    label: str
    filename: str
    place: str
    local: bool
    sha256: str | None = None
    others: list[_Link] = field(default_factory=list)


class _Lists:
    """The lists of files: per package and index, and of find-links once."""

    def __init__(self, pip: _Pip) -> None:
        self.pip = pip
        self._lock = threading.Lock()
        self._found: list[_Link] | None = None
        self._found_trouble: list[str] = []
        self._failures: dict[str, int] = {}

    def of(self, package: tuple[str, str]) -> tuple[list[_Link], list[str]]:
        """Return the links for a name and version in order of preference, and what stood in the way."""
        links: list[_Link] = []
        trouble: list[str] = []
        for number, index in enumerate(self.pip.indexes):
            label = f"extra-{number}" if number else "pypi"
            try:
                links += self._page(label, index.rstrip("/") + "/" + package[0] + "/", package)
            except _Unreachable as error:
                trouble.append(f"{error}: {label}")
        found, more = self._find_links()
        return links + found, trouble + more

    def _page(self, label: str, url: str, package: tuple[str, str]) -> list[_Link]:
        failures = self._failures.get(label, 0)
        if failures >= 3:  # three packages in a row, and never an answer
            raise _Unreachable("index not reachable")
        try:
            links = _links(self.pip, label, url, package)
        except _Unreachable:
            if failures >= 0:
                self._failures[label] = failures + 1
            raise
        self._failures[label] = -1
        return links

    def _find_links(self) -> tuple[list[_Link], list[str]]:
        with self._lock:
            if self._found is None:
                self._found = []
                for place in self.pip.find_links:
                    try:
                        self._found += _find_links(self.pip, place)
                    except _Unreachable as error:
                        self._found_trouble.append(f"{error}: find-links")
            return self._found, self._found_trouble


def _find_links(pip: _Pip, place: str) -> list[_Link]:
    """A folder of wheels, a page on this machine, or a page on a server."""
    path = _local_path(place) or (os.path.expanduser(place) if "://" not in place else None)
    if path is None:
        return _links(pip, "find-links", place, None)
    if not os.path.isdir(path):
        return _links(pip, "find-links", Path(os.path.abspath(path)).as_uri(), None)
    names = sorted(os.listdir(path))
    return [
        _Link(label="find-links", filename=name, place=os.path.join(path, name), local=True)
        for name in names
        if name.endswith(".whl")
    ]


def _links(pip: _Pip, label: str, url: str, package: tuple[str, str] | None) -> list[_Link]:
    """The wheels that a list names: PEP 691 JSON or PEP 503 HTML, from a server or from this machine.

    Args:
        package: the name and version that are wanted; None for all (numpy's list has 4,000).
    """
    path = _local_path(url)
    if path is not None:
        page = os.path.join(path, "index.html") if os.path.isdir(path) else path
        try:
            text = Path(page).read_text("utf-8", "replace")
        except OSError:
            return []
        return [link for one in _html_files(text) for link in _link(label, Path(page).as_uri(), one, package)]
    accept = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html; q=0.1, text/html; q=0.01"
    answer = pip.get(url, {"Accept": accept, "Cache-Control": "max-age=0"}, stream=True)
    with contextlib.closing(answer):
        if answer.status_code in (404, 410):
            return []
        if answer.status_code != 200:
            raise _Unreachable(f"index not reachable (HTTP {answer.status_code})")
        content = b"".join(_limited(answer.iter_content(1 << 16), PAGE_BYTES, pip.deadline))
    if "json" in answer.headers.get("Content-Type", ""):
        listed = _json_files(content)
    else:
        listed = _html_files(content.decode(answer.encoding or "utf-8", "replace"))
    return [link for one in listed for link in _link(label, answer.url, one, package)]


def _limited(chunks: Iterable[bytes], limit: int, deadline: float) -> Iterator[bytes]:
    total = 0
    try:
        for chunk in chunks:
            total += len(chunk)
            if total > limit or time.monotonic() > deadline:
                raise _Unreachable("index not reachable: an answer was too long")
            yield chunk
    except (_Unreachable, GeneratorExit):
        raise
    except Exception as error:
        raise _Unreachable(f"index not reachable ({type(error).__name__})") from error


def _raw(answer: Any) -> Iterable[bytes]:
    """The bytes as they are on the server, not unpacked on the way."""
    return cast("Iterable[bytes]", answer.raw.stream(1 << 16, decode_content=False))


@dataclass(frozen=True, slots=True)
class _Listed:
    """A line of a list as it stands there; `base` is what its reference is relative to, when the page says so."""

    href: str
    filename: str
    sha256: object
    base: str = ""


def _json_files(content: bytes) -> Iterator[_Listed]:
    try:
        for file in json.loads(content)["files"]:
            yield _Listed(str(file["url"]), str(file["filename"]), (file.get("hashes") or {}).get("sha256"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Unreachable("index not reachable: its list is not PEP 691 JSON") from error


# Attributes may hold `>` (data-requires-python); the html.parser module needs a second for numpy's list.
_ANCHOR = re.compile(r"""<a\s([^>"']*(?:(?:"[^"]*"|'[^']*')[^>"']*)*)>""", re.IGNORECASE)
_HREF = re.compile(r"""(?:^|\s)href\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)
_BASE = re.compile(r"""<base\s+href\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)


def _html_files(text: str) -> Iterator[_Listed]:
    own_base = _BASE.search(text)
    base = unescape(own_base[1] or own_base[2] or "") if own_base else ""
    for anchor in _ANCHOR.finditer(text):
        href = _HREF.search(anchor[1])
        if href is None or ".whl" not in href[0]:
            continue
        place, _, fragment = unescape(href[1] or href[2] or "").partition("#")
        hashed = re.search(r"(?:^|&)sha256=([0-9a-fA-F]{64})", fragment)
        filename = unquote(place.partition("?")[0].rsplit("/", 1)[-1])
        yield _Listed(place, filename, hashed[1].lower() if hashed else None, base)


def _link(label: str, page: str, listed: _Listed, package: tuple[str, str] | None) -> Iterator[_Link]:
    filename = listed.filename
    if not filename.endswith(".whl") or (package is not None and not _is_of(filename, package)):
        return
    url = urljoin(urljoin(page, listed.base), listed.href)
    path = _local_path(url)
    if path is not None and not page.startswith("file:"):
        return  # a server must not point at our own files
    if path is None and not url.startswith(("http://", "https://")):
        return
    stated = listed.sha256 if isinstance(listed.sha256, str) and HEX_SHA256.fullmatch(listed.sha256) else None
    yield _Link(label=label, filename=filename, place=path or url, local=path is not None, sha256=stated)


def _local_path(url: str) -> str | None:
    parts = urlsplit(url)
    return url2pathname(parts.path) if parts.scheme == "file" else None


# ---- one package ----------------------------------------------------------------------------------------------


def _look_up(dist: InstalledDist, answer: dict[str, Any], *, lists: _Lists, pip: _Pip, cache: Path) -> None:
    """Read wheels until one has the installed RECORD; put everything seen into `answer`."""
    links, trouble = lists.of(_package(dist))
    answer["trouble"] = trouble
    exact, others = _candidates(dist, links)
    # Other tags than WHEEL says happen (a file that was renamed); the tags are in its RECORD, so where the
    # right name is listed no other name can match.
    chosen = exact or others[:OTHERS_READ]
    proved = False
    for link in chosen:
        if proved and link not in exact:
            break
        seen = _see(dist, link, pip=pip, cache=cache)
        answer["files"].append(asdict(seen) | {"exact": link in exact})
        proved = proved or dist.record_sha256 in seen.records


def _candidates(dist: InstalledDist, links: Iterable[_Link]) -> tuple[list[_Link], list[_Link]]:
    """Wheels of this name and version: those with its build and tags, and the others, likeliest first."""
    package = _package(dist)
    merged: dict[tuple[str, str], _Link] = {}
    exact: list[_Link] = []
    others: list[tuple[tuple[int, bool, str], _Link]] = []
    for link in links:
        wheel = _wheel_name(link.filename) if _is_of(link.filename, package) else None
        if wheel is None:
            continue
        first = merged.setdefault((link.filename, link.sha256 or link.place), link)
        if first is not link:
            first.others.append(link)
        elif _fits(dist, link.filename) and dist.tags:
            exact.append(link)
        else:
            likeness = len(wheel.tags & frozenset(dist.tags)) + any(tag.endswith("-any") for tag in wheel.tags)
            others.append(((-likeness, os.uname().machine not in link.filename, link.filename), link))
    return exact, [link for _, link in sorted(others, key=lambda pair: pair[0])]


def _see(dist: InstalledDist, link: _Link, *, pip: _Pip, cache: Path) -> _Seen:
    """Read one wheel, at the first place that has it."""
    reasons = []
    for place in (link, *link.others):
        try:
            read = _read_local(place, pip) if place.local else _read_remote(place, dist, pip=pip, cache=cache)
        except _Unreachable as error:
            reasons.append(str(error))
            continue
        except OSError as error:
            reasons.append(error.strerror or type(error).__name__)
            continue
        except _NotAWheel as error:
            read = _Read(problem=str(error))
        sha256 = read.sha256 or link.sha256
        problem = read.problem
        if read.sha256 and link.sha256 and read.sha256 != link.sha256:
            problem, sha256 = "its sha256 is not the one that the index states", link.sha256
        return _Seen(
            label=link.label,
            filename=link.filename,
            sha256=sha256,
            exact=False,
            records=read.records,
            problem=problem,
            unread=read.unread,
        )
    return _Seen(label=link.label, filename=link.filename, sha256=link.sha256, exact=False, unread="; ".join(reasons))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """What one wheel file said; `sha256` only where all of it was read."""

    records: tuple[str, ...] = ()
    sha256: str | None = None
    problem: str = ""
    unread: str = ""


class _NotAWheel(Exception):
    """The file contradicts itself; the text says how."""


def _read_local(link: _Link, pip: _Pip) -> _Read:
    with open(link.place, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        sha256 = _hash(iter(lambda: file.read(1 << 20), b""), pip.deadline)
        return _examine(file, link.filename, sha256=sha256, whole=size <= LOCAL_WHOLE_BYTES)


def _hash(chunks: Iterable[bytes], deadline: float) -> str:
    found = hashlib.sha256()
    for chunk in chunks:
        if time.monotonic() > deadline:
            raise _Unreachable("the time is over")
        found.update(chunk)
    return found.hexdigest()


def _examine(file: BinaryIO, filename: str, *, sha256: str | None, whole: bool) -> _Read:
    try:
        with zipfile.ZipFile(file) as wheel:
            records = wheel_record_digests(wheel, filename, whole=whole)
    except _Contradiction as error:
        return _Read(records=error.records, sha256=sha256, problem=str(error))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, IndexError) as error:
        raise _NotAWheel(f"it is no sound wheel ({type(error).__name__})") from error
    return _Read(records=records, sha256=sha256)


# ---- one wheel on a server --------------------------------------------------------------------------------------


def _read_remote(link: _Link, dist: InstalledDist, *, pip: _Pip, cache: Path) -> _Read:
    """The cache's word for a file with this hash, or the wheel itself."""
    key: list[Any] = [link.filename, link.sha256]
    read = _cached_read(cache, key) if link.sha256 else None
    if read is not None:
        return read
    with contextlib.closing(_RangeFile(pip, link.place)) as file:
        if link.sha256 is None and file.tag:
            key = [link.filename, file.size, file.tag]
            read = _cached_read(cache, key)
        if read is None:
            read = _read_ranges(file, link, dist)
            if (link.sha256 or file.tag) and read.records and not read.unread:
                _store(cache, "wheel", key, {"read": asdict(read)})
    return read


def _cached_read(cache: Path, key: list[Any]) -> _Read | None:
    entry = _cached(cache, "wheel", key)
    try:
        return _Read(**{**entry["read"], "records": tuple(entry["read"]["records"])}) if entry else None
    except (TypeError, KeyError):
        return None


def _read_ranges(file: _RangeFile, link: _Link, dist: InstalledDist) -> _Read:
    if file.complete is not None or file.size <= WHOLE_BYTES:
        file.fetch(0, file.size)
        sha256 = _hash(iter(lambda: file.read(1 << 20), b""), file.pip.deadline)
        return _examine(cast("BinaryIO", file), link.filename, sha256=sha256, whole=True)
    read = _examine(cast("BinaryIO", file), link.filename, sha256=None, whole=False)
    if link.sha256 is None and dist.record_sha256 in read.records:
        # Only now is it worth reading: the index does not say its hash.
        if file.size > DOWNLOAD_BYTES:
            unread = f"it has {file.size >> 20} MiB, more than the {DOWNLOAD_BYTES >> 20} MiB that are downloaded"
            return _Read(records=read.records, problem=read.problem, unread=unread)
        return _Read(records=read.records, problem=read.problem, sha256=file.download_sha256())
    return read


class _RangeFile(io.RawIOBase):
    """A file on a server, of which only the parts that are read are fetched."""

    def __init__(self, pip: _Pip, url: str) -> None:
        super().__init__()
        self.pip = pip
        self.url = url
        self.size = 0
        self.tag = ""
        self.complete: BinaryIO | None = None  # a copy, where the server sent all of it
        self._position = 0
        self._parts: list[tuple[int, bytes]] = []
        self._open()

    def _open(self) -> None:
        """Fetch the end, which holds a zip file's list of content."""
        answer = self._get(f"bytes=-{TAIL_BYTES}")
        with contextlib.closing(answer):
            self.tag = answer.headers.get("ETag", "")
            span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
            if answer.status_code == 206 and span:
                self.size = int(span[3])
                self._keep(int(span[1]), answer, TAIL_BYTES)
                return
            if answer.status_code == 200:
                self._copy(answer)
                return
        with contextlib.closing(self._get(None)) as answer:
            self._copy(answer)

    def _copy(self, answer: Any) -> None:
        """Take the whole file: the server knows no partial reads."""
        if answer.status_code != 200:
            raise _Unreachable(f"the server answers with HTTP {answer.status_code}")
        length = int(answer.headers.get("Content-Length") or 0)
        if length > DOWNLOAD_BYTES:
            raise _Unreachable(f"the server allows no partial reads, and it has {length >> 20} MiB")
        self.complete = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - closed with this object
        for chunk in _limited(_raw(answer), DOWNLOAD_BYTES, self.pip.deadline):
            self.complete.write(chunk)
        self.size = self.complete.tell()
        if length not in (0, self.size):
            raise _Unreachable("index not reachable: an answer was cut")

    def close(self) -> None:
        """See `io.RawIOBase`."""
        if self.complete is not None:
            self.complete.close()
        super().close()

    def download_sha256(self) -> str:
        """Read all of it once and keep nothing."""
        with contextlib.closing(self._get(None)) as answer:
            if answer.status_code != 200:
                raise _Unreachable(f"the server answers with HTTP {answer.status_code}")
            return _hash(_limited(_raw(answer), DOWNLOAD_BYTES, self.pip.deadline), self.pip.deadline)

    def _get(self, span: str | None) -> Any:
        # no-cache: else pip's cache would answer; identity: else the bytes are not the file's.
        headers = {"Accept-Encoding": "identity", "Cache-Control": "no-cache"}
        return self.pip.get(self.url, headers | ({"Range": span} if span else {}), stream=True)

    def _keep(self, start: int, answer: Any, limit: int) -> None:
        data = b"".join(_limited(_raw(answer), limit, self.pip.deadline))
        expected = answer.headers.get("Content-Length")
        if expected is not None and int(expected) != len(data):
            raise _Unreachable("index not reachable: an answer was cut")
        self._parts.append((start, data))

    def fetch(self, start: int, end: int) -> None:
        """Make sure that the bytes from `start` to `end` are here."""
        end = min(end, self.size)
        if self.complete is not None or any(part <= start and end <= part + len(data) for part, data in self._parts):
            return
        for part, data in self._parts:
            if part < end <= part + len(data):
                self._fetch_exactly(start, part)
                self._parts.append((start, self._parts.pop()[1] + data))
                return
        self._fetch_exactly(start, end)

    def _fetch_exactly(self, start: int, end: int) -> None:
        if end - start > RANGE_BYTES:
            raise _NotAWheel("its list of content or RECORD is too large")
        answer = self._get(f"bytes={start}-{end - 1}")
        with contextlib.closing(answer):
            if answer.status_code != 206:
                raise _Unreachable(f"the server answers with HTTP {answer.status_code} to a partial read")
            if answer.headers.get("Content-Range") != f"bytes {start}-{end - 1}/{self.size}":
                raise _Unreachable("the file changed on the server while it was read")
            self._keep(start, answer, end - start)

    def read(self, size: int | None = -1) -> bytes:
        """See `io.RawIOBase`."""
        end = self.size if size is None or size < 0 else min(self._position + size, self.size)
        start = self._position
        if end <= start:
            return b""
        if self.complete is not None:
            self._position = end
            self.complete.seek(start)
            return self.complete.read(end - start)
        self.fetch(start, end)
        for part, data in self._parts:
            if part <= start and end <= part + len(data):
                self._position = end
                return data[start - part : end - part]
        raise _Unreachable("the server sent less than was asked for")

    def seek(self, offset: int, whence: int = 0) -> int:
        """See `io.RawIOBase`."""
        self._position = max(offset + (0, self._position, self.size)[whence], 0)
        return self._position

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._position

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True


# ---- a wheel's own RECORD -----------------------------------------------------------------------------------------

# As in incontainer/probe.py, which must stand alone: written by the installer, each in its own way.
_SIGNATURES = ("RECORD", "RECORD.jws", "RECORD.p7s")
_UNHASHED = frozenset(
    (*_SIGNATURES, "INSTALLER", "REQUESTED", "direct_url.json", "provenance_url.json", "uv_cache.json", "uv_build.json")
)


class _Contradiction(Exception):
    """The wheel's content is not what its RECORD says."""

    def __init__(self, text: str, records: tuple[str, ...]) -> None:
        super().__init__(text)
        self.records = records


def wheel_record_digests(wheel: zipfile.ZipFile, filename: str, *, whole: bool) -> tuple[str, ...]:
    """Return the RECORD digests (hpcenv-env-v1) that installations of a wheel can have.

    More than one only for a wheel with C headers: their folder is called by the project's
    name in whatever spelling the installer was given.

    Args:
        filename: its file name, which says the project and the version.
        whole: compare every file with its hash in RECORD, not only names and sizes.

    Raises:
        ValueError, zipfile.BadZipFile: it is not a wheel.
        _Contradiction: its content is not what its RECORD says.
    """
    if not all(info.filename for info in wheel.infolist()):
        raise ValueError("a file in it has no name")
    members = {info.filename: info for info in wheel.infolist() if not info.is_dir()}
    if len(members) != sum(not info.is_dir() for info in wheel.infolist()):
        raise ValueError("a name stands twice in its list of content")
    stem = _info_stem(members, filename)
    info = members[f"{stem}.dist-info/RECORD"]
    if info.file_size > RECORD_BYTES:
        raise ValueError("its RECORD is too large")
    _prefetch(wheel, info)
    rows = list(_rows(_content(wheel, info).decode("utf-8", "surrogateescape")))
    listed = {path for path, _, _ in rows}
    # pip installs what its RECORD forgot, and lists it without a hash.
    rows += [(name, "", "") for name in members if name not in listed and not name.endswith(_signature_names(stem))]
    spellings = sorted({stem.partition("-")[0], _normal(stem.partition("-")[0])})
    if any(path.startswith(f"{stem}.data/headers/") for path, _, _ in rows):
        spellings = sorted({*spellings, _metadata_name(wheel, members, stem)})
    records = tuple(dict.fromkeys(_installed_digest(rows, stem, spelling) for spelling in spellings))
    problem = _contradiction(wheel, members, rows, stem, whole=whole)
    if problem:
        raise _Contradiction(problem, records)
    return records


def _info_stem(members: Mapping[str, zipfile.ZipInfo], filename: str) -> str:
    """`NAME-VERSION` of its dist-info, as it is spelled inside."""
    own = _wheel_name(filename)
    stems = [name.split(".dist-info/")[0] for name in members if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if own is None or len(stems) != 1:
        raise ValueError("not exactly one RECORD")
    name, _, version = stems[0].partition("-")
    if (_normal(name), _version(version)) != (own.name, own.version):
        raise ValueError("its RECORD is of another package")
    return stems[0]


def _signature_names(stem: str) -> tuple[str, ...]:
    return tuple(f"{stem}.dist-info/{name}" for name in _SIGNATURES)


def _prefetch(wheel: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Get a member from a server at once: zipfile reads its header and its content in small pieces."""
    if isinstance(wheel.fp, _RangeFile):
        start = info.header_offset
        wheel.fp.fetch(start, start + 30 + 2 * len(info.orig_filename) + len(info.extra) + 256 + info.compress_size)


def _content(wheel: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with wheel.open(info) as member:
        data = member.read(info.file_size + 1)
    if len(data) != info.file_size:
        raise zipfile.BadZipFile("a file is longer or shorter than its list of content says")
    return data


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    if "\0" in text:
        raise ValueError("its RECORD holds a NUL byte")
    for cells in csv.reader(io.StringIO(text, newline="")):
        if len(cells) > 3 or any("\n" in cell or "\r" in cell for cell in cells):
            raise ValueError("a row of its RECORD is not path, hash, size")
        if cells and cells[0]:
            path, claim, size = [*cells, "", ""][:3]
            yield path, claim, size


def _metadata_name(wheel: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], stem: str) -> str:
    """The project's name as it spells itself: pip gives it to the folder for headers."""
    info = members.get(f"{stem}.dist-info/METADATA")
    if info is None or info.file_size > RECORD_BYTES:
        return stem.partition("-")[0]
    _prefetch(wheel, info)
    for line in _content(wheel, info).decode("utf-8", "replace").splitlines():
        if line.lower().startswith("name:"):
            return line[5:].strip()
    return stem.partition("-")[0]


def _installed_digest(rows: Iterable[tuple[str, str, str]], stem: str, spelling: str) -> str:
    """The digest of the rows that stay, under the paths that they get (step 2 and 3 in probe.py)."""
    lines = set()
    for path, claim, size in rows:
        place = _installed_path(path, stem, spelling)
        if place is not None:
            lines.add(f"{place}\0{claim}\0{size}".encode("utf-8", "surrogateescape"))
    return hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()


def _installed_path(path: str, stem: str, spelling: str) -> str | None:
    """Where a row's file goes, None for one that the digest leaves out."""
    if path.endswith(".pyc") or "__pycache__" in path.split("/"):
        return None
    if path[0] in "./" or "/." in path or "//" in path:
        path = os.path.normpath(path)
        if path.startswith(("../", "/")):
            raise ValueError("its RECORD points out of it")
    folder, _, name = path.rpartition("/")
    if folder == f"{stem}.dist-info" and name in _UNHASHED:
        return None
    if not path.startswith(f"{stem}.data/"):
        return path
    scheme, _, rest = path[len(stem) + 6 :].partition("/")
    if scheme in ("purelib", "platlib"):
        return rest
    if scheme == "headers":
        return f"{{headers}}/{spelling}/{rest}"
    return _data_path(rest) if scheme == "data" else None


def _data_path(rest: str) -> str | None:
    """`.data/data/` goes to the prefix, where probe.py calls some folders by other names."""
    if rest.startswith("bin/"):
        return None
    site = re.match(r"lib(?:64)?/python[0-9][^/]*/(?:site|dist)-packages/", rest)
    if site:
        return rest[site.end() :]
    headers = re.match(r"include/(?:site/)?python[0-9][^/]*/", rest)
    return "{headers}/" + rest[headers.end() :] if headers else "{data}/" + rest


def _contradiction(
    wheel: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    rows: Iterable[tuple[str, str, str]],
    stem: str,
    *,
    whole: bool,
) -> str:
    """Say what in the wheel is not as its RECORD lists it."""
    for path, claim, size in rows:
        info = members.get(path)
        if path.endswith(_signature_names(stem)):
            continue
        if info is None:
            return f"its RECORD lists `{path}`, which is not in it"
        if size.isdigit() and int(size) != info.file_size:
            return f"`{path}` in it has {info.file_size} bytes, its RECORD says {size}"
        if whole and claim and not _holds(wheel, info, claim):
            return f"`{path}` in it is not what its RECORD says"
    return ""


def _holds(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, claim: str) -> bool:
    from base64 import urlsafe_b64encode

    algorithm, _, listed = claim.partition("=")
    try:
        found = hashlib.new(algorithm)
    except ValueError:
        return False
    with wheel.open(info) as member:
        for chunk in iter(lambda: member.read(1 << 20), b""):
            found.update(chunk)
    return urlsafe_b64encode(found.digest()).rstrip(b"=") == listed.rstrip("=").encode()


if __name__ == "__main__":
    serve()
