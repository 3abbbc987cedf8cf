"""Find names of files, lines of text and arguments of a script that look like credentials. Pure.

Runs on: LOGIN NODE. For the files that git does not track and does not ignore, this module decides which ones are not
copied, because other people may read the copies. This module guesses by names and by the form of values. So it can miss
a credential, and it can take a harmless value for a credential.

hpcenv/records/variables.py has the list of names that are usual for credentials.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Sequence

from hpcenv.records.manifest import Manifest
from hpcenv.records.variables import looks_like_credential, names_credential

# Names of files that usually have credentials, in lower case. Python cannot import these files.
_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pypirc", ".npmrc", ".pgpass", ".my.cnf", ".boto"),
    *(".s3cfg", ".git-credentials", ".dockercfg", ".htpasswd", ".vault-token", "kubeconfig", "kaggle.json"),
    *("id_rsa*", "id_dsa*", "id_ed25519*", "id_ecdsa*", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.kdbx"),
    *("*.jks", "*.keystore", "*.tfvars", "*.secret", "*.secrets", "*.token"),
    *("secret", "secrets", "secret.*", "secrets.*", "*[_-]secret", "*[_-]secrets", "*[_-]secret.*", "*[_-]secrets.*"),
    *("*credential", "*credentials", "*credential.*", "*credentials.*", "passwd", "password", "passwords"),
    *("password.*", "passwords.*", "*[_-]password.*", "token", "token.txt", "*[_-]token", "*[_-]token.txt"),
    *("apikey*", "api[_-]key*", "service*account*.json"),
)
# Folders that usually have credentials. For example, the name `config` in `.aws/config` does not show this, but the
# name of the folder does.
_FOLDERS = (".aws", ".ssh", ".gnupg", ".kube", ".docker", ".azure", ".gcloud", "secrets", ".secrets")

# An HTTP header with a token. Headers with a placeholder do not match.
_BEARER = (
    r"(?i:authorization)[\"']?\]?[ \t]*[:=,][ \t]*[rbfu]?[\"']?[Bb]earer "
    r"(?![A-Z_]+\b|(?i:your|my|token|auth|xxx))[\w.~+/-]{8,}"
)
# Each entry has a text and the pattern of a token. All matches of the pattern contain the text. The patterns are from
# config/gitleaks.toml of gitleaks at b58d3f1 (2026-07-22); some patterns are less strict here.
_FORMS = tuple(
    (part, re.compile(form))
    for part, form in (
        ("PRIVATE KEY", r"-----BEGIN[ A-Z0-9]{0,40}PRIVATE KEY"),
        ("hf_", r"(?<!\w)hf_[A-Za-z0-9]{30,}"),
        ("gh", r"(?<!\w)gh[pousr]_[A-Za-z0-9]{36}"),
        ("github_pat_", r"(?<!\w)github_pat_\w{40}"),
        ("glpat-", r"(?<!\w)glpat-[\w-]{20}"),
        ("npm_", r"(?<!\w)npm_[A-Za-z0-9]{36}"),
        ("pypi-AgEI", r"pypi-AgEI[\w-]{50}"),
        ("sk-", r"(?<!\w)sk-(?:proj-|ant-|svcacct-|admin-)?(?=\w*[0-9])[\w-]{32,}"),
        ("k_", r"(?<!\w)[sr]k_(?:test|live|prod)_\w{10}"),
        ("xox", r"(?<!\w)xox[abeoprs]-[\w-]{10}"),
        ("A", r"(?<!\w)(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}(?!\w)"),
        ("AIza", r"(?<!\w)AIza[\w-]{35}"),
        ("eyJ", r"(?<!\w)eyJ[A-Za-z0-9]{16,}\.ey[\w/-]{17,}\.[\w/-]{10,}"),
        ("earer ", _BEARER),
        # A URL with a user and a password before the host.
        ("://", r"://[^\s/:@'\"{}$<>]+:(?!(?:pass|password|pwd|token)@)[^\s/:@'\"{}$<>*]{3,}@[\w.-]+"),
    )
)

# If the name is only a word like `token` or `key`, the value counts only if it looks random.
_WEAK_NAME = re.compile(r"(?:.*[^a-z])?(?:tokens?|keys?|auth)", re.IGNORECASE)
_RANDOM = re.compile(r"(?=[A-Za-z+/]*[0-9])(?=[0-9+/]*[A-Za-z])[A-Za-z0-9+/]{20,}={0,2}")

# The end of a credential's name, and the sign between name and value, in lower-case text: NAME = VALUE or NAME: VALUE.
# NAME may be in quotes.
_ENDS = re.compile(
    r"((?:token|key|secret|password|passwd|passphrase|pass|pwd|cred|credential|auth)s?)[\"']?\]?[ \t]*"
    r"(?::[ \t]*(?:str|final(?:\[str\])?)[ \t]*=|:=|=|:)[ \t]*"
)
_WHOLE_NAME = re.compile(r"[A-Za-z][\w.-]*\Z")
_LONGEST_NAME = 80
_QUOTED = re.compile(r"""[rbfuRBFU]?(["'])(?P<value>[^"'\n]{4,400})\1""")
_BARE = re.compile(r"""(?P<value>[^\s"'][^\s,}\]]{2,400})""")
# The text that must follow a value without quotes. If more words follow, the line is a sentence.
_BEHIND_BARE = re.compile(r"[ \t]*(?:[#,}\]\n]|\Z)")
_SHORTEST = 4
# Placeholders are no credentials: `<TOKEN>`, `${HF_TOKEN}`, `xxxx`, `os.environ[...]`, `env:NAME`, a path,
# a word such as `password`, a sentence, or the name of a variable.
_PLACEHOLDER = re.compile(
    r"[<\[({$%*/~]|x{3,}|\.{3}|(?:none|null|nil|true|false|yes|no|todo|dummy|redacted|example)\b|change[_-]?me|"
    r"your[_ -]|my[_ -]|insert|replace|enter|os\.|getenv|environ|env[:.]|file:|secret:|vault:|config\.|args\.|self\.|"
    r"(?:pass|password|passwd|secret|token|credential)s?\W*$|(?:\S+ ){3}",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
# In a Python file, only texts in quotes are values.
_MODULES = (".py", ".pyi", ".ipynb")


def is_named_like_one(path: str) -> bool:
    """Return whether the name of a file, or of a folder above the file, is usual for credentials."""
    *folders, name = path.lower().split("/")
    return any(folder in _FOLDERS for folder in folders) or any(fnmatch.fnmatchcase(name, one) for one in _FILES)


def line_of(path: str, content: bytes) -> int:
    """Return the number of the first line that looks like a credential; 0 if there is no such line.

    Args:
        path: the path of the file.
        content: the content of the file; binary content has no lines.
    """
    if b"\0" in content[:8000]:
        return 0
    text = content.decode("utf-8", "replace")
    places = [found.start() for part, form in _FORMS if part in text and (found := form.search(text)) is not None]
    places += itertools.islice(_pairs(text, bare=not path.endswith(_MODULES)), 1)
    return text.count("\n", 0, min(places)) + 1 if places else 0


def _pairs(text: str, *, bare: bool) -> Iterator[int]:
    """Yield the position of each name with a value that looks like a credential.

    Args:
        bare: whether values without quotes count, too.
    """
    lower = text.lower()
    # A few characters become two characters in lower case. If the text has such a character, the positions would
    # differ.
    for end in _ENDS.finditer(lower if len(lower) == len(text) else text):
        value = _QUOTED.match(text, end.end())
        if value is None and bare:
            value = _BARE.match(text, end.end())
            value = None if value is None or _BEHIND_BARE.match(text, value.end()) is None else value
        name = _WHOLE_NAME.search(text[max(0, end.end(1) - _LONGEST_NAME) : end.end(1)])
        if value is not None and name is not None and is_pair(name[0], value["value"]):
            yield end.start()


def is_pair(name: str, value: str) -> bool:
    """Return whether a name and its value look like a credential. A placeholder is not a credential."""
    value = value.strip().rstrip(",;").strip("\"'")
    if (
        len(value) < _SHORTEST
        or "***" in value
        or _PLACEHOLDER.match(value) is not None
        or _VARIABLE.fullmatch(value) is not None
    ):
        return False
    return names_credential(name) or (_WEAK_NAME.fullmatch(name) is not None and _RANDOM.fullmatch(value) is not None)


def arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a script's arguments that look like credentials, never their values.

    The function finds `--hf-token VALUE`, `--hf-token=VALUE`, `hf_token=VALUE`, and a word that has the form of a
    token.
    """
    found = []
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        following = words[number + 1] if number + 1 < len(words) else ""
        given = value if equals else following if word.startswith("-") and not following.startswith("-") else ""
        if given and is_pair(name.lstrip("-+"), given):
            found.append(name)
        elif not any(form.search(word) for _, form in _FORMS):
            continue
        elif not equals and number and words[number - 1].startswith("-") and "=" not in words[number - 1]:
            found.append(words[number - 1])
        else:
            found.append(name if equals else f"argument {number + 1}")
    return tuple(dict.fromkeys(found))


def notes_on(manifest: Manifest) -> tuple[str, ...]:
    """Return notes about variables and arguments that look like credentials. The manifest has their values."""
    notes = []
    names = [setting.name for setting in manifest.settings if looks_like_credential(setting.name)]
    if names:
        what = f"{', '.join(names)}: records have the name only, because it looks like the name of a credential"
        notes.append(f"{what}; manifest.json has the value. To keep it out of there: --secret {names[0]}=file:PATH")
    words = arguments(manifest.args)
    if words:
        what = f"{', '.join(words)}: an argument that looks like a credential; the records and a bundle have its value"
        notes.append(f"{what}. To keep it out of them: --secret NAME=file:PATH, which the script reads as a variable")
    return tuple(notes)
