"""Rules for finished images: their files, layers and configuration. Pure.

Runs on: LOGIN NODE. A SIF is an image with one layer and no user: Apptainer runs it as the calling user.

Private keys that distributions and wheels contain for their own tests are not reported, because they are public.
"""

from __future__ import annotations

import datetime as dt
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from hpcenv.image.recorded_files import REPORT
from hpcenv.judge.compat import library_rules
from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.libraries import LIBRARIES, judge_environment
from hpcenv.locking.conflicts import MOST_REQUIREMENTS, find_conflicts
from hpcenv.locking.pins.pin import marker_environment
from hpcenv.project.severities import severities
from hpcenv.recipes import exposed
from hpcenv.recipes.image_lint import (
    RULES,
    SEVERITIES,
    KnownTrouble,
    LintFinding,
    LintSeverity,
    finding,
    secret_file,
    secret_name,
    secrets_in,
    troubles_of,
)
from hpcenv.text import printable

_MIB = 1024 * 1024
# In bytes. Smaller caches and smaller deleted files are not reported.
_CACHE_LEAST = _MIB
_HIDDEN_LEAST = 50 * _MIB
_ADVICE_LEAST = 100 * _MIB
_SAMPLE_LIMIT = 256 * 1024
# The maximum number of findings of one rule. More findings would hide the findings of the other rules.
_MOST_OF_A_RULE = 20
_CONFLICTS_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFile:
    """A path of a layer.

    Attributes:
        path: relative to the root, as readable text.
        kind: `file`, `directory` and so on.
        mode: permission bits.
        size: bytes.
        text: the file's content if `needs_content` is true for the file, else None.
    """

    path: str
    kind: str
    mode: int
    size: int = 0
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLayer:
    """A layer: the files that it adds and removes.

    Attributes:
        name: `layer 2 (sha256:0123...)`, or empty for a SIF.
        removed: paths that the layer deletes, with all paths below them.
        opaque: folders whose content in lower layers this layer hides.
    """

    name: str
    files: Sequence[ImageFile]
    removed: frozenset[str] = frozenset()
    opaque: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageContents:
    """A finished image.

    Attributes:
        environment: the variables in the configuration of the image.
        user: the user in the configuration of the image; None for a SIF, which has no user.
        history: the commands that made the layers.
        base_created: when the lowest layer was made, RFC 3339; for a SIF, when the image was made; "" if the value is
            unknown.
        command: the command that the image runs, as text.
    """

    origin: str
    layers: tuple[ImageLayer, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    history: tuple[str, ...] = ()
    base_created: str = ""
    command: str = ""


_DIST_INFO = re.compile(r"(?P<site>.*/(?:site|dist)-packages)/(?P<name>[^/]+)\.dist-info/METADATA")
_MAYBE_SECRET = re.compile(
    r"(^|/)(id_[a-z0-9]+|[^/]+\.(pem|key|env)|\.env|\.?pip/pip\.conf|pip\.conf|auth\.conf|\.npmrc|\.condarc"
    r"|\.git/config|\.bash_history|\.config/pip/pip\.conf)$"
)
# Paths of public files: certificates, and keys for the tests of Python and of packages.
_SHIPPED = re.compile(
    r"(^|/)(usr/(share|lib)|site-packages|dist-packages|test|tests|testing|etc/ssl/certs|doc|examples?)/"
)


def needs_content(path: str, size: int) -> bool:
    """Return whether a rule needs the content of a file; `size` is in bytes."""
    if size > _SAMPLE_LIMIT:
        return False
    if path.endswith(".dist-info/METADATA"):
        return True
    if path.startswith((".singularity.d/env/", ".singularity.d/runscript", ".singularity.d/labels.json")):
        return True
    if exposed.NOTEBOOK_FILE.search(path) or exposed.INDEX_FILE.search(path):
        return not _SHIPPED.search(path)
    return (_MAYBE_SECRET.search(path) is not None or secret_file(path) is not None) and not _SHIPPED.search(path)


def lint_contents(
    contents: ImageContents,
    *,
    troubles: Sequence[KnownTrouble] = (),
    table: Compat | None = None,
    today: dt.date | None = None,
) -> tuple[LintFinding, ...]:
    """Check a finished image; the findings are sorted by severity.

    Args:
        contents: the image.
        troubles: packages with known trouble.
        table: the compatibility table, for the packages and libraries around torch. If `table` is None, the rules about
            these packages and libraries are skipped.
        today: the date for the age of the base. If `today` is None, the rule about the age is skipped.
    """
    final = _visible_files(contents.layers)
    findings: list[LintFinding] = [
        *_check_settings(contents),
        *_check_fabric(contents, final),
        *_check_servers(contents, final),
        *_check_python(contents, final),
        *_check_second_cuda(contents, final),
        *(() if today is None else _check_age(contents, today)),
        *_check_secrets(contents, final),
        *_check_caches(contents),
        *_check_hidden(contents),
        *_check_folders(contents, final),
        *_check_packages(contents, final, troubles),
        *(() if table is None else _check_compatibility(contents, final, table)),
        *_check_bytecode(contents, final),
        *_check_size(contents),
    ]
    return tuple(sorted(_limited(findings), key=lambda one: (SEVERITIES.index(one.severity), one.rule, one.place)))


def _limited(findings: Iterable[LintFinding]) -> Iterator[LintFinding]:
    counts: Counter[str] = Counter()
    for one in findings:
        counts[one.rule] += 1
        if counts[one.rule] <= _MOST_OF_A_RULE:
            yield one


# -- layers ---------------------------------------------------------------------------------------------------------


def _visible_files(layers: Sequence[ImageLayer]) -> dict[str, ImageFile]:
    """Return the files that are visible in the image, by path."""
    final: dict[str, ImageFile] = {}
    for layer in layers:
        gone = _removed_by(layer, final)
        for path in gone:
            del final[path]
        final.update((one.path, one) for one in layer.files)
    return final


def _removed_by(layer: ImageLayer, below: Mapping[str, ImageFile]) -> list[str]:
    """Return the paths of lower layers that a layer removes. Paths that the layer only replaces are not included."""
    files = {one.path for one in layer.files if one.kind != "directory"}
    # A file instead of a folder removes all paths below that folder.
    over = files & {parent for path in below for parent in _parents(path)}
    hides = layer.removed | layer.opaque | over
    if not hides:
        return []
    return [path for path in below if path in layer.removed or any(parent in hides for parent in _parents(path))]


def _parents(path: str) -> Iterator[str]:
    end = path.rfind("/")
    while end > 0:
        yield path[:end]
        end = path.rfind("/", 0, end)


def _check_hidden(contents: ImageContents) -> Iterator[LintFinding]:
    """Find bytes of lower layers that are not visible in the image."""
    below: dict[str, ImageFile] = {}
    for layer in contents.layers:
        again = [one.path for one in layer.files if one.kind != "directory" and one.path in below]
        gone = _removed_by(layer, below)
        lost = {path: below[path].size for path in (*gone, *again)}
        total = sum(lost.values())
        if total >= _HIDDEN_LEAST:
            largest = max(lost, key=lambda path: lost[path])
            what = f"{_size(total)} of lower layers are deleted or replaced, the largest {_plain(largest)}"
            yield finding("hidden-bytes", contents.origin, what, place=layer.name)
        for path in gone:
            del below[path]
        below.update((one.path, one) for one in layer.files)


# -- settings -------------------------------------------------------------------------------------------------------

_EXPORT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?:\"([^\"]*)\"|'([^']*)'|(\S*))", re.MULTILINE)


