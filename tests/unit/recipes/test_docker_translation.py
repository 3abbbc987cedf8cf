"""A Dockerfile as a definition file: the same order, the same files, the same settings, or the line that cannot be."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpcenv.errors import SpecError
from hpcenv.image.convert import definition
from hpcenv.recipes import dockerfile
from hpcenv.recipes.build_context import BuildContext
from hpcenv.recipes.docker_translation import BaseSettings, translate

BASE = BaseSettings(
    environment={"PATH": "/usr/bin:/bin", "KIND": "base"}, entrypoint=("entry",), command=("base-command",)
)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in ("app.py", "a.txt", "b.txt", "src/one.py", "src/data/two.csv", "src/data/big.bin", "my file"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "src" / "link").symlink_to("one.py")
    return tmp_path


def translated(text: str, folder: Path, *, ignore: str = "", base: BaseSettings = BASE, **more: object):
    parsed = dockerfile.parse(text, arguments=more.get("arguments"))  # type: ignore[arg-type]
    return translate(parsed, BuildContext(folder, ignore), lambda _: base, origin="Dockerfile", **more)  # type: ignore[arg-type]


def sections(text: str, stage: int = -1) -> dict[str, str]:
    found = definition.parse(text).stages[stage]
    return {f"{one.name} {one.arguments}".strip(): one.text for one in found.sections}


def run_post(text: str, root: Path, context: Path) -> Path:
    """What %files and %post do, in a folder in place of `/`: only for commands that name no other absolute path."""
    found = sections(text)
    staged = root / ".hpcenv-copy"
    for line in found.get("files", "").splitlines():
        if line.strip():
            source, target = line.split()
            place = root / target.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-fLr", source, place], cwd=context, check=True)
    script = re.sub(r"(?<![\w.$\"/}])/(?=(\.hpcenv-copy|srv|image)\b)", f"{root}/", found["post"])
    subprocess.run(["sh", "-e", "-c", script], check=True, env={"PATH": os.environ["PATH"]})
    assert not staged.exists()
    return root


def test_files_and_commands_keep_their_order(context: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = """
FROM base:1
WORKDIR /srv/app
COPY a.txt ./
RUN mv a.txt first && test ! -e b.txt
COPY *.txt src/ new/
COPY app.py /srv/renamed
COPY app.py new
RUN ls > listing
"""
    made = translated(text, context, ignore="src/data/big.bin\n")
    root = run_post(made.text, tmp_path_factory.mktemp("root"), context)
    app = root / "srv" / "app"
    assert sorted(path.name for path in app.iterdir()) == ["first", "listing", "new"]
    assert sorted(str(path.relative_to(app / "new")) for path in (app / "new").rglob("*")) == [
        "a.txt",
        "app.py",
        "b.txt",
        "data",
        "data/two.csv",
        "link",
        "one.py",
    ]
    assert os.readlink(app / "new" / "link") == "one.py"
    assert (root / "srv" / "renamed").read_text() == "app.py"
    assert (app / "listing").read_text().split() == ["first", "listing", "new"]


def test_settings_become_those_of_the_sif(context: Path) -> None:
    text = """
FROM base:1
ARG NAME=x
ENV A="say $NAME" PATH=/opt/bin:$PATH
LABEL one="two words"
RUN echo $A
CMD ["run", "it's"]
"""
    found = sections(translated(text, context, arguments={"NAME": "y"}).text)
    assert "export A='say y'" in found["environment"]
    assert "export PATH=/opt/bin:/usr/bin:/bin" in found["environment"]
    assert "NAME" not in found["environment"]
    assert "one two words" in found["labels"]
    assert "export KIND=base" in found["post"]
    assert """set -- run 'it'"'"'s'; fi""" in found["runscript"]
    assert 'exec entry "$@"' in found["runscript"]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("", None),
        ('ENTRYPOINT ["a", "b"]', ['exec a b "$@"']),
        ("CMD run this", ["if [ $# -eq 0 ]; then set -- /bin/sh -c 'run this'; fi", 'exec entry "$@"']),
        ('CMD ["c"]\nENTRYPOINT ["a"]', ["if [ $# -eq 0 ]; then set -- c; fi", 'exec a "$@"']),
        ('SHELL ["bash", "-c"]\nENTRYPOINT go on', ["exec bash -c 'go on' \"$@\""]),
    ],
)
def test_what_the_sif_runs(lines: str, wanted: list[str] | None, context: Path) -> None:
    found = sections(translated(f"FROM base:1\n{lines}\n", context).text).get("runscript")
    assert (found.split("\n    ") if found else None) == (None if wanted is None else _indented(wanted))


def _indented(lines: list[str]) -> list[str]:
    return ("    " + "\n    ".join(lines) + "\n").split("\n    ")


def test_only_the_stages_that_the_result_needs_are_built(context: Path) -> None:
    text = """
