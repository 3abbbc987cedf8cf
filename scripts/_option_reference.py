"""What `scripts/reference-docs` writes from the table of options: typed classes and the reference page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hpcenv.project import native_options
from hpcenv.project.options import GROUPS, OPTIONS, WRITTEN, Option, in_place

# -- hpcenv/project/option_types.py -------------------------------------------------------

_TYPES_HEAD = '''"""Typed classes with one attribute for each row of options.py.

Written by `scripts/reference-docs`; do not edit. Runs on: LOGIN NODE.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict

from hpcenv.project.document import Document
from hpcenv.project.gone_options import GONE_KEYS
from hpcenv.project.option_values import Count, CountOrNone, Seconds, Size, Text, Time, Word

'''

_SITE_TYPES_HEAD = '''"""The table [submit] of a site profile: one attribute for each row of options.py with this place.

Written by `scripts/reference-docs`; do not edit. Runs on: LOGIN NODE. Most submissions have no site profile, so this
table is not in option_types.py.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcenv.project.document import Document
from hpcenv.project.gone_options import GONE_KEYS
from hpcenv.project.option_values import @names

'''

_VALUES = {
    "count": "int | None = None",
    "flag": "bool = False",
    "switch": "bool = True",
    "seconds": "int | None = None",
    "size": "int | None = None",
    "texts": "tuple[str, ...] = ()",
    "variables": "Mapping[str, str] = field(default_factory=dict)",
    "secrets": "Mapping[str, str] = field(default_factory=dict)",
    "native": "Mapping[str, str | None] = field(default_factory=dict)",
}
# The types of keys in option_values.py.
_KINDS = ("Count", "CountOrNone", "Seconds", "Size", "Text", "Time", "Word")
_KEYS = {
    "text": "Text | None = None",
    "word": "Word | None = None",
    "flag": "bool = False",
    "switch": "bool = True",
    "time": "Time | None = None",
    "seconds": "Seconds | None = None",
    "size": "Size | None = None",
    "texts": "tuple[str, ...] = ()",
}
_KEYWORDS = {
    "count": "int",
    "flag": "bool",
    "switch": "bool",
    "time": "str | int",
    "seconds": "str | int",
    "size": "str | int",
    "texts": "Sequence[str]",
    "variables": "Mapping[str, str]",
    "secrets": "Mapping[str, str]",
    "native": "Mapping[str, str | int | bool | None]",
}


def option_types() -> str:
    """Return the text of hpcenv/project/option_types.py."""
    classes = (
        _class("OptionValues", _OF_ALL, _value, OPTIONS),
        _class("WrittenOptions", _OF_SBATCH, _value, WRITTEN),
        _class("SubmitTable(Document)", "[submit] of hpcenv.toml: defaults for submissions.", _key, _keys("project")),
        _keywords(),
    )
    return _TYPES_HEAD + "\n".join(classes)


def site_option_types() -> str:
    """Return the text of hpcenv/project/site_option_types.py."""
    text = "[submit] of a site profile: defaults."
    written = _class("SiteSubmitTable(Document)", text, _key, _keys("site"))
    names = (name for name in _KINDS if f": {name} |" in written)
    return _SITE_TYPES_HEAD.replace("@names", ", ".join(names)) + written


_OF_ALL = "The values of all options, as hpcenv keeps them. A base class."
_OF_SBATCH = "The options whose values are written unchanged into `#SBATCH` lines. A base class."


def _keys(place: str) -> list[Option]:
    # Options of other programs have their own tables: [sbatch] and [srun].
    return [option for option in OPTIONS if place in option.places and option.kind != "native"]


def _class(head: str, text: str, line: Callable[[Option], str], rows: Iterable[Option]) -> str:
    lines = [f"    {option.name}: {line(option)}" for option in rows]
    is_document = head.endswith("(Document)")
    decorator = () if is_document else ("@dataclass(frozen=True, kw_only=True)",)
    if is_document:
        lines = ["    replaced: ClassVar[Mapping[str, str]] = GONE_KEYS", "", *lines]
    return "\n".join(("", *decorator, f"class {head}:", f'    """{text}"""', "", *lines, ""))


def _keywords() -> str:
    lines = [f"    {option.name}: {_keyword(option)}" for option in in_place("python")]
    text = '    """The keywords of `hpcenv.submit()` and `hpcenv.plan_job()`: the options of `hpcenv submit`."""'
    return "\n".join(("", "class SubmitKeywords(TypedDict, total=False):", text, "", *lines, ""))


def _value(option: Option) -> str:
    if option.kind == "choice":
        return f"{_literal(option)} | None = None"
    if option.default is not None:
        return f'str = "{option.default}"'
    return _VALUES.get(option.kind, "str | None = None")


def _key(option: Option) -> str:
    if option.kind == "choice":
        return f"{_literal(option)} | None = None"
    if option.kind == "count":
        return f"{'Count' if option.minimum else 'CountOrNone'} | None = None"
    return _KEYS[option.kind]


def _keyword(option: Option) -> str:
    return _literal(option) if option.kind == "choice" else _KEYWORDS.get(option.kind, "str")


def _literal(option: Option) -> str:
    return "Literal[" + ", ".join(f'"{choice}"' for choice in option.choices) + "]"


# -- docs/reference/options.md ------------------------------------------------------------

_PAGE_HEAD = """# Options of a submission

