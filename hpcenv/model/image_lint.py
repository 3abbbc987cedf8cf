"""What may be wrong with a recipe or an image: rules, findings, secrets, known trouble, suppression. Pure.

Runs on: LOGIN NODE.

`RULES` names every rule; its id is stable. `model/recipe_lint.py` looks for them in Dockerfiles and definition files,
`model/image_content.py` in finished images.

A line `# hpcenv: allow RULE reason` directly above an instruction (Dockerfile) or a command (both) accepts what that
rule finds there; above FROM or `Bootstrap:` it accepts it for the whole stage. Without a reason it counts for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hpcenv.errors import SpecError

Severity = Literal["error", "warn", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warn", "info")

# The table that comes with hpcenv. TOML: adapters/toml_files.py reads it.
PACKAGED_TROUBLES = Path(__file__).with_name("troubles.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule: why it matters and what to do."""

    id: str
    severity: Severity
    why: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that a rule found.

    Attributes:
        origin: the recipe or image.
        line: in a recipe; None in an image.
        place: in an image: a path, or `layer N` with its digest; in a recipe the stage's name.
        what: one sentence, without any secret that it is about.
        allowed: the reason of a suppression, None where there is none.
    """

    rule: str
    severity: Severity
    origin: str
    what: str
    line: int | None = None
    place: str = ""
    why: str = ""
    advice: str = ""
    allowed: str | None = None


def _rule(name: str, severity: Severity, why: str, advice: str) -> Rule:
    return Rule(id=name, severity=severity, why=why, advice=advice)


RULES = {
    one.id: one
    for one in (
        _rule(
            "base-floating",
            "error",
            "a tag such as `latest` names another image every few weeks, so nobody can make this one again",
            "write NAME:TAG@sha256:DIGEST; `hpcenv image init` does",
        ),
        _rule(
            "base-no-digest",
            "warn",
            "a tag can be moved: only a digest names one image",
            "write NAME:TAG@sha256:DIGEST",
        ),
        _rule(
            "base-unknown",
            "info",
            "its name comes from a variable without a value in this file, so it could not be judged",
            "give the ARG a default with a digest",
        ),
        _rule(
            "platform-fixed",
            "info",
            "a platform in FROM makes images for one kind of machine only, or slow ones by emulation",
            "give --platform to the build command",
        ),
        _rule(
            "root-user",
            "warn",
            "under docker and podman everything runs as root; Apptainer always runs as the caller",
            "end the last stage with USER and a number other than 0",
        ),
        _rule(
            "no-fabric",
            "warn",
            "without libibverbs and its providers NCCL silently uses TCP: up to 40 times slower between nodes",
            "install libibverbs1 ibverbs-providers librdmacm1 (Debian, Ubuntu) or rdma-core (others)",
        ),
        _rule(
            "cache-left",
            "warn",
            "what a package manager fetched stays in the layer, though nothing needs it to run",
            "remove it in the same RUN, or mount a cache: --mount=type=cache",
        ),
        _rule(
            "pip-no-hashes",
            "warn",
            "an index can serve another file under the same name and version tomorrow",
            "pip install --require-hashes --no-deps -r requirements.lock",
        ),
        _rule(
            "unpinned-upgrade",
            "warn",
            "an upgrade gives other packages every day, and the ones it replaces stay in the layer below",
            "take a newer base by digest instead",
        ),
        _rule(
            "pipe-to-shell",
            "error",
            "whatever the server sends is run, unseen and unchecked",
            "download a named version, compare its sha256, then run it",
        ),
        _rule(
            "add-url",
            "warn",
            "what lies there can change, and nothing is compared",
            "ADD --checksum=sha256:..., or download and compare in a RUN",
        ),
        _rule(
            "secret-in-environment",
            "error",
            "everybody who has the image can read its variables and its history",
            "mount it while building (RUN --mount=type=secret), and take it back: it is known now",
        ),
        _rule(
            "secret-as-argument",
            "warn",
            "values of build arguments stand in the image's history",
            "mount it while building: RUN --mount=type=secret",
        ),
        _rule(
            "secret-in-file",
            "error",
            "everybody who has the image can read it",
            "mount it while building (RUN --mount=type=secret), and take it back: it is known now",
        ),
        _rule(
            "secret-in-lower-layer",
            "error",
            "a later layer only hides it: everybody who has the image can read the layer below",
            "never write it in a layer; take it back: it is known now",
        ),
        _rule(
            "private-folder",
            "warn",
            "who runs the image does not own it: where Apptainer is setuid, or under another user, it cannot be read",
            "install outside of /root, with modes 755 and 644",
        ),
        _rule(
            "nvidia-variables",
            "info",
            "without NVIDIA_VISIBLE_DEVICES and NVIDIA_DRIVER_CAPABILITIES docker and enroot give it no GPU",
            "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
        _rule("known-trouble", "warn", "", ""),
        _rule(
            "cpu-torch",
            "warn",
            "this torch is built without CUDA: it cannot use a GPU, though the image brings CUDA",
            "install the torch of that CUDA",
        ),
        _rule(
            "library-mismatch",
            "warn",
            "torch was built for, and tested with, another version of this library",
            "install what torch asks for",
        ),
        _rule(
            "no-bytecode",
            "info",
            "a SIF is read-only: Python compiles every module again at every start, on every node",
            "leave PYTHONDONTWRITEBYTECODE and --no-compile out when installing",
        ),
        _rule(
            "no-install-report",
            "info",
            "without pip's report a lock must guess which wheel each package came from",
            "pip install --report /usr/share/hpcenv/pip-report.json",
        ),
        _rule("size", "info", "", ""),
        _rule(
            "hidden-bytes",
            "warn",
            "a later layer deletes or replaces them, but they are fetched and stored all the same",
            "do both in one RUN, or copy the result from another stage",
        ),
        _rule(
            "allow-without-reason",
            "warn",
            "who reads it later cannot tell whether it still holds",
            "# hpcenv: allow RULE because ...",
        ),
    )
}


def finding(rule: str, origin: str, what: str, **more: Any) -> Finding:
    """Return a finding with what its rule says."""
    known = RULES[rule]
    return Finding(
        **{
            "rule": rule,
            "severity": known.severity,
            "origin": origin,
            "what": what,
            "why": known.why,
            "advice": known.advice,
        }
        | more
    )


# -- secrets --------------------------------------------------------------------------------------------------------

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|SECRETS|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)(?:_|$)",
    re.IGNORECASE,
)
# Values that say where a secret is, or that there is none.
_NO_SECRET = re.compile(r"|/[^\s]*|\$\{?\w+\}?|true|false|none|null|0|1|changeme|<.*>|\*+", re.IGNORECASE)
# Forms that their issuers publish.
_TOKENS = {
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})"),
    "a GitLab token": re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}"),
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "an AWS access key": re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "a Slack token": re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    "a PyPI token": re.compile(r"\bpypi-AgEI[A-Za-z0-9_-]{20,}"),
    "a Google API key": re.compile(r"\bAIza[A-Za-z0-9_-]{35}\b"),
}
_URL_PASSWORD = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@'\"]*:(?!\$)[^/\s@'\"]+@", re.IGNORECASE)

# Files whose whole use is to hold a secret: the end of a path.
SECRET_FILES = {
    ".netrc": "passwords of servers",
    ".git-credentials": "passwords of git servers",
    ".pypirc": "tokens of package indexes",
    ".aws/credentials": "keys of a cloud account",
    ".docker/config.json": "logins of registries",
    ".apptainer/docker-config.json": "logins of registries",
    ".kube/config": "keys of a cluster",
    ".ssh/id_rsa": "a private key",
    ".ssh/id_dsa": "a private key",
    ".ssh/id_ecdsa": "a private key",
    ".ssh/id_ed25519": "a private key",
    ".huggingface/token": "a Hugging Face token",
    ".cache/huggingface/token": "a Hugging Face token",
    ".config/gcloud/application_default_credentials.json": "keys of a cloud account",
    ".config/gh/hosts.yml": "a GitHub token",
}


def secret_name(name: str, value: str) -> bool:
    """Say whether a variable holds a secret, from its name, and not only the place of one."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET.fullmatch(value.strip()) and not name.endswith("_FILE")


