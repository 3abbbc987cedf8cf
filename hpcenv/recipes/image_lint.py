"""The table of lint rules, findings, patterns of secrets, packages with known trouble, and accepted findings. Pure.

Runs on: LOGIN NODE.

`RULES` contains every rule of hpcenv. The ids of rules do not change. `recipes/recipe_lint.py` checks the rules in
Dockerfiles and definition files, and `recipes/image_content.py` checks the rules in finished images.

A comment `# hpcenv: allow RULE reason` accepts the findings of a rule. Such a comment must be directly above an
instruction of a Dockerfile, or above a command. Above FROM or `Bootstrap:` the comment accepts the findings of the
whole stage. A comment without a reason has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hpcenv.errors import SpecError

LintSeverity = Literal["error", "warn", "info"]
SEVERITIES: tuple[LintSeverity, ...] = ("error", "warn", "info")

# The table that is part of hpcenv. project/toml_files.py reads it.
PACKAGED_TROUBLES = Path(__file__).with_name("troubles.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule: its severity, why its findings matter, and what to do about them.

    Attributes:
        limit: the limit that the rule compares a value with (for `old-base`: days); 0 if the rule has no limit.
    """

    id: str
    severity: LintSeverity
    why: str
    hint: str
    limit: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LintFinding:
    """A finding of a rule.

    Attributes:
        origin: the recipe or image, as the user named it.
        line: line number in a recipe, counted from 1; None for an image.
        place: for an image a path, or `layer N` with its digest; for a recipe the name of the stage.
        what: one sentence about the finding. It contains no secret.
        why: why the finding matters.
        advice: what to do about the finding.
        allowed: the reason why the finding is accepted; None if it is not accepted.
    """

    rule: str
    severity: LintSeverity
    origin: str
    what: str
    line: int | None = None
    place: str = ""
    why: str = ""
    advice: str = ""
    allowed: str | None = None


def _rule(name: str, severity: LintSeverity, why: str, hint: str, *, limit: int = 0) -> Rule:
    return Rule(id=name, severity=severity, why=why, hint=hint, limit=limit)