def _check_settings(contents: ImageContents) -> Iterator[LintFinding]:
    if contents.user is not None and contents.user.partition(":")[0] in ("", "root", "0"):
        what = f"the image runs as root (USER is {_plain(contents.user) or 'not set'})"
        yield finding("root-user", contents.origin, what)
    for name, value in contents.environment.items():
        if exposed.index_variable(name, value):
            what = f"the variable {_plain(name)} contains the login of a package index"
            yield finding("index-credentials", contents.origin, what)
        elif secret_name(name, value) or secrets_in(value):
            yield finding("secret-in-environment", contents.origin, f"the variable {_plain(name)} contains a secret")
    for number, text in enumerate(contents.history, start=1):
        kinds = secrets_in(text)
        if kinds:
            what = f"the history contains {kinds[0]} (entry {number})"
            yield finding("secret-in-environment", contents.origin, what)
    for layer in contents.layers:
        for one in layer.files:
            if one.text is None or not one.path.startswith(".singularity.d/env/"):
                continue
            for match in _EXPORT.finditer(one.text):
                value = next((group for group in match.groups()[1:] if group is not None), "")
                if exposed.index_variable(match[1], value):
                    what = f"the variable {match[1]} contains the login of a package index"
                    yield finding("index-credentials", contents.origin, what, place=one.path)
                elif secret_name(match[1], value) or secrets_in(value):
                    what = f"the variable {match[1]} contains a secret"
                    yield finding("secret-in-environment", contents.origin, what, place=one.path)