def secrets_in(text: str) -> tuple[str, ...]:
    """Name the kinds of secrets in a text, without the secrets."""
    found = [kind for kind, pattern in _TOKENS.items() if pattern.search(text)]
    if _URL_PASSWORD.search(text):
        found.append("a URL with a password")
    return tuple(found)


def secret_file(path: str) -> str | None:
    """Say what a file of this path holds, None for no secret."""
    return next((what for end, what in SECRET_FILES.items() if f"/{path.lstrip('/')}".endswith(f"/{end}")), None)


# -- packages with known trouble ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """A package with known trouble; `others` must be there too."""

    package: str
    when: SpecifierSet
    others: tuple[tuple[str, SpecifierSet], ...]
    why: str
    advice: str
    source: str


def parse_troubles(data: Mapping[str, Any], *, origin: str = "troubles.toml") -> tuple[Trouble, ...]:
    """Return the table from the plain data of its file.

    Raises:
        SpecError: it is not such a table.
    """
    try:
        if data["schema"] != 1:
            raise SpecError(f"`{origin}` has schema {data['schema']!r}, this hpcenv reads schema 1")
        return tuple(
            Trouble(
                package=canonicalize_name(row["package"]),
                when=SpecifierSet(row["when"], prereleases=True),
                others=tuple(
                    (canonicalize_name(name), SpecifierSet(when, prereleases=True))
                    for name, when in row.get("and", {}).items()
                ),
                why=str(row["why"]),
                advice=str(row["advice"]),
                source=f"{row['source']}, read {row['retrieved']}",
            )
            for row in data["trouble"]
        )
    except (KeyError, TypeError, AttributeError, InvalidSpecifier) as error:
        raise SpecError(f"`{origin}` is not a table of troubles", why=f"{type(error).__name__}: {error}") from error


def troubles_of(troubles: Iterable[Trouble], versions: Mapping[str, str | None]) -> Iterator[tuple[str, Trouble]]:
    """Yield packages with known trouble.

    Args:
        versions: canonical name -> version; None where a recipe leaves it open, which only
            matches what every version has. `nvidia-nccl-cu12` counts as `nvidia-nccl` too.
    """
    for trouble in troubles:
        for name in versions:
            same = name == trouble.package or re.fullmatch(re.escape(trouble.package) + r"-cu\d+", name)
            if (
                same
                and _holds(trouble.when, versions[name])
                and all(other in versions and _holds(when, versions[other]) for other, when in trouble.others)
            ):
                yield name, trouble


def _holds(when: SpecifierSet, version: str | None) -> bool:
    if not str(when):
        return True
    try:
        return version is not None and Version(version) in when
    except InvalidVersion:
        return False


# -- suppression ----------------------------------------------------------------------------------------------------

_ALLOW = re.compile(r"hpcenv:\s*allow\s+([a-z][a-z-]*)\s*(.*)")


def allowed(comments: Iterable[str]) -> dict[str, str]:
    """Return the rules that comments accept, with the reason."""
    matches = (_ALLOW.fullmatch(text.strip()) for text in comments)
    return {match[1]: match[2].strip() for match in matches if match}