RULES = {
    one.id: one
    for one in (
        _rule(
            "base-floating",
            "error",
            "a tag such as `latest` names a new image every few weeks, so this image cannot be built again",
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
            "the name of the base depends on a variable without a value in this file",
            "give the ARG a default with a digest",
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
            "the downloads of a package manager stay in the layer, and no program needs them",
            "remove it in the same RUN, or mount a cache: --mount=type=cache",
        ),
        _rule(
            "pip-no-hashes",
            "warn",
            "tomorrow an index can serve a different file with the same name and version",
            "pip install --require-hashes --no-deps -r requirements.lock",
        ),
        _rule(
            "unpinned-upgrade",
            "warn",
            "an upgrade installs different packages every day, and the replaced packages stay in the layer below",
            "use a newer base, by digest",
        ),
        _rule(
            "pipe-to-shell",
            "error",
            "the program runs what the server sends, without a check",
            "download a named version, compare its sha256, then run it",
        ),
        _rule(
            "add-url",
            "warn",
            "the file on the server can change, and no checksum is compared",
            "ADD --checksum=sha256:..., or download and compare in a RUN",
        ),
        _rule(
            "secret-in-environment",
            "error",
            "everyone with the image can read its variables and its history",
            "mount the secret during the build (RUN --mount=type=secret), and revoke it: it is no longer secret",
        ),
        _rule(
            "secret-as-argument",
            "warn",
            "the image's history contains the values of build arguments",
            "mount the secret during the build: RUN --mount=type=secret",
        ),
        _rule(
            "secret-in-file",
            "error",
            "everyone with the image can read it",
            "mount the secret during the build (RUN --mount=type=secret), and revoke it: it is no longer secret",
        ),
        _rule(
            "secret-in-lower-layer",
            "error",
            "a later layer only hides the secret: everyone with the image can read the layer below",
            "never write the secret into a layer, and revoke it: it is no longer secret",
        ),
        _rule(
            "index-credentials",
            "error",
            "everyone with the image can read the credentials, and use them to download from the index or to change it",
            "mount pip.conf during the build (RUN --mount=type=secret), and revoke them: they are no longer secret",
        ),
        _rule(
            "open-notebook",
            "error",
            "nodes share a network: everybody on the cluster can run commands as the user who starts it",
            "let Jupyter make its own token, or set IdentityProvider.token when Jupyter starts",
        ),
        _rule(
            "sshd",
            "warn",
            "Slurm starts the processes of a job; an SSH server needs host keys, which no image should have",
            "leave the server out: srun, or `hpcenv attach`, gives a shell on a node",
        ),
        _rule(
            "no-python",
            "warn",
            "hpcenv reads an image with the image's own Python, and the training needs a Python, too",
            "install python3, or start from an image that has it",
        ),
        _rule(
            "mirror-left",
            "warn",
            "everyone who uses the image installs from this server, but another site may not reach the server",
            "mount pip.conf or apt's sources during the build (RUN --mount=type=secret); `hpcenv image init` does",
        ),
        _rule(
            "second-cuda",
            "warn",
            "both torch's wheels and the base contain CUDA: several GB more, and a program may load the wrong CUDA",
            "start from the distribution's image, or from a `base` tag of nvidia/cuda; use a devel image only to build",
        ),
        _rule(
            "old-base",
            "info",
            "the packages of the base lack the security updates since that date",
            "take the digest that the tag names now, and build again",
            limit=180,
        ),
        _rule(
            "private-folder",
            "warn",
            "another user, or a user of a setuid Apptainer, may be unable to read the folder",
            "install outside /root, with the modes 755 and 644",
        ),
        _rule(
            "nvidia-variables",
            "info",
            "without NVIDIA_VISIBLE_DEVICES and NVIDIA_DRIVER_CAPABILITIES, docker and enroot provide no GPU",
            "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
        _rule("known-trouble", "warn", "", ""),
        _rule(
            "cpu-torch",
            "warn",
            "this torch is built without CUDA: it cannot use a GPU, although the image contains CUDA",
            "install the torch build for that CUDA",
        ),
        _rule(
            "library-mismatch",
            "warn",
            "torch was built for another version of this library, and tested with it",
            "install the version that torch requires",
        ),
        _rule(
            "package-conflict",
            "warn",
            "the packages were not made for each other: an import, or a call long after it, may fail",
            "install versions that fit: `python -m pip check` lists the conflicts",
        ),
        _rule(
            "no-bytecode",
            "info",
            "a SIF is read-only, so Python compiles every module at every start, on every node",
            "install without PYTHONDONTWRITEBYTECODE and --no-compile",
        ),
        _rule(
            "no-install-report",
            "info",
            "without pip's report, `hpcenv lock` does not know from which wheel each package was installed",
            "pip install --report /usr/share/hpcenv/pip-report.json",
        ),
        _rule("size", "info", "", ""),
        _rule(
            "hidden-bytes",
            "warn",
            "a later layer deletes or replaces these files, but they are still downloaded and stored",
            "create and delete in one RUN, or copy the result from another stage",
        ),
        _rule(
            "allow-without-reason",
            "warn",
            "later readers cannot decide whether the comment is still valid",
            "# hpcenv: allow RULE because ...",
        ),
    )
}


def finding(rule: str, origin: str, what: str, **more: Any) -> LintFinding:
    """Return a finding with the severity, reason and hint of its rule. `more` sets or replaces attributes."""
    known = RULES[rule]
    return LintFinding(
        **{
            "rule": rule,
            "severity": known.severity,
            "origin": origin,
            "what": what,
            "why": known.why,
            "advice": known.hint,
        }
        | more
    )


# -- secrets --------------------------------------------------------------------------------------------------------

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|SECRETS|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)(?:_|$)",
    re.IGNORECASE,
)
# Values that are the place of a secret, or that are no secrets.
_NO_SECRET = re.compile(r"|/[^\s]*|\$\{?\w+\}?|true|false|none|null|0|1|changeme|<.*>|\*+", re.IGNORECASE)
# Patterns that the issuers publish.
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
URL_WITH_PASSWORD = "a URL with a password"  # noqa: S105  (its name)
_URL_PASSWORD = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@'\"]*:(?!\$)[^/\s@'\"]+@", re.IGNORECASE)