ARG VERSION=1
FROM base:${VERSION} AS build
RUN make
FROM build AS test
RUN false
FROM other:1@sha256:0 AS last
COPY --from=build /out/app /usr/bin/
COPY --from=tools.example/t:2 /t /t
FROM build AS next
RUN echo next
"""
    made = translated(text, context, target="last", arguments={"VERSION": "7"})
    stages = definition.parse(made.text).stages
    assert [stage.header("from") for stage in stages] == ["base:7", "tools.example/t:2", "other:1@sha256:0"]
    assert "false" not in made.text
    assert "files from stage-0" in sections(made.text)
    inherited = sections(translated(text, context).text)
    assert inherited["post"].index("make") < inherited["post"].index("echo next")


CANNOT = {
    "RUN --mount=type=secret,id=x cat /run/secrets/x": "--bind",
    "RUN --mount=type=bind,target=/x true": "no counterpart",
    "RUN --network=none true": "no counterpart",
    "RUN <<EOF\ntrue\n%post\nEOF": "reads as its own",
    "RUN echo '{{ NAME }}'": "reads as its own",
    "RUN <<EOF\n#!/usr/bin/python3\nprint()\nEOF": "interpreter",
    "ADD https://example.org/x /x": "downloads",
    "COPY nosuch /x": "not in the context",
    "COPY ../x /x": "outside of the context",
    "COPY *\\ file /x": "characters",
    "COPY --from=base /a* /x": "one plain path",
    "COPY --parents a.txt /x": "--parents",
    "COPY <<EOF /x\n$HOME\nEOF": "quote its name",
    "ENV A='$HOME'": "not to be filled in",
    "LABEL a=b\\\n\nFROM base:1\nNEWS x": "does not know",
}


@pytest.mark.parametrize("line", CANNOT)
def test_a_line_that_cannot_be_translated_is_named(line: str, context: Path) -> None:
    with pytest.raises(SpecError) as caught:
        translated(f"FROM base:1\nRUN true\n{line}\n", context)
    assert re.search(r"^line [3-7]: .*" + re.escape(CANNOT[line]), caught.value.why, re.M), caught.value.why
    assert "buildah" in str(caught.value.hint)


def test_an_entry_point_that_apptainer_would_read_is_named(context: Path) -> None:
    with pytest.raises(SpecError) as caught:
        translated('FROM base:1\nRUN true\nCMD ["x", "a\\n%post"]\n', context)
    assert caught.value.why.startswith("line 1: ENTRYPOINT or CMD")


def test_all_such_lines_are_named_at_once(context: Path) -> None:
    with pytest.raises(SpecError) as caught:
        translated("FROM base:1\nADD http://a/b /b\nRUN true\nCOPY nosuch /x\n", context)
    assert [line.partition(":")[0] for line in caught.value.why.splitlines()] == ["line 2", "line 4"]


@pytest.mark.parametrize(
    ("text", "base", "says"),
    [
        ("FROM $NAME\n", BASE, "--build-arg"),
        ("FROM base:1\n", BaseSettings(triggers=("RUN x",)), "ONBUILD"),
        ("FROM --platform=linux/arm64 base:1\n", BASE, "linux/amd64"),
    ],
)
def test_a_base_that_cannot_be_used_is_named(text: str, base: BaseSettings, says: str, context: Path) -> None:
    with pytest.raises(SpecError) as caught:
        translated(text, context, base=base)
    assert says in caught.value.why


def test_commands_after_user_have_its_home(context: Path) -> None:
    made = translated("FROM base:1\nUSER alice:staff\nRUN pip install --user x\n", context)
    post = sections(made.text)["post"]
    assert "getent passwd alice |" in post
    assert post.rstrip().endswith("rm -rf /.hpcenv-copy")
    assert "chmod -R a+rX" in post
    assert any("USER" in note for note in made.notes)


# -- the context ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ("", ["a.txt", "app.py", "b.txt", "my file", "src"]),
        ("*.txt\n", ["app.py", "my file", "src"]),
        ("src\n!src/data\n", ["a.txt", "app.py", "b.txt", "my file", "src/data"]),
        ("**/*.py\n# no comment\n", ["a.txt", "b.txt", "my file", "src/data"]),
        ("*\n!app.py\n", ["app.py"]),
        ("src/**/*.bin", ["a.txt", "app.py", "b.txt", "my file", "src/data/two.csv", "src/one.py"]),
    ],
)
def test_dockerignore_leaves_out_what_docker_leaves_out(ignore: str, left: list[str], context: Path) -> None:
    (context / "src" / "link").unlink()
    (found,) = BuildContext(context, ignore).find(".")
    assert [entry.path for entry in found.entries] == left


def test_a_link_out_of_the_context_is_not_followed(context: Path) -> None:
    (context / "out").symlink_to("/etc")
    with pytest.raises(ValueError, match="leads out"):
        BuildContext(context).find("out/passwd")
    with pytest.raises(ValueError, match="leads out"):
        BuildContext(context).find("out")