_LIBIBVERBS = re.compile(r"(^|/)libibverbs\.so\.1[^/]*$")
_PROVIDER = re.compile(r"(^|/)(libibverbs/lib[a-z0-9]+-rdmav\d+\.so|libmlx5\.so\.1[^/]*|libefa\.so\.1[^/]*)$")


def _check_fabric(contents: ImageContents, final: Mapping[str, ImageFile]) -> Iterator[LintFinding]:
    if not any(_LIBIBVERBS.search(path) for path in final):
        yield finding("no-fabric", contents.origin, "the image does not contain libibverbs.so.1")
    elif not any(_PROVIDER.search(path) for path in final):
        yield finding(
            "no-fabric", contents.origin, "the image contains libibverbs.so.1, but no provider for it, such as mlx5"
        )


# -- servers, Python, CUDA, age -------------------------------------------------------------------------------------


def _check_servers(contents: ImageContents, final: Mapping[str, ImageFile]) -> Iterator[LintFinding]:
    if exposed.open_notebook(contents.command):
        yield finding("open-notebook", contents.origin, "the image starts Jupyter with an empty token")
    if "JUPYTER_TOKEN" in contents.environment and not contents.environment["JUPYTER_TOKEN"]:
        yield finding("open-notebook", contents.origin, "JUPYTER_TOKEN is empty")
    for path, one in final.items():
        is_setting = exposed.NOTEBOOK_FILE.search(path) or path == ".singularity.d/runscript"
        if is_setting and one.text is not None and exposed.open_notebook(one.text):
            yield finding("open-notebook", contents.origin, "the token of Jupyter is empty", place=_plain(path))
    for path in ("usr/sbin/sshd", "sbin/sshd", "usr/local/sbin/sshd"):
        if path in final:
            yield finding("sshd", contents.origin, "the image contains a server of SSH", place=path)


_PYTHON = re.compile(r"(^|/)bin/python(3(\.\d+)?)?$")


def _check_python(contents: ImageContents, final: Mapping[str, ImageFile]) -> Iterator[LintFinding]:
    if not any(_PYTHON.search(path) for path in final):
        yield finding("no-python", contents.origin, "the image contains no Python interpreter")


_BASE_CUDA = re.compile(r"usr/local/cuda[^/]*/.*/(libcudart|libcublas|libcudnn|libnccl)[^/]*\.so\.[\d.]+$")
_WHEEL_CUDA = re.compile(r"/(site|dist)-packages/(nvidia/.*/lib/libcudart\.so|torch/lib/libcudart)")


def _check_second_cuda(contents: ImageContents, final: Mapping[str, ImageFile]) -> Iterator[LintFinding]:
    in_base = [path for path in final if _BASE_CUDA.match(path)]
    has_more = any("libcublas" in path for path in in_base)
    if has_more and any(_WHEEL_CUDA.search(f"/{path}") for path in final):
        folder = "/".join(in_base[0].split("/")[:3])
        total = sum(one.size for path, one in final.items() if path.startswith("usr/local/cuda"))
        what = f"{folder} ({_size(total)}) is beside the CUDA of the wheels"
        yield finding("second-cuda", contents.origin, what, place=_plain(folder))


def _check_age(contents: ImageContents, today: dt.date) -> Iterator[LintFinding]:
    """Compare the age of the base with the limit of the rule. A date in 1980 or earlier is ignored."""
    try:
        made = dt.date.fromisoformat(contents.base_created[:10])
    except ValueError:
        return
    days = (today - made).days
    if made.year > _EPOCH_YEAR and days > RULES["old-base"].limit:
        yield finding("old-base", contents.origin, f"the base is {days} days old (made {made})")


# Reproducible builds set the times of files and images to 1970 or 1980.
_EPOCH_YEAR = 1980


# -- secrets --------------------------------------------------------------------------------------------------------


