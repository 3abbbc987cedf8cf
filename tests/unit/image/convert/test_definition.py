"""Definition files: what they begin with, and the same with digests."""

import pytest

from hpcenv.errors import HpcenvError, SpecError
from hpcenv.image.convert.definition import copies, parse, pin, sources

DIGEST = "sha256:" + "1" * 64


def kinds(text):
    return [(s.bootstrap, s.origin, s.kind, s.fixed, s.line) for s in sources(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bootstrap: docker\nFrom: a:1", ("docker", "a:1", "registry", False, 2)),
        (f"Bootstrap: docker\nFrom: a@{DIGEST}", ("docker", f"a@{DIGEST}", "registry", True, 2)),
        ("\n# x\nBOOTSTRAP : Docker # y\nStage: b\nfrom:  a/b:1  # z", ("docker", "a/b:1", "registry", False, 5)),
        ("Bootstrap: docker\nRegistry: r:5000\nNamespace: n/\nFrom: a", ("docker", "r:5000/n/a", "registry", False, 4)),
        ("Bootstrap: docker\nFrom: //a", ("docker", "a", "registry", False, 2)),
        (f"Bootstrap: oci\nFrom: d@{DIGEST}", ("oci", f"d@{DIGEST}", "layout", True, 2)),
        ("Bootstrap: oci\nFrom: d", ("oci", "d", "layout", False, 2)),
        ("Bootstrap: localimage\nFrom: x.sif", ("localimage", "x.sif", "file", True, 2)),
        ("Bootstrap: docker-archive\nFrom: x.tar", ("docker-archive", "x.tar", "file", True, 2)),
        ("Bootstrap: docker-daemon\nFrom: x:1", ("docker-daemon", "x:1", "distribution", False, 2)),
        ("Bootstrap: debootstrap\nOSVersion: x", ("debootstrap", "", "distribution", False, 1)),
        ("Bootstrap: scratch", ("scratch", "", "nothing", True, 1)),
        ("Bootstrap: docker\nFrom: a\n%post\nFrom: b", ("docker", "a", "registry", False, 2)),
        ("  bootstrap: docker\n\tfrom: a", ("docker", "a", "registry", False, 2)),
        ("\ufeffBootstrap: docker\r\nFrom: a\r\n%post\r\n", ("docker", "a", "registry", False, 2)),
        ("Bootstrap: docker\nFrom: a\n%help\n  Bootstrap: b\n  From: c", ("docker", "a", "registry", False, 2)),
        ("Bootstrap: docker\nFrom: a@sha256:1", ("docker", "a@sha256:1", "registry", False, 2)),
    ],
)
def test_one_stage(text, expected):
    assert kinds(text) == [expected]


TWO = """Bootstrap: docker
From: r.example.org:5000/a/build:1
Stage: build

%post
    make
    From: nothing

Bootstrap: docker
From: b

%files from build
    /made /made
%files
    # not this
    src/a.py /a.py
    "with blank" /b

%runscript
    cat x y
"""


def test_stages():
    assert [(s.origin, s.line, s.stage) for s in sources(TWO)] == [
        ("r.example.org:5000/a/build:1", 2, "build"),
        ("b", 10, None),
    ]
    assert [(c.path, c.line) for c in copies(TWO)] == [("src/a.py", 16), ("with blank", 17)]


def test_what_stands_where():
    """As Apptainer 1.4.5 reads it (2026-11-20)."""
    parsed = parse("x\nBootstrap: docker\nFrom: a # b\nodd\n%POST -c bash\n  %no\n%files\na b\nBootstrap: scratch\n")
    assert parsed.stray == ((1, "x"), (4, "odd"))
    assert [(s.line, s.header("bootstrap"), s.header("from")) for s in parsed.stages] == [
        (2, "docker", "a"),
        (9, "scratch", ""),
    ]
    sections = [(s.line, s.name, s.arguments, list(s.lines)) for s in parsed.stages[0].sections]
    assert sections == [(5, "post", "-c bash", [(6, "  %no")]), (7, "files", "", [(8, "a b")])]


def test_build_arguments():
    parsed = parse("Bootstrap: scratch\n%arguments\n  A=1\n# B=2\n C = '3' # c\nBootstrap: scratch\n%arguments\nD=4")
    assert parsed.arguments == {"A": "1", "C": "'3'", "D": "4"}


def test_a_long_file_takes_no_long_time():
    text = "Bootstrap: docker\n" + "%files\na" * 80_000 + " :" * 100_000 + "\nBootstrap: a" + " " * 100_000 + "b"
    assert [len(stage.sections) for stage in parse(text).stages] == [1, 0]


