"""Lint: Dockerfiles and definition files as their builders read them, rules, suppression, finished images."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcenv.adapters import toml_files
from hpcenv.errors import SpecError
from hpcenv.model import definition, dockerfile, image_content, image_lint, recipe_lint
from hpcenv.model.image_content import ImageContents, ImageFile, ImageLayer

TROUBLES = image_lint.parse_troubles(toml_files.read(image_lint.PACKAGED_TROUBLES, error=SpecError))
AT = "@sha256:" + "a" * 64


def text(words):
    return textwrap.dedent(words).lstrip("\n")


# -- the Dockerfile parser -----------------------------------------------------------------


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
    assert (run.line, run.end, user.line) == (2, 6, 7)
    found = recipe_lint._run_script(run, ()).commands
    assert [(one.line, one.words) for one in found] == [(2, ("one",)), (5, ("two",)), (6, ("three",))]


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
        'FROM a\nRUN --mount=type=cache,target=/c --network=none ["sh", "-c", "x"]\nCMD ["a b"]\n'
        "CMD [not json]\nCOPY --from=b --chown=1:1 c d\n"
    )
    assert run.flag("network") == "none"
    assert run.words == ("sh", "-c", "x")
    assert cmd.words == ("a b",)
    assert shell.words is None
    assert (copy.flag("from"), copy.arguments) == ("b", "c d")


def test_stages_and_arguments_before_from():
    parsed = dockerfile.parse(
        "ARG TAG=1 BASE=x:${TAG}\nFROM --platform=$BUILDPLATFORM ${BASE} as one\nFROM One\nFROM ${NO:-y}@z AS three\n"
        "FROM $MISSING\nFROM 0\n"
    )
    assert [(s.base, s.known, s.parent) for s in parsed.stages] == [
        ("x:1", True, None),
        ("One", True, 0),
        ("y@z", True, None),
        ("", False, None),
        ("0", True, 0),
    ]
    assert parsed.stages[0].platform == "$BUILDPLATFORM"


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
        ("RUN x\nFROM a", "before the first FROM"),
        ("FROM a\nRUN <<EOF\nx\n", "has no end"),
        ("# escape=x\nFROM a", "escape directive"),
        ("FROM a\n" + "RUN x\n" * 20_001, "instructions"),
    ],
)
def test_what_is_no_dockerfile(words, why):
    with pytest.raises(SpecError, match=why):
        dockerfile.parse(words)


# Text near enough to a recipe to reach every branch of the parsers.
NEAR = st.lists(
    st.sampled_from(
        "FROM RUN COPY ENV ARG USER Bootstrap: From: %post %files %environment <<EOF <<-'A' EOF A \\ ` \n \n \t # "
        "= $ ${ } ${A:-b} {{ x }} [ \" ' ] && || | ; ( ) pip install -r x==1 apt-get update chmod 700 /opt curl sh "
        "hpcenv: allow root-user --mount=type=cache,target=/x \0 é".split(" ")
    ),
    max_size=40,
).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.one_of(NEAR, st.text(max_size=200)))
@example("FROM a\nRUN \\")
@example("FROM a\nRUN <<EOF\nEOF")
@example("Bootstrap: docker\n%post\n\\")
def test_any_text_is_judged_or_refused(words):
    for judge in (recipe_lint.lint_dockerfile, recipe_lint.lint_definition):
        for whole in (words, "FROM a\nRUN " + words, "Bootstrap: docker\nFrom: a\n%post\n" + words):
            try:
                judge(whole, origin="x", troubles=TROUBLES)
            except SpecError:
                pass


def test_long_input_takes_no_long_time():
    words = "FROM a\nRUN " + "x && " * 4000 + "y\nENV " + "A=b " * 4000 + "\n" + "#" * 200_000
    assert recipe_lint.lint_dockerfile(words, origin="x", troubles=TROUBLES)


# -- definition files ----------------------------------------------------------------------


def test_a_definition_file_has_stages_headers_and_sections():
    parsed = definition.parse(
        text(
            """
            # a comment
            bootstrap: docker
            From: a:1   # a comment to Apptainer, too
            Stage: one
            %post -c /bin/bash
                Key: no header here
            %arguments
                X="1"
            Bootstrap: localimage
            From: b.sif
            %files from one
                /a /b
            """
        )
    )
    one, two = parsed.stages
    assert (one.line, one.header("stage"), one.sections[0].arguments) == (2, "one", "-c /bin/bash")
    assert (one.header("from"), one.headers["from"].line) == ("a:1", 3)
    assert "no header here" in one.sections[0].text
    assert (two.header("from"), two.sections[0].arguments) == ("b.sif", "from one")
    assert parsed.arguments == {"X": "1"}


@pytest.mark.parametrize("words", ["", "From: a\n", "hello\nBootstrap: docker\n", "Bootstrap: docker\nnonsense\n"])
def test_what_is_no_definition_file(words):
    with pytest.raises(SpecError):
        recipe_lint.lint_definition(words, origin="x", troubles=TROUBLES)


def test_a_shell_script_is_split_at_its_operators():
    found = dockerfile.commands('a "b;c" && d \\\n  e | f # g\nif x; then y || z 2>&1; fi\n')
    assert [(one.after, one.words) for one in found] == [
        ("", ("a", "b;c")),
        ("&&", ("d", "e")),
        ("|", ("f",)),
        ("", ("x",)),
        (";", ("y",)),
        ("||", ("z", "2>&1")),
        (";", ("fi",)),
    ]


# -- rules for recipes ---------------------------------------------------------------------

GOOD = f"FROM debian:bookworm{AT}\nRUN apt-get update && apt-get install -y libibverbs1 && rm -rf /var/lib/apt/lists/*\nUSER 1\n"


def rules(words, judge=recipe_lint.lint_dockerfile):
    return [(one.rule, one.line) for one in judge(words, origin="x", troubles=TROUBLES) if one.allowed is None]


def test_a_good_dockerfile_has_no_findings():
    assert rules(GOOD) == []


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("ENV HF_TOKEN=hf_secret", "secret-in-environment"),
        ("ENV AWS_SECRET_ACCESS_KEY abc", "secret-in-environment"),
        ("ENV TOKENIZERS_PARALLELISM=false", None),
        ("ENV TOKEN_FILE=/run/secrets/x", None),
        ("ENV API_KEY=${API_KEY}", None),
        ("ARG GITHUB_TOKEN", "secret-as-argument"),
        ("ADD https://example.org/x /x", "add-url"),
        ("ADD --checksum=sha256:00 https://example.org/x /x", None),
        ("COPY .netrc /root/", "secret-in-file"),
        ("COPY a /root/.ssh/id_rsa", "secret-in-file"),
        ("COPY --from=0 /root/.netrc /x", None),
        ("RUN curl -L https://example.org/i | bash", "pipe-to-shell"),
        ("RUN wget -qO- https://example.org/i \\\n  | sudo sh", "pipe-to-shell"),
        ("RUN curl -LO https://example.org/i", None),
        ("RUN apt-get dist-upgrade -y", "unpinned-upgrade"),
        ("RUN dnf update -y", "unpinned-upgrade"),
        ("RUN pip install --no-cache-dir numpy", "pip-no-hashes"),
        ("RUN python3 -m pip install --no-cache-dir -r r.txt", "pip-no-hashes"),
        ('RUN ["pip", "install", "--no-cache-dir", "x"]', "pip-no-hashes"),
        ("RUN bash -c 'x' && uv pip install --no-cache x", "pip-no-hashes"),
        ("RUN pip install --no-cache-dir --require-hashes -r r.txt", None),
        ("RUN pip install --no-cache-dir --no-deps .", None),
        ("RUN pip install --require-hashes -r r.txt", "cache-left"),
        ("ENV PIP_NO_CACHE_DIR=1\nRUN pip install --require-hashes -r r.txt", None),
        ("RUN --mount=type=cache,target=/root/.cache/pip pip install --require-hashes -r r.txt", None),
        ("RUN pip install --require-hashes -r r.txt && rm -rf ~/.cache", None),
        ("RUN apt-get update && apt-get install -y x", "cache-left"),
        ("RUN --mount=type=cache,target=/var/lib/apt apt-get update", None),
        ("RUN conda install x", "cache-left"),
        ("RUN conda install x && conda clean -afy", None),
        ("RUN dnf install -y x", "cache-left"),
        ("RUN dnf install -y x && dnf clean all", None),
        ("RUN chmod -R 700 /opt/app", "private-folder"),
        ("RUN chmod 755 /opt/app", None),
        ("RUN bash m.sh -b -p /root/miniconda3", "private-folder"),
        ("RUN pip install --no-cache-dir --require-hashes --user -r r.txt", "private-folder"),
        ("RUN echo https://u:secret@example.org/simple", "secret-in-file"),
        ("RUN echo https://u:$PW@example.org/simple", None),
        ("RUN <<EOF\napt-get upgrade\nEOF", "unpinned-upgrade"),
        ("RUN pip install --no-cache-dir --require-hashes opencv-python==4.1", "known-trouble"),
        ("ENV CUDA_HOME=/usr/local/cuda", "nvidia-variables"),
        ("USER root", "root-user"),
        ("USER 0:0", "root-user"),
    ],
)
def test_one_line_and_its_rule(line, rule):
    found = [one for one, _ in rules(GOOD + line + "\n")]
    assert found == ([rule] if rule else [])


@pytest.mark.parametrize(
    ("base", "rule"),
    [
        ("ubuntu", "base-floating"),
        ("ubuntu:latest", "base-floating"),
        ("registry:5000/ubuntu", "base-floating"),
        ("ubuntu:24.04", "base-no-digest"),
        ("ubuntu@sha256:" + "0" * 64, None),
        ("scratch", None),
        ("$UNSET", "base-unknown"),
    ],
)
def test_bases(base, rule):
    assert [one for one, _ in rules(GOOD.replace(f"debian:bookworm{AT}", base))] == ([rule] if rule else [])


def test_no_fabric_and_no_user_are_judged_at_the_last_stage():
    fabric = "RUN apt-get install -y rdma-core"
    words = f"FROM a{AT} AS one\n{fabric}\nUSER 5\nFROM b{AT} AS two\nFROM one\n"
    assert rules(words) == []
    assert rules(words.replace("FROM one", "FROM two")) == [("no-fabric", 5), ("root-user", 5)]


def test_a_stage_that_is_left_behind_may_keep_its_caches():
    words = f"FROM a{AT} AS one\nRUN apt-get update\n" + GOOD
    assert rules(words) == []


def test_a_definition_file_is_judged_by_the_same_rules():
    words = text(
        """
        Bootstrap: docker
        From: debian:12
        %files
            .netrc /root/.netrc
        %post
            apt="apt-get -y"
            $apt update
            $apt install libibverbs1
            curl https://example.org/x | sh
        %environment
            export HF_TOKEN="hf_x"
        """
    )
    assert rules(words, recipe_lint.lint_definition) == [
        ("base-no-digest", 1),
        ("secret-in-file", 4),
        ("cache-left", 7),
        ("pipe-to-shell", 9),
        ("secret-in-environment", 11),
    ]
    assert (
        rules(
            f"Bootstrap: docker\nFrom: x{AT}\n%post\n  dnf install rdma-core\n  dnf clean all\n",
            recipe_lint.lint_definition,
        )
        == []
    )


def test_findings_never_hold_the_secret():
    words = (
        GOOD
        + "ENV A_TOKEN=s3cr3t\nRUN pip install --index-url https://u:s3cr3t@example.org/ x\nADD https://u:s3cr3t@example.org/x?k=s3cr3t /x\n"
    )
    found = recipe_lint.lint_dockerfile(words, origin="x", troubles=TROUBLES)
    assert len(found) >= 4
    assert "s3cr3t" not in repr(found)


# -- suppression ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ("# hpcenv: allow pip-no-hashes for tests\nRUN pip install --no-cache-dir x\n", ["for tests"]),
        ("RUN a && \\\n    # hpcenv: allow pip-no-hashes for tests\n    pip install --no-cache-dir x\n", ["for tests"]),
        ("RUN <<EOF\n# hpcenv: allow pip-no-hashes here\npip install --no-cache-dir x\nEOF\n", ["here"]),
        ("# hpcenv: allow pip-no-hashes x\n\nRUN pip install --no-cache-dir x\n", [None]),
        ("# hpcenv: allow cache-left x\nRUN pip install --no-cache-dir x\n", [None]),
    ],
)
def test_a_comment_accepts_what_stands_below_it(words, reasons):
    found = recipe_lint.lint_dockerfile(GOOD + words, origin="x")
    assert [one.allowed for one in found if one.rule == "pip-no-hashes"] == reasons


def test_a_suppression_needs_a_reason_and_a_rule():
    words = "# hpcenv: allow pip-no-hashes\nRUN pip install --no-cache-dir x\n# hpcenv: allow no-such-rule x\nENV A=b\n"
    found = rules(GOOD + words)
    assert ("allow-without-reason", 5) in found
    assert ("allow-without-reason", 7) in found
    assert ("pip-no-hashes", 5) in found


def test_above_from_it_holds_for_the_stage():
    words = "# hpcenv: allow root-user Apptainer only\n# hpcenv: allow no-fabric one node\nFROM a" + AT + "\n"
    assert rules(words) == []


def test_in_a_definition_file():
    words = f"# hpcenv: allow no-fabric one node\nBootstrap: docker\nFrom: a{AT}\n%post\n  # hpcenv: allow unpinned-upgrade x\n  apt-get upgrade\n"
    assert rules(words, recipe_lint.lint_definition) == []


# -- finished images -----------------------------------------------------------------------

SITE = "opt/venv/lib/python3.11/site-packages"


def file(path, size=10, *, mode=0o644, text=None):
    return ImageFile(path=path, kind="file", mode=mode, size=size, text=text)


def folder(path, mode=0o755):
    return ImageFile(path=path, kind="directory", mode=mode)


FABRIC = (
    file("usr/lib/x86_64-linux-gnu/libibverbs.so.1.14"),
    file("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so"),
)


def contents(*layers, **more):
    found = tuple(
        one if isinstance(one, ImageLayer) else ImageLayer(name=f"layer {n}", files=one)
        for n, one in enumerate((FABRIC, *layers), start=1)
    )
    return ImageContents(origin="x", layers=found, **more)


def judged(*layers, **more):
    found = image_content.lint_contents(contents(*layers, **more), troubles=TROUBLES)
    return [(one.rule, one.place) for one in found if one.rule != "size"]


def test_a_good_image():
    assert judged((folder("opt"), file("opt/x")), user="1000", environment={"PATH": "/bin"}) == []


def test_user_and_environment():
    assert judged((), user="") == [("root-user", "")]
    assert judged((), user="0:0") == [("root-user", "")]
    assert judged((), environment={"WANDB_API_KEY": "abc"}) == [("secret-in-environment", "")]
    assert judged((), history=("RUN |1 T=ghp_" + "a" * 36,)) == [("secret-in-environment", "")]
    env = file(".singularity.d/env/90-environment.sh", text="export HF_TOKEN='hf_abc'\nexport PATH=/x\n")
    assert judged((env,)) == [("secret-in-environment", env.path)]


def test_fabric_libraries():
    bare = ImageContents(origin="x", layers=(ImageLayer(name="", files=(file("a"),)),))
    assert "no-fabric" in [one.rule for one in image_content.lint_contents(bare)]
    half = ImageContents(origin="x", layers=(ImageLayer(name="", files=FABRIC[:1]),))
    found = [one for one in image_content.lint_contents(half) if one.rule == "no-fabric"]
    assert "no provider" in found[0].what


def test_secrets_in_the_image_and_in_layers_below():
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\n"
    first = (
        file("root/.netrc"),
        file("opt/deploy.pem", text=key),
        file("opt/ca.pem", text="-----BEGIN CERTIFICATE-----"),
    )
    second = ImageLayer(name="layer 3", files=(), removed=frozenset({"opt/deploy.pem"}))
    assert judged(first, second) == [
        ("secret-in-file", "layer 2, root/.netrc"),
        ("secret-in-lower-layer", "layer 2, opt/deploy.pem"),
    ]
    over = ImageLayer(name="layer 3", files=(file("root", 0),))
    assert ("secret-in-lower-layer", "layer 2, root/.netrc") in judged(first, over)
    opaque = ImageLayer(name="layer 3", files=(), opaque=frozenset({"opt"}))
    assert ("secret-in-lower-layer", "layer 2, opt/deploy.pem") in judged(first, opaque)


def test_keys_that_packages_ship_for_their_tests_are_no_secrets():
    assert not image_content.wanted(f"{SITE}/tornado/test/test.key", 100)
    assert not image_content.wanted("usr/lib/python3.11/test/keycert.pem", 100)
    assert image_content.wanted("root/.ssh/id_ed25519", 100)
    assert image_content.wanted(f"{SITE}/torch-2.13.0.dist-info/METADATA", 100)
    assert judged((file("root/.docker/config.json", text='{"detachKeys": "x"}'),)) == []
    assert judged((file("root/.docker/config.json", text='{"auths": {"r": {"auth": "eA=="}}}'),)) != []


def test_caches_and_hidden_bytes():
    lists = file("var/lib/apt/lists/x_Packages", 9_000_000)
    big = file("opt/big", 90_000_000)
    gone = ImageLayer(name="layer 3", files=(), removed=frozenset({"opt/big", "var/lib/apt/lists/x_Packages"}))
    assert judged((lists, big), gone) == [("cache-left", "layer 2"), ("hidden-bytes", "layer 3")]
    assert ("hidden-bytes", "layer 3") in judged((big,), (big,))
    assert judged((file("var/lib/apt/lists/lock", 0), file("tmp/x", 10))) == []


def test_folders_that_only_their_owner_may_enter():
    layer = (folder("opt", 0o700), folder("opt/venv"), folder("opt/venv/lib"), folder(SITE), folder("srv", 0o700))
    assert judged(layer) == [("private-folder", "opt")]


def dists(*names):
    return tuple(file(f"{SITE}/{name}.dist-info/METADATA") for name in names)


def test_packages():
    report = file("usr/share/hpcenv/pip-report.json")
    found = judged((*dists("torch-2.2.2+cpu", "numpy-2.1.0", "nvidia_cuda_runtime_cu12-12.6"), report))
    assert found == [("cpu-torch", SITE), ("known-trouble", SITE)]
    assert judged(dists("torch-2.13.0")) == [("no-install-report", "")]
    metadata = "Name: torch\nRequires-Dist: nvidia-nccl-cu12==2.27.5; x\nRequires-Dist: nvidia-cudnn-cu12==9.1\n\nRequires-Dist: nvidia-y==1\n"
    layer = (file(f"{SITE}/torch-2.9.1.dist-info/METADATA", text=metadata.replace("; x", "")), report)
    found = judged((*layer, *dists("nvidia_nccl_cu12-2.28.3", "nvidia_cudnn_cu12-9.1", "nvidia_y-2")))
    assert found == [("library-mismatch", SITE)]


def test_bytecode_that_is_missing():
    modules = tuple(file(f"{SITE}/m{n}.py") for n in range(300))
    compiled = tuple(file(f"{SITE}/__pycache__/m{n}.cpython-311.pyc") for n in range(300))
    assert judged(modules) == [("no-bytecode", SITE)]
    assert judged(modules + compiled) == []


def test_size_by_layer_with_advice():
    layer = (file(f"{SITE}/torch/lib/libtorch.so", 900_000_000), file("opt/x/lib/libfoo.a", 200_000_000))
    found = [one for one in image_content.lint_contents(contents(layer)) if one.rule == "size"]
    assert len(found) == 1
    assert found[0].place == "layer 2"
    assert f"1.1 GB unpacked: {SITE}/torch 900 MB" in found[0].what
    assert "static libraries" in found[0].advice


def test_a_thousand_findings_of_one_rule_do_not_hide_the_others():
    layer = tuple(file(f"home/u{n}/.netrc") for n in range(1000))
    found = judged(layer, user="")
    assert 0 < sum(rule == "secret-in-file" for rule, _ in found) <= 20
    assert ("root-user", "") in found


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"schema": 2, "trouble": []},
        {"schema": 1},
        {"schema": 1, "trouble": [{"package": "x"}]},
        {"schema": 1, "trouble": [3]},
    ],
)
def test_a_table_of_troubles_that_is_none(data):
    with pytest.raises(SpecError):
        image_lint.parse_troubles(data)


def test_every_rule_says_what_to_do():
    told_by_the_finding = {"known-trouble", "size"}
    assert all((rule.why and rule.advice) or rule.id in told_by_the_finding for rule in image_lint.RULES.values())