def _check_secrets(contents: ImageContents, final: Mapping[str, ImageFile]) -> Iterator[LintFinding]:
    for layer in contents.layers:
        for one in layer.files:
            contains = _secret_of(one)
            if contains is None:
                continue
            is_visible = final.get(one.path) is one
            rule = "secret-in-file" if is_visible else "secret-in-lower-layer"
            if contains == _INDEX_LOGIN and is_visible:
                rule = "index-credentials"
            place = ", ".join(part for part in (layer.name, _plain(one.path)) if part)
            yield finding(rule, contents.origin, f"{_plain(one.path)} contains {contains}", place=place)


_INDEX_LOGIN = "the login of a package index"


def _secret_of(one: ImageFile) -> str | None:
    if one.kind != "file" or one.size == 0 or _SHIPPED.search(one.path):
        return None
    if one.path.startswith(".singularity.d/"):
        return None
    is_index_file = one.text is not None and exposed.INDEX_FILE.search(one.path)
    if is_index_file and exposed.index_credentials(one.text or "", is_index_file=True):
        return _INDEX_LOGIN
    kinds = secrets_in(one.text) if one.text is not None else ()
    if kinds:
        return kinds[0]
    contains = secret_file(one.path)
    if contains is None or one.text is None:
        return contains
    # docker may write this file with settings only, without a login. Such a file contains no secret.
    if one.path.endswith(("config.json", "docker-config.json")) and '"auth"' not in one.text:
        return None
    return contains


# -- caches ---------------------------------------------------------------------------------------------------------

_CACHES = {
    "package lists of apt": (re.compile(r"var/lib/apt/lists/."), "rm -rf /var/lib/apt/lists/*"),
    "packages of apt": (re.compile(r"var/cache/apt/."), "rm -rf /var/cache/apt/*"),
    "the cache of dnf or yum": (re.compile(r"var/cache/(dnf|yum|libdnf5)/."), "dnf clean all"),
    "the cache of apk": (re.compile(r"var/cache/apk/."), "apk add --no-cache"),
    "the cache of pip": (re.compile(r"(root|home/[^/]+)/\.cache/pip/."), "pip install --no-cache-dir"),
    "the cache of uv": (re.compile(r"(root|home/[^/]+)/\.cache/uv/."), "uv --no-cache"),
    "packages of conda": (re.compile(r"(opt|usr|root|home)/(.+/)?pkgs/[^/]+\.(conda|tar\.bz2)$"), "conda clean --all"),
    "the cache of Hugging Face": (re.compile(r"(root|home/[^/]+)/\.cache/huggingface/."), "mount it when it is used"),
    "temporary files": (re.compile(r"(var/)?tmp/."), "remove them in the same RUN"),
}  # fmt: skip


def _check_caches(contents: ImageContents) -> Iterator[LintFinding]:
    for layer in contents.layers:
        sums: Counter[str] = Counter()
        for one in layer.files:
            if one.kind == "file" and one.path.startswith(("var/", "root/", "home/", "opt/", "usr/", "tmp/")):
                name = next((name for name, (pattern, _) in _CACHES.items() if pattern.match(one.path)), None)
                if name is not None:
                    sums[name] += one.size
        for name, total in sums.most_common():
            if total >= _CACHE_LEAST:
                what = f"{_size(total)}: {name}"
                yield finding("cache-left", contents.origin, what, place=layer.name, advice=_CACHES[name][1])


# -- Python ---------------------------------------------------------------------------------------------------------

_SITE = re.compile(r"(.*/(?:site|dist)-packages)(?:/|$)")


def _sites(final: Mapping[str, ImageFile]) -> frozenset[str]:
    return frozenset(
        path
        for path, one in final.items()
        if one.kind == "directory" and path.endswith(("/site-packages", "/dist-packages"))
    )


def _check_folders(contents: ImageContents, final: Mapping[str, ImageFile]) -> Iterator[LintFinding]:
    """Find folders of Python packages that only their owner may read."""
    closed: dict[str, str] = {}
    for site in sorted(_sites(final)):
        for path in (site, *_parents(site)):
            folder = final.get(path)
            if folder is not None and folder.kind == "directory" and folder.mode & 0o005 != 0o005:
                closed.setdefault(path, site)
    for path, site in closed.items():
        what = f"{_plain(path)} has mode {final[path].mode & 0o7777:04o}; it contains Python packages ({_plain(site)})"
        yield finding("private-folder", contents.origin, what, place=_plain(path))