def test_pinning_changes_only_the_images():
    other = "sha256:" + "2" * 64
    pinned = pin(TWO, {"r.example.org:5000/a/build:1": DIGEST, "b": other})
    changed = [(a, b) for a, b in zip(TWO.split("\n"), pinned.split("\n"), strict=True) if a != b]
    assert changed == [
        ("From: r.example.org:5000/a/build:1", f"From: r.example.org:5000/a/build@{DIGEST}"),
        ("From: b", f"From: b@{other}"),
    ]
    assert all(source.fixed for source in sources(pinned))
    assert pin(pinned, {"b": DIGEST}) == pinned
    assert pin(TWO, {}) == TWO


def test_a_separate_registry_stays_where_it_is():
    text = "Bootstrap: docker\nRegistry: r:5000\nFrom: a:1\n"
    assert pin(text, {"r:5000/a:1": DIGEST}) == f"Bootstrap: docker\nRegistry: r:5000\nFrom: a@{DIGEST}\n"


BY_ARGUMENT = (
    "Bootstrap: docker\nRegistry: {{ HOST }}\nFrom: {{  NAME}}{{AT }}\n\n%arguments\n  HOST=r:5000\n  NAME = a\n"
)


def test_a_source_that_a_build_argument_names_has_its_default():
    [fixed] = sources(f"{BY_ARGUMENT}  AT=@{DIGEST}\n")
    assert (fixed.origin, fixed.digest, fixed.fixed) == (f"r:5000/a@{DIGEST}", DIGEST, True)
    [tag] = sources(f"{BY_ARGUMENT}  AT=:1\n")
    assert (tag.origin, tag.fixed) == ("r:5000/a:1", False)
    assert f"\nFrom: a@{DIGEST}\n" in pin(f"{BY_ARGUMENT}  AT=:1\n", {"r:5000/a:1": DIGEST})


@pytest.mark.parametrize("values", ["", "  AT=@{0}\n%arguments\n  AT=:1\n", "  AT='@{0}'\n", "  # AT=@{0}\n"])
def test_an_argument_without_one_plain_default_is_not_known(values):
    [source] = sources(BY_ARGUMENT + values.format(DIGEST))
    assert not source.fixed


def test_a_path_that_a_build_argument_names_is_the_path_of_its_default():
    text = "Bootstrap: docker\nFrom: a\n%arguments\n  PLACE=src\n%files\n  {{ PLACE }}/x /opt\n  {{ NONE }}/y /opt\n"
    assert [copy.path for copy in copies(text)] == ["src/x", "{{NONE}}/y"]


@pytest.mark.parametrize(
    ("text", "digests"),
    [
        ("From: a", {}),
        ("", {}),
        ("Bootstrap: docker\nFrom: {{ BASE }}", {"{{BASE}}": DIGEST}),
        ("Bootstrap: docker\nFrom: {{ A }}\n%arguments\nA=b\n%arguments\nA=c\n", {"{{A}}": DIGEST}),
        ("Bootstrap: docker\nFrom: a", {"a": "sha256:1"}),
        ("Bootstrap: docker\nFrom: a", {"a": f"{DIGEST}\n%post"}),
        ("Bootstrap: oci\nFrom: a", {"a": DIGEST}),
        ("Bootstrap: docker", {"": DIGEST}),
        ("Bootstrap: docker\n" + "#" * (1 << 20), {}),
    ],
)
def test_what_cannot_be_pinned(text, digests):
    with pytest.raises(SpecError):
        pin(text, digests)


def test_any_text_is_read_or_refused():
    pieces = [
        "Bootstrap:",
        "docker",
        "From:",
        "a@",
        "%files",
        "\n",
        " ",
        "'",
        "{{",
        "#",
        "\\",
        "\0",
        ":",
        "%",
        "Stage:",
    ]
    for first in pieces:
        for second in pieces:
            for third in pieces:
                text = f"Bootstrap: docker\n{first}{second}{third}\n%files\n {third}{first} {second}"
                try:
                    sources(text)
                    copies(text)
                    pin(text, {"a": DIGEST, "": DIGEST})
                except HpcenvError:
                    continue


def test_a_definition_file_has_stages_headers_and_sections() -> None:
    parsed = parse(
        "# a comment\nbootstrap: docker\nFrom: a:1   # a comment to Apptainer, too\nStage: one\n%post -c /bin/bash\n"
        '    Key: no header here\n%arguments\n    X="1"\nBootstrap: localimage\nFrom: b.sif\n%files from one\n    /a /b\n'
    )
    one, two = parsed.stages
    assert (one.line, one.header("stage"), one.sections[0].arguments) == (2, "one", "-c /bin/bash")
    assert (one.header("from"), one.headers["from"].line) == ("a:1", 3)
    assert "no header here" in one.sections[0].text
    assert (two.header("from"), two.sections[0].arguments) == ("b.sif", "from one")
    assert parsed.arguments == {"X": '"1"'}
