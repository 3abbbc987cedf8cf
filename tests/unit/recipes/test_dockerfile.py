"""The parser for Dockerfiles reads what BuildKit reads."""

from __future__ import annotations

import textwrap

import pytest

from hpcenv.errors import SpecError
from hpcenv.recipes import dockerfile


def text(words):
    return textwrap.dedent(words).lstrip("\n")


def instructions(words):
    parsed = dockerfile.parse(text(words))
    return [one for stage in parsed.stages for one in stage.instructions]


def test_directives_end_at_the_first_line_that_is_none():
    parsed = dockerfile.parse("# syntax=docker/dockerfile:1\n#ESCAPE = `\n\n# check=skip\nFROM a `\n  AS b\nRUN x \\\n")
    assert parsed.directives == {"syntax": "docker/dockerfile:1", "escape": "`"}
    assert parsed.stages[0].name == "b"
    assert parsed.stages[0].instructions[0].arguments == "x \\"


def test_continuations_comments_and_blank_lines_keep_line_numbers():
    run, user = instructions(
        """
        FROM a
        RUN one \\
            # a comment
              \t
            && two \\
            && three
        USER 1
        """
    )
    assert (run.line, run.arguments_line, user.line) == (2, 2, 7)
    assert run.arguments == "one \n\n\n    && two \n    && three"


def test_an_escaped_escape_does_not_continue():
    one, other = instructions("FROM a\nRUN x \\\\\nUSER b\n")
    assert (one.arguments, other.name) == ("x \\\\", "USER")


def test_heredocs():
    run, copy, last = instructions(
        """
        FROM a
        RUN <<EOF cat - <<-"TWO" && echo "<<NOT"
        RUN not an instruction
        # not a comment
        EOF
        \ttext
        \tTWO
        COPY <<one <<'two' /x/
        1
        one
        2
        two
        USER x
        """
    )
    assert [(doc.name, doc.text, doc.line) for doc in run.heredocs] == [
        ("EOF", "RUN not an instruction\n# not a comment\n", 3),
        ("TWO", "text\n", 6),
    ]
    assert [doc.text for doc in copy.heredocs] == ["1\n", "2\n"]
    assert (last.line, last.arguments) == (13, "x")


def test_heredoc_only_where_docker_knows_it():
    label, user = instructions("FROM a\nLABEL x=<<EOF\nUSER y\n")
    assert label.heredocs == ()
    assert user.arguments == "y"
    (run,) = instructions('FROM a\nRUN cat <<<"word"\n')
    assert run.heredocs == ()


def test_flags_and_json_form():
    run, cmd, shell, copy = instructions(
        'FROM a\nRUN --mount=type=cache,target=/c \\\n --network=none ["sh", "-c", "x"]\nCMD ["a b"]\n'
        "CMD [not json]\nCOPY --from=b --chown=1:1 c d\n"
    )
    assert run.flag("network") == "none"
    assert (run.argv, run.arguments_line) == (("sh", "-c", "x"), 3)
    assert cmd.argv == ("a b",)
    assert shell.argv is None
    assert (copy.flag("from"), copy.arguments) == ("b", "c d")


def test_stages_and_arguments_before_from():
    parsed = dockerfile.parse(
        "ARG TAG=1 BASE=x:${TAG}\nFROM --platform=$BUILDPLATFORM ${BASE} as one\nFROM One\nFROM ${NO:-y}@z AS three\n"
        "FROM $MISSING\nFROM 0\n"
    )
    assert [(s.base, s.base_known, s.parent) for s in parsed.stages] == [
        ("x:1", True, None),
        ("One", True, 0),
        ("y@z", True, None),
        ("", False, None),
        ("0", True, 0),
    ]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("ENV A=1 B='x y' C=\"z\"", (("A", "1"), ("B", "x y"), ("C", "z"))),
        ("ENV A b c", (("A", "b c"),)),
        ("ARG A", (("A", None),)),
        ("ARG A=", (("A", ""),)),
    ],
)
def test_assignments(words, found):
    assert dockerfile.assignments(instructions(f"FROM a\n{words}\n")[0]) == found


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "no FROM"),
        ("RUN x\nFROM a", "is before the first FROM"),
        ("FROM a\nRUN <<EOF\nx\n", "has no end"),
        ("# escape=x\nFROM a", "escape directive"),
        ("FROM a\n" + "RUN x\n" * 20_001, "instructions"),
    ],
)
def test_a_file_that_is_not_a_dockerfile(words, why):
    with pytest.raises(SpecError, match=why):
        dockerfile.parse(words)
