"""Whether a record contains a variable with its value, or only the name of the variable.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

If the name of a variable looks like the name of a credential, only the name is recorded. So the value is in no
lockfile, log, verdict, report or script. There is one exception: a value that the user gives with --env or [env] is in
the run's manifest, because the nodes need it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# This text replaces the value in every record.
WITHHELD = "(value not recorded)"

# In a setting that extends a variable (`Setting.expands`), this text means the variable's earlier value.
OLD_VALUE = "${value}"

# The words before `key` and `token` in the name of a credential. In a training, the bare words `key` and `token` mean
# something else.
_OF_KEY = r"api|access|account|auth|client|consumer|deploy|encryption|private|secret|service|signing|ssh|storage|wandb"
_PROVIDERS = (
    r"access|api|auth|bearer|bot|ci|clearml|comet|deploy|gh|git|github|gitlab|hf|hub|hugging_?face|id|job|jwt|mlflow|"
    r"neptune|npm|oauth|personal|private|pypi|refresh|registry|sas|secret|session|slack|user|vault|wandb"
)
# In a training, `pass` after these words is a pass over data or through the model.
_PASSES = (
    r"all|backward|bwd|every|extra|final|first|forward|fwd|high|last|low|max|min|multi|n|nr|num|of|one|per|second|single|"
    r"two"
)
# The last word of a name decides: `hf_token` and `--db-password`, not `password_length`.
_NAME = re.compile(
    rf"(?!(?:.*[^a-z])?(?:{_PASSES})[_-]pass\Z)"
    rf"(?:.*[^a-z])?(?:(?:{_OF_KEY})[_-]?keys?|(?:{_PROVIDERS})[_-]?tokens?|secrets?|passwords?|passwd|passphrase|pass|pwd|"
    r"credentials?|creds)",
    re.IGNORECASE,
)
# `secretKey` is read as `secret_Key`.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# In the name of a variable, each part counts. But TOKENIZERS_PARALLELISM is a setting of Hugging Face's tokenizers and
# not a token, and PWD is a folder.
_IN_VARIABLE = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_FOLDER = "PWD"

# `http_proxy=http://user:password@proxy:3128`
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")

# In a URL of http, a user name without a password can be a token. In `ssh://git@host`, it is not a token.
_PASSWORD = re.compile(r"(?<=http://)[^/@\s]+@|(?<=https://)[^/@\s]+@|(?<=://)[^/@:\s]*:[^/@\s]+@")

# Variables of the libraries with which ranks communicate. If the user sets such a variable, this value is used in place
# of the value that hpcenv detected.
_TUNING = re.compile(r"((NCCL|GLOO|TORCH_NCCL|TORCH_FR|UCX|FI)_[A-Z0-9_]+|OMP_NUM_THREADS)\Z")


def names_credential(name: str) -> bool:
    """Return whether the name of an option, or of a key in a file, says that its value is a credential.

    The words are chosen for projects that train models: `pad_token`, `max_tokens`, `key_dim` and `tokenizer` are not
    credentials. The keyword detector of detect-secrets 1.5.0 suspects all four names, so hpcenv does not use this
    detector.
    """
    return _NAME.fullmatch(_CAMEL.sub("_", name)) is not None


def looks_like_credential(name: str) -> bool:
    """Return whether the name of a variable looks like the name of a credential.

    This test finds more names than the test for options, because an environment variable is rarely a setting of the
    model, and a record without its value is still useful.
    """
    return name != _FOLDER and (_IN_VARIABLE.search(name) is not None or names_credential(name))


def recorded_value(name: str, value: str) -> str:
    """Return the value of a variable as a record may contain it, without credentials."""
    return WITHHELD if looks_like_credential(name) else _IN_URL.sub("***@", value)


def without_credential(value: str) -> str:
    """Return the value of a variable without the name and password in a URL, for example of a proxy."""
    return _PASSWORD.sub("", value)


def recorded_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line without the values of credentials that --env gives."""
    shown: list[str] = []
    for word in words:
        flag, pair = ("", word) if shown and shown[-1] == "--env" else ("--env=", word.removeprefix("--env="))
        is_pair = "=" in pair and (not flag or pair != word)
        name, _, value = pair.partition("=")
        shown.append(f"{flag}{name}={recorded_value(name, value)}" if is_pair else word)
    return tuple(shown)


def is_tuning(name: str) -> bool:
    """Return whether a variable tunes the communication of the ranks."""
    return _TUNING.match(name) is not None


def is_left_alone(name: str) -> bool:
    """Return whether an empty value of this variable forbids that a rule or a file of the host sets the variable."""
    return name.startswith(("NCCL_", "FI_", "GLOO_"))