# The ends of the paths of files that are made for secrets.
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
    """Return whether a variable seems to contain a secret: by its name, and if its value is no path or variable."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET.fullmatch(value.strip()) and not name.endswith("_FILE")


def secrets_in(text: str) -> tuple[str, ...]:
    """Return the kinds of secrets in a text, not the secrets themselves."""
    kinds = [kind for kind, pattern in _TOKENS.items() if pattern.search(text)]
    if _URL_PASSWORD.search(text):
        kinds.append(URL_WITH_PASSWORD)
    return tuple(kinds)


def secret_file(path: str) -> str | None:
    """Return which secret a file with this path contains; None if the file is not known to contain a secret."""
    return next((what for end, what in SECRET_FILES.items() if f"/{path.lstrip('/')}".endswith(f"/{end}")), None)


# -- packages with known trouble ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownTrouble:
    """A package with known trouble. The trouble exists only if the packages in `others` are installed too."""

    package: str
    when: SpecifierSet
    others: tuple[tuple[str, SpecifierSet], ...]
    why: str
    hint: str
    source: str


def parse_troubles(data: Mapping[str, Any], *, origin: str = "troubles.toml") -> tuple[KnownTrouble, ...]:
    """Return the packages with known trouble from the data of their TOML file.

    Raises:
        SpecError: the data has another form.
    """
    try:
        if data["schema"] != 1:
            raise SpecError(f"`{origin}` has schema {data['schema']!r}, this hpcenv reads schema 1")
        return tuple(
            KnownTrouble(
                package=canonicalize_name(row["package"]),
                when=SpecifierSet(row["when"], prereleases=True),
                others=tuple(
                    (canonicalize_name(name), SpecifierSet(when, prereleases=True))
                    for name, when in row.get("and", {}).items()
                ),
                why=str(row["why"]),
                hint=str(row["hint"]),
                source=f"{row['source']}, read {row['retrieved']}",
            )
            for row in data["trouble"]
        )
    except (KeyError, TypeError, AttributeError, InvalidSpecifier) as error:
        raise SpecError(
            f"`{origin}` is not a table of packages with known trouble", why=f"{type(error).__name__}: {error}"
        ) from error


def troubles_of(
    troubles: Iterable[KnownTrouble], versions: Mapping[str, str | None]
) -> Iterator[tuple[str, KnownTrouble]]:
    """Yield packages with known trouble.

    Args:
        troubles: the table.
        versions: canonical name -> version. If a recipe names no version, the version is None, and only trouble of all
            versions counts. `nvidia-nccl-cu12` counts as `nvidia-nccl`, too.
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


# -- comments that accept a finding ---------------------------------------------------------------------------------

ALLOW = re.compile(r"[ \t]*#[ \t]*hpcenv:\s*allow\s+([a-z][a-z-]*(?::[A-Z]+\d+)?)\s*(.*)")


def accept(one: LintFinding, lines: Sequence[str], places: Iterable[int]) -> LintFinding:
    """Return the finding, and add the reason from the first comment that accepts it.

    Args:
        lines: the recipe's lines.
        places: line numbers, counted from 1; a comment counts if it is directly above one of these lines.
    """
    for place in places:
        for line in reversed(lines[: place - 1]):
            if not line.lstrip().startswith("#"):
                break
            match = ALLOW.fullmatch(line)
            if match and match[1] == one.rule and match[2].strip():
                return replace(one, allowed=match[2].strip())
    return one


def sorted_findings(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Return a recipe's findings in the order of lines, each finding once."""
    unique = dict.fromkeys(findings)
    return tuple(sorted(unique, key=lambda one: (one.line or 0, SEVERITIES.index(one.severity), one.rule)))