def installed(final: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the packages of each site-packages folder: folder -> name -> version."""
    packages: dict[str, dict[str, str]] = {}
    for path in final:
        match = _DIST_INFO.fullmatch(path)
        if match is None:
            continue
        name, dash, version = match["name"].rpartition("-")
        if dash:
            packages.setdefault(match["site"], {})[canonicalize_name(name)] = version
    return packages


def _check_packages(
    contents: ImageContents, final: Mapping[str, ImageFile], troubles: Sequence[KnownTrouble]
) -> Iterator[LintFinding]:
    toolkit = any(re.match(r"usr/local/cuda[^/]*/.*libcudart\.so", path) for path in final)
    sites = installed(final)
    for site, versions in sorted(sites.items()):
        for name, trouble in troubles_of(troubles, dict(versions)):
            yield finding(
                "known-trouble",
                contents.origin,
                f"{name} {versions[name]} has known trouble",
                place=_plain(site),
                why=f"{trouble.why} ({trouble.source})",
                advice=trouble.hint,
            )
        torch = versions.get("torch", "")
        cuda = toolkit or any(name.startswith("nvidia-cuda-runtime") for name in versions)
        if torch.endswith("+cpu") and cuda:
            yield finding(
                "cpu-torch", contents.origin, f"the image contains torch {torch} and CUDA libraries", place=_plain(site)
            )
        if torch:
            yield from _check_requirements(contents, final, site, versions)
        yield from _check_conflicts(contents, final, site, versions)
    if any("torch" in versions for versions in sites.values()) and REPORT.lstrip("/") not in final:
        yield finding("no-install-report", contents.origin, f"the image does not contain {REPORT}")


def _check_compatibility(
    contents: ImageContents, final: Mapping[str, ImageFile], table: Compat
) -> Iterator[LintFinding]:
    """Judge the packages around torch by the compatibility table. Judge libraries only without torch's metadata."""
    for site, versions in sorted(installed(final).items()):
        torch, has_text = versions.get("torch", ""), _metadata_of_torch(final, site) is not None
        if table.torch(torch) is None:
            continue
        found = library_rules.versions_of({}, versions.items())
        for one in judge_environment(table, torch=torch, cuda=_cuda_of(versions, table), versions=found):
            is_library = one.field.removeprefix("compat.") in LIBRARIES
            if one.judgement.result == "mismatch" and not (is_library and has_text):
                severity = _SEVERITIES[library_rules.weight(one, severities({}))]
                judged = one.judgement
                yield finding(
                    "library-mismatch",
                    contents.origin,
                    judged.what,
                    place=_plain(site),
                    why=judged.why,
                    advice=judged.hint,
                    severity=severity,
                )


# The severity of a finding for each severity of a field (project/fields.py).
_SEVERITIES: dict[str, LintSeverity] = {"must": "error", "warn": "warn", "info": "info"}


def _cuda_of(versions: Mapping[str, str], table: Compat) -> str:
    """Return the CUDA of the installed torch; "" if torch is the build of the default index."""
    release, local = table.torch(versions["torch"]), versions["torch"].partition("+")[2]
    match = re.fullmatch(r"cu(\d+)(\d)", local)
    if match is None or release is None:
        return ""
    return f"{match[1]}.{match[2]}"


def _metadata_of_torch(final: Mapping[str, ImageFile], site: str) -> str | None:
    path = next((p for p in final if p.startswith(f"{site}/torch-") and p.endswith(".dist-info/METADATA")), None)
    return final[path].text if path is not None else None


def _check_conflicts(
    contents: ImageContents, final: Mapping[str, ImageFile], site: str, versions: Mapping[str, str]
) -> Iterator[LintFinding]:
    """Compare the requirements of all packages with the installed packages, except for torch's own libraries."""
    python = re.search(r"python(3\.\d+)", site)
    if python is None:  # in Debian's dist-packages, Debian's own tools check the packages
        return
    required: dict[str, list[str]] = {}
    for path, one in final.items():
        match = _DIST_INFO.fullmatch(path)
        if match is None or match["site"] != site or one.text is None:
            continue
        name = canonicalize_name(match["name"].partition("-")[0])
        lines = one.text.split("\n\n", 1)[0].splitlines()
        found = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
        required[name] = [text for text in found[:MOST_REQUIREMENTS] if not (name == "torch" and "nvidia-" in text)]
    environment = marker_environment({"python.version": f"{python[1]}.0"})
    for conflict in itertools.islice(find_conflicts(versions, required, environment), _CONFLICTS_SHOWN):
        yield finding("package-conflict", contents.origin, str(conflict), place=_plain(site))


def _check_requirements(
    contents: ImageContents, final: Mapping[str, ImageFile], site: str, versions: Mapping[str, str]
) -> Iterator[LintFinding]:
    """Compare the requirements of torch with the installed packages."""
    for line in (_metadata_of_torch(final, site) or "").split("\n\n", 1)[0].splitlines():
        if not line.startswith("Requires-Dist: nvidia-"):
            continue
        try:
            requirement = Requirement(line.partition(": ")[2])
            name = canonicalize_name(requirement.name)
            differs = name in versions and not requirement.specifier.contains(versions[name], prereleases=True)
        except (InvalidRequirement, InvalidVersion):
            continue
        if differs:
            what = f"{name} is {versions[name]}, torch {versions['torch']} requires {requirement.specifier}"
            yield finding("library-mismatch", contents.origin, what, place=_plain(site))


def _check_bytecode(contents: ImageContents, final: Mapping[str, ImageFile]) -> Iterator[LintFinding]:
    modules: Counter[str] = Counter()
    compiled: Counter[str] = Counter()
    for path in final:
        if path.endswith((".py", ".pyc")):
            match = _SITE.match(path)
            if match is not None:
                (modules if path.endswith(".py") else compiled)[match[1]] += 1
    for site, count in modules.items():
        if count >= 200 and compiled[site] < count / 10:
            what = f"{compiled[site]} of {count} modules are compiled"
            yield finding("no-bytecode", contents.origin, what, place=_plain(site))


# -- size -----------------------------------------------------------------------------------------------------------

# Large files that programs seldom need at run time.
_SELDOM = (
    (re.compile(r"\.a$"), "static libraries (*.a)", "start from a runtime base, not from a devel base"),
    (re.compile(r"(^|/)\.git/"), "git repositories", "copy without .git (.dockerignore)"),
    (re.compile(r"^usr/share/(doc|man|locale)/"), "manuals and translations", "leave them out"),
    (re.compile(r"(^|/)(tests?|testing)/.*\.(so|bin|npz|pt)$"), "data of tests", "remove it where it is installed"),
    (re.compile(r"\.(whl|conda|tar\.gz|tgz|tar\.bz2|zip|deb|rpm)$"), "archives", "remove them where they are unpacked"),
    (re.compile(r"\.(safetensors|ckpt|gguf|pth)$"), "model weights", "bind them from the shared file system"),
)  # fmt: skip


def _check_size(contents: ImageContents) -> Iterator[LintFinding]:
    for layer in contents.layers:
        folders: Counter[str] = Counter()
        seldom: Counter[int] = Counter()
        total = 0
        for one in layer.files:
            if one.kind != "file" or not one.size:
                continue
            total += one.size
            folders[_bucket(one.path)] += one.size
            number = next((n for n, (pattern, _, _) in enumerate(_SELDOM) if pattern.search(one.path)), None)
            if number is not None:
                seldom[number] += one.size
        if total < _ADVICE_LEAST and len(contents.layers) > 1:
            continue
        parts = ", ".join(f"{_plain(path)} {_size(size)}" for path, size in folders.most_common(4))
        hints = [
            f"{_size(size)} {_SELDOM[n][1]}: {_SELDOM[n][2]}"
            for n, size in seldom.most_common()
            if size >= _ADVICE_LEAST
        ]
        what = f"{_size(total)} unpacked: {parts}"
        yield finding("size", contents.origin, what, place=layer.name, advice="; ".join(hints))


def _bucket(path: str) -> str:
    """Return the folder to which a file's size is added: a Python package, or the first three parts of the path."""
    parts = path.split("/")
    for number, part in enumerate(parts[:-1]):
        if part in ("site-packages", "dist-packages"):
            return "/".join(parts[: number + 2])
    return "/".join(parts[: min(3, max(1, len(parts) - 1))])


def _size(count: int) -> str:
    return (
        f"{count / 1e9:.1f} GB"
        if count >= 1e9
        else f"{count / 1e6:.0f} MB"
        if count >= 1e6
        else f"{count / 1e3:.0f} kB"
    )


def _plain(text: str) -> str:
    """Return untrusted text as one line of at most 200 characters."""
    return printable(text[:200])
