"""The kinds of values of options. The functions here check a value and return it in the form that hpcenv uses.

Runs on: LOGIN NODE. Pure. hpcenv checks each value once by one of these rules, when it receives the value from the
command line, from hpcenv.toml, from a site profile, from a variable or from Python.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import AfterValidator

from hpcenv.project import duration, native_options
from hpcenv.project.options import Option

OptionValue = str | int | bool | tuple[str, ...] | Mapping[str, str] | Mapping[str, str | None] | None

# The source of a secret on the nodes; the value itself is never written to a record.
SECRET_SOURCE = re.compile(r"file:[^\0\n]+|env:[A-Za-z_][A-Za-z0-9_]*")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


# -- rules --------------------------------------------------------------------------------


def one_word(value: str) -> str:
    """Return a value for an `#SBATCH` line.

    A newline in the value would start a new directive, and sbatch reads blanks and quotes in its own way.
    """
    if not re.fullmatch(r"[^\s\"'\\]+", value):
        raise ValueError("must be one word without blanks, quotes or backslashes")
    return value


def positive(value: int) -> int:
    """Return a whole number that is at least 1."""
    if value < 1:
        raise ValueError("must be at least 1")
    return not_negative(value)


def not_negative(value: int) -> int:
    """Return a whole number that is not negative and less than 2^32, as Slurm's counts and torch's seeds must be."""
    if value < 0:
        raise ValueError("must not be negative")
    if value >= 1 << 32:
        raise ValueError("must be less than 2^32")
    return value


def text(value: str) -> str:
    """Return a text that is not empty."""
    if not value:
        raise ValueError("must not be empty")
    if "\0" in value:
        raise ValueError("must not hold a NUL byte")
    return value


def time_limit(value: str | int) -> str:
    """Return a time limit as sbatch reads it; a plain number is minutes."""
    return duration.slurm_time(str(value))


def seconds(value: str | int) -> int:
    """Return a length of time in seconds; a plain number is seconds."""
    return duration.parse(str(not_negative(value) if isinstance(value, int) else value), number="seconds")


def size(value: str | int) -> int:
    """Return a size in bytes. `200G` is 200 * 10**9, as on the label of a disk and in the output of `df -H`."""
    match = re.fullmatch(r"([0-9]{1,18})([kMGT]?)B?", str(value))
    if match is None:
        raise ValueError("is not a size, for example 200G")
    return int(match[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[match[2]]


def step_range(value: str) -> str:
    """Return a range of optimizer steps, `A:B`, both ends included; the first step is 1."""
    match = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text(value))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("is not a range of optimizer steps; 1:1 is the first step, 5:6 are the fifth and the sixth")
    return f"{int(match[1])}:{int(match[2])}"


def first_and_last(steps: str) -> tuple[int, int]:
    """Return the first and the last step of a range that `step_range` has returned."""
    first, _, last = steps.partition(":")
    return int(first), int(last)


def memory(value: str) -> str:
    """Return the memory of a GPU in whole gigabytes, always in the form `40 GB`."""
    whole, rest = divmod(size(text(value).replace(" ", "")), 10**9)
    if rest or not whole:
        raise ValueError("must be whole gigabytes, for example 40 GB")
    return f"{whole} GB"


def variables(value: Mapping[str, str]) -> Mapping[str, str]:
    """Return variables whose names and values a process can have."""
    for name, content in value.items():
        if not _VARIABLE.match(name):
            raise ValueError(f"{name!r} is not a variable name")
        if "\0" in content:
            raise ValueError(f"the value of {name} holds a NUL byte")
    return value


def secrets(value: Mapping[str, str]) -> Mapping[str, str]:
    """Return secrets with sources that nodes can read. An error does not show a wrong source: it may be the secret."""
    for name, source in variables(value).items():
        if not SECRET_SOURCE.fullmatch(source):
            raise ValueError(f"the source of {name} must be `file:PATH` or `env:NAME`, never the value itself")
    return value


# -- types of the keys in TOML tables -----------------------------------------------------


def _sbatch_table(value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    native_options.parse("sbatch", value)
    return value


def _srun_table(value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    native_options.parse("srun", value)
    return value


Text = Annotated[str, AfterValidator(text)]
Word = Annotated[str, AfterValidator(one_word)]
Count = Annotated[int, AfterValidator(positive)]
CountOrNone = Annotated[int, AfterValidator(not_negative)]
Time = Annotated[str, AfterValidator(time_limit)]
Seconds = Annotated[int | str, AfterValidator(seconds)]
Size = Annotated[int | str, AfterValidator(size)]
SbatchTable = Annotated[dict[str, str | int | bool], AfterValidator(_sbatch_table)]
SrunTable = Annotated[dict[str, str | int | bool], AfterValidator(_srun_table)]


# -- values from elsewhere ----------------------------------------------------------------


def parse(option: Option, value: object) -> OptionValue:
    """Return the value of an option in the form that hpcenv keeps.

    Args:
        option: the option's row in the table.
        value: the value as the command line, a variable or a Python program gives it, or in its final form.

    Raises:
        ValueError: the value is not valid. The message says why.
    """
    if value is None or value == option.absent:
        return option.absent  # type: ignore[return-value]
    return _PARSERS[option.kind](option, value)


def _text(_option: Option, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _word(option: Option, value: object) -> str:
    return one_word(_text(option, value))


def _count(option: Option, value: object) -> int:
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("must be a whole number")
    return not_negative(value) if option.minimum == 0 else positive(value)


def _flag(_option: Option, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _choice(option: Option, value: object) -> str:
    if value not in option.choices:
        raise ValueError(f"must be {' or '.join(option.choices)}")
    return str(value)


def _text_or_number(value: object) -> str | int:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError("must be a text or a whole number")
    return value


def _texts(_option: Option, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list of texts, for example {shlex.split(str(value))!r}")
    return tuple(str(item) for item in value)


def _variables(_option: Option, value: object) -> dict[str, str]:
    return dict(variables(_pairs(value)))


def _secrets(_option: Option, value: object) -> dict[str, str]:
    return dict(secrets(_pairs(value)))


def _pairs(value: object) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(name): str(content) for name, content in value.items()}
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError("must be a table of NAME = VALUE")
    found: dict[str, str] = {}
    for pair in value:
        name, equals, content = str(pair).partition("=")
        if not equals:
            raise ValueError(f"`{name}` has no value: use {name}=VALUE")
        if name in found:
            raise ValueError(f"`{name}` is given twice")
        found[name] = content
    return found


_PARSERS: dict[str, Callable[[Option, object], OptionValue]] = {
    "text": _text,
    "word": _word,
    "count": _count,
    "flag": _flag,
    "switch": _flag,
    "choice": _choice,
    "time": lambda _option, value: time_limit(_text_or_number(value)),
    "seconds": lambda _option, value: seconds(_text_or_number(value)),
    "size": lambda _option, value: size(_text_or_number(value)),
    "steps": lambda option, value: step_range(_text(option, value)),
    "texts": _texts,
    "variables": _variables,
    "secrets": _secrets,
    "native": lambda option, value: native_options.parse(option.name, value),
}


def argv_of(option: Option, value: OptionValue) -> list[str]:
    """Return how a value is written on the command line; empty if the option is not given."""
    if value is None or value == option.absent:
        return []
    if option.kind == "flag":
        return [option.flag]
    if option.kind == "switch":
        return [f"--no-{option.key}"]
    if isinstance(value, tuple):
        return [part for item in value for part in (option.flag, item)]
    if isinstance(value, Mapping):
        items = (name if content is None else f"{name}={content}" for name, content in value.items())
        return [part for item in items for part in (option.flag, item)]
    return [option.flag, str(value)]