<!-- Written by `scripts/reference-docs`; do not edit. -->

hpcenv has one table with all options of `hpcenv submit`. The options of the command line, hpcenv.toml, site profiles
and the Python API are made from this table.

The first of these places that sets an option decides:

1. the command line of `hpcenv submit` or `hpcenv rerun`, or a keyword of `hpcenv.submit()`;
2. the table [submit] of hpcenv.toml;
3. a variable of sbatch in your environment, if the option has such a variable;
4. the table [submit] of the site profile.

If hpcenv refuses a value, the error names the place from which the value comes. In Python, `_` stands for `-`.

"Spelled" names the option of sbatch, srun or torchrun to which hpcenv passes the value. The sign `=` says that hpcenv
passes the value as you gave it; without this sign, hpcenv computes the value that it passes.
"""

_PASSED_ON = """
## Options of sbatch and srun that are passed on

`--sbatch NAME[=VALUE]` writes `#SBATCH --NAME=VALUE`; `--srun NAME[=VALUE]` adds the option to the `srun` that
starts the training, and not to the check before it. hpcenv.toml and site profiles have tables for the same options:

    [sbatch]
    mail-user = "alice@example.org"
    mail-type = "END"
    exclusive = true          # an option without a value

    [srun]
    cpu-bind = "none"

The order of the places above applies to each name separately. hpcenv refuses the options that it sets itself:

"""


def options_page() -> str:
    """Return the text of docs/reference/options.md."""
    return "".join((_PAGE_HEAD, *map(_group_section, GROUPS), _PASSED_ON, *_owned_rows()))


def _group_section(group: str) -> str:
    rows = [option for option in OPTIONS if option.group == group]
    head = "| Option | What it does | Set in | Spelled | Variable |\n|---|---|---|---|---|\n"
    return f"\n## {group}\n\n{head}" + "".join(map(_row, rows))


def _row(option: Option) -> str:
    name = f"`{option.flag}`" if "command" in option.places else f"`{option.key}`"
    cells = (name, option.help, _places(option), _spelled(option), f"`{option.environment}`" * bool(option.environment))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _places(option: Option) -> str:
    names = {"command": "command line", "python": "Python", "project": "hpcenv.toml", "site": "site profile"}
    return ", ".join(text for place, text in names.items() if place in option.places)


def _spelled(option: Option) -> str:
    programs = {"sbatch": option.sbatch, "srun": option.srun, "torchrun": option.torchrun}
    mark = "=" if option.written else ""
    return ", ".join(f"{program} `--{name}{mark}`" for program, name in programs.items() if name)


def _owned_rows() -> Iterator[str]:
    reasons = {program: native_options.owned(program) for program in ("sbatch", "srun")}
    yield "| Option | sbatch | srun |\n|---|---|---|\n"
    for name in sorted({name for owned in reasons.values() for name in owned}):
        yield f"| `{name}` | {reasons['sbatch'].get(name, '')} | {reasons['srun'].get(name, '')} |\n"
