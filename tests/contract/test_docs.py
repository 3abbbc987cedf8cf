"""README and docs say what the code does: their commands exist, their tables and programs are right, their links lead somewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import tomlkit
from blake3 import blake3

from hpcenv.cli._command_line import cli as hpcenv
from hpcenv.cli.image import VERBS
from hpcenv.image.content import tree
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert.layers import LayerLimits
from hpcenv.recipes import image_content, image_lint, recipe_lint

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
EXPLANATION = DOCS / "explanation" / "images.md"
HOW_TO = [DOCS / "how-to" / f"{page}.md" for page in ("images", "image-store", "make-images")]
LINT = DOCS / "reference" / "image-lint.md"


# -- commands -----------------------------------------------------------------------------


def command_lines(page: Path) -> Iterator[str]:
    """What a page tells its reader to type: inline, in blocks, and inside `$(...)`."""
    text = page.read_text(encoding="utf-8")
    # A block's fences would pair with inline backquotes.
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    for inline in re.findall(r"`(hpcenv [^`]+)`", blocks.sub("", text)):
        yield " ".join(inline.split())
    yield from re.findall(r"^(?:(?:alice|bob)?\$ | {4,})(?:/\S+/)?(hpcenv .*)$", text, re.MULTILINE)
    yield from re.findall(r"\$\((hpcenv [^)]+)\)", text)


def problem(line: str) -> str | None:
    """Say what of a command line hpcenv does not know."""
    words = shlex.split(re.sub(r"\$\([^)]*\)", "X", line), comments=True)[1:]
    found: click.Command = hpcenv
    while isinstance(found, click.Group):
        if not words or words[0].startswith("-"):
            break
        verb = words.pop(0)
        if verb in ("COMMAND", "VERB"):
            return None
        inner = found.get_command(click.Context(found), verb)
        if inner is None and found.name == "bundle":
            inner = found.get_command(click.Context(found), "make")  # `hpcenv bundle RUN`
        if inner is None:
            return f"no verb {verb!r}"
        found = inner
    known = {name for one in found.params for name in (*one.opts, *one.secondary_opts)} | {"--help", "-h", "--version"}
    for word in words:
        if word in ("--", "|", ">"):
            return None
        option = word.strip("[]").partition("=")[0]
        if re.match(r"--?[a-z]", option) and option not in known:
            return f"no option {option!r}"
    return None


def test_every_command_of_a_page_exists() -> None:
    assert [(page, line, said) for page in PAGES for line in command_lines(page) if (said := problem(line))] == []


def test_what_does_not_exist_is_noticed() -> None:
    assert problem("hpcenv image pull docker://h/n:1 --plain-http") is None
    assert problem("hpcenv image pul docker://h/n:1") == "no verb 'pul'"
    assert problem("hpcenv submit x.py --stags -- --lr 1") == "no option '--stags'"
    assert problem("hpcenv submit x.py --stage -- --stags") is None


def test_every_image_command_is_in_the_how_to() -> None:
    assert sum(len(list(command_lines(page))) for page in HOW_TO) > 20
    text = "".join(page.read_text() for page in HOW_TO)
    for verb in VERBS:
        assert f"image {verb}" in text, verb


# -- links --------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(page: Path, link: str) -> bool:
    place, _, anchor = link.partition("#")
    target = (page.parent / place) if place else page
    return "://" in link or (target.exists() and (not anchor or anchor in anchors(target)))


def test_every_link_of_a_page_leads_somewhere() -> None:
    links = [
        (page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert links
    assert [(page, link) for page, link in links if not leads_somewhere(page, link)] == []


# -- tables -------------------------------------------------------------------------------


def rows(page: Path, title: str) -> list[str]:
    """The rows of the first table below a title, without its head."""
    text = page.read_text(encoding="utf-8")
    below = text[text.index(f"\n## {title}\n") + 1 :]
    return re.findall(r"^\|.*\|$", below.split("\n## ")[0], re.MULTILINE)[2:]


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_every_lint_rule_has_its_row() -> None:
    looks = {"recipes": Path(recipe_lint.__file__).read_text(), "images": Path(image_content.__file__).read_text()}
    assert rows(LINT, "Rules") == [
        row(
            f"`{rule.id}`",
            rule.severity,
            ", ".join(kind for kind, source in looks.items() if f'"{rule.id}"' in source),
            rule.why,
            rule.hint,
        )
        for rule in image_lint.RULES.values()
    ]


def test_the_table_of_general_rules_names_rules_that_exist() -> None:
    table = "\n".join(rows(LINT, "General rules: hadolint or hpcenv"))
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", table))
    assert named
    assert named <= set(image_lint.RULES)


def test_every_package_with_trouble_has_its_row() -> None:
    known = image_lint.parse_troubles(tomlkit.parse(image_lint.PACKAGED_TROUBLES.read_text(encoding="utf-8")).unwrap())
    assert rows(LINT, "Packages with known trouble") == [
        row(
            f"`{one.package}`",
            (str(one.when) or "every version") + "".join(f", with `{name}{when}`" for name, when in one.others),
            one.why,
            one.hint,
            one.source,
        )
        for one in known
    ]


def test_every_limit_has_its_row() -> None:
    said = [re.match(r"\| `(\w+)` \| ([\d,]+) \|", line) for line in rows(EXPLANATION, "Hostile images")]
    assert [(one[1], int(one[2].replace(",", ""))) for one in said if one] == [
        (one.name, getattr(LayerLimits(), one.name)) for one in dataclasses.fields(LayerLimits)
    ]


# -- the tree digest ----------------------------------------------------------------------


def entry(full: bytes, path: bytes) -> TreeEntry:
    status = os.lstat(full)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return TreeEntry(path=path, kind="symlink", mode=mode, target=os.readlink(full))
    if stat.S_ISDIR(status.st_mode):
        return TreeEntry(path=path, kind="directory", mode=mode)
    if stat.S_ISFIFO(status.st_mode):
        return TreeEntry(path=path, kind="fifo", mode=mode)
    content = Path(os.fsdecode(full)).read_bytes()
    return TreeEntry(path=path, kind="file", mode=mode, size=len(content), blake3=blake3(content).hexdigest())


def make_image(root: Path) -> None:
    """An unpacked image with all that the digest treats in its own way."""
    for folder in ("etc", "usr/bin", ".singularity.d/env", "tmp", "a.b", "a"):
        (root / folder).mkdir(parents=True)
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    (root / ".singularity.d" / "env" / "x.sh").write_text("x")
    (root / "environment").symlink_to(".singularity.d/env/90-environment.sh")
    (root / "usr" / "bin" / "tool").write_bytes(b"\x7fELF" * 1000)
    (root / "usr" / "bin" / "tool").chmod(0o4755)
    (root / "tmp").chmod(0o1777)
    (root / "a" / "z").write_text("z")
    (root / "a" / "link").symlink_to("/etc/../b\nc")
    os.mkfifo(root / "a.b" / "pipe", 0o640)
    Path(os.fsdecode(os.fsencode(root) + b"/a/caf\xe9\n")).write_text("bytes")


@pytest.mark.parametrize("var", ["none", "directory", "link"])
def test_the_program_of_the_page_gives_the_tree_digest(tmp_path: Path, var: str) -> None:
    root = tmp_path / "image"
    root.mkdir(mode=0o555)
    root.chmod(0o755)
    make_image(root)
    if var == "directory":
        (root / "var").mkdir(0o700)
    if var == "link":
        (root / "var").symlink_to("usr")
    program = re.search(r"^```python\n(.*?)^```", EXPLANATION.read_text(), re.MULTILINE | re.DOTALL)
    assert program is not None
    done = subprocess.run([sys.executable, "-", root], input=program[1], text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

    top = os.fsencode(root)
    paths = [os.path.join(where, name) for where, folders, files in os.walk(top) for name in folders + files]
    entries = [entry(top, b""), *(entry(path, os.path.relpath(path, top)) for path in paths)]
    assert done.stdout.strip() == tree.tree_digest(sorted(entries, key=lambda one: one.path))


def test_each_decision_has_its_number() -> None:
    """Two branches take the same number easily; the heading says it too."""
    found = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = [int(path.name[:4]) for path in found]
    assert len(set(numbers)) == len(numbers), [path.name for path in found if numbers.count(int(path.name[:4])) > 1]
    for path, number in zip(found, numbers, strict=True):
        heading = path.read_text(encoding="utf-8").partition("\n")[0]
        assert re.match(rf"# 0*{number}[.:] ", heading), heading
