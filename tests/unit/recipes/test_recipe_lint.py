"""Rules for recipes, and comments that accept a finding."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcenv.errors import SpecError
from hpcenv.project import toml_files
from hpcenv.recipes import image_lint, recipe_lint

TROUBLES = image_lint.parse_troubles(toml_files.read(image_lint.PACKAGED_TROUBLES, error=SpecError))
AT = "@sha256:" + "a" * 64


def text(words):
    return textwrap.dedent(words).lstrip("\n")


# Text near enough to a recipe to reach every branch of the parsers.
NEAR = st.lists(
    st.sampled_from(
        "FROM RUN COPY ENV ARG USER Bootstrap: From: %post %files %environment <<EOF <<-'A' EOF A \\ ` \n \n \t # "
        "= $ ${ } ${A:-b} {{ x }} [ \" ' ] && || | ; ( ) pip install -r x==1 apt-get update chmod 700 /opt curl sh "
        "hpcenv: allow no-fabric --mount=type=cache,target=/x \0 é".split(" ")
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


# -- shell commands -----------------------------------------------------------------------


def test_a_shell_script_is_split_at_its_operators():
    script = "a \"b;c\" && d \\\n  e | f # g | don't\nif x; then y || z 2>&1; fi\n# h; i\nA=1 sudo j |\n k 'l\n"
    assert [tuple(command) for command in recipe_lint.commands_in(script, 1)] == [
        (1, ("a", "b;c"), False),
        (1, ("d", "e"), False),
        (2, ("f",), True),
        (3, ("x",), False),
        (3, ("y",), False),
        (3, ("z", "2>&1"), False),
        (3, ("fi",), False),
        (5, ("A=1", "sudo", "j"), False),
        (6, ("k",), True),
        (6, ("l",), False),
    ]


def test_continued_lines_keep_their_numbers():
    words = (
        GOOD
        + "RUN --mount=type=tmpfs,target=/x \\\n  one \\\n  # a comment\n\n  && apt-get upgrade \\\n  && dnf update\n"
    )
    assert rules(words) == [("unpinned-upgrade", 8), ("unpinned-upgrade", 9)]


@pytest.mark.parametrize("words", ["", "From: a\n", "hello\nBootstrap: docker\n", "Bootstrap: docker\nnonsense\n"])
def test_what_is_no_definition_file(words):
    with pytest.raises(SpecError):
        recipe_lint.lint_definition(words, origin="x", troubles=TROUBLES)


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
        ("RUN python3 -m pip install --no-cache-dir -r r.txt", None),
        ("RUN pip install -r r.txt numpy", "pip-no-hashes"),
        ("RUN pip install --no-cache-dir . -e ./x ../y[all] /src/z", None),
        ("RUN pip install dist/*.whl x-1.0-py3-none-any.whl x*.whl", None),
        ("RUN pip install git+https://example.org/x.git@main", None),
        ("RUN pip install --no-index --find-links /w numpy", None),
        ('RUN pip install $PACKAGES ${MORE} && uv pip install "$X"', None),
        ("RUN pip install . numpy", "pip-no-hashes"),
        ('RUN ["pip", "install", "--no-cache-dir", "x"]', "pip-no-hashes"),
        ("RUN bash -c 'x' && uv pip install --no-cache x", "pip-no-hashes"),
        ("RUN pip install --no-cache-dir --require-hashes -r r.txt", None),
        ("RUN pip install --no-cache-dir --no-deps .", None),
        ("ENV PIP_REQUIRE_HASHES=1\nRUN pip install -r r.txt", None),
        ("RUN export PIP_REQUIRE_HASHES=1; pip install -r r.txt", None),
        ("RUN dnf -y upgrade", "unpinned-upgrade"),
        ("RUN dnf install -y update-tools", None),
        ("RUN apt-get install --no-upgrade x", None),
        ("RUN mkdir -m 700 /srv/x", "private-folder"),
        ("RUN chmod go-rwx /opt/x", "private-folder"),
        ("RUN chmod 700 /tmp/x", None),
        ("RUN chmod -R 700 /opt/app", "private-folder"),
        ("RUN chmod 755 /opt/app", None),
        ("RUN bash m.sh -b -p /root/miniconda3", "private-folder"),
        ("RUN pip install --no-cache-dir --require-hashes --user -r r.txt", "private-folder"),
        ("RUN echo https://u:secret@example.org/simple", "secret-in-file"),
        ("RUN echo https://u:$PW@example.org/simple", None),
        ("RUN <<EOF\napt-get upgrade\nEOF", "unpinned-upgrade"),
        ("RUN pip install --no-cache-dir --require-hashes opencv-python==4.1", "known-trouble"),
        ("ENV CUDA_HOME=/usr/local/cuda", "nvidia-variables"),
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


TORCH = "RUN pip install --require-hashes torch==2.9.1"
VARIABLES = "ENV NVIDIA_VISIBLE_DEVICES=all"


def test_no_fabric_is_reported_at_the_last_stage():
    fabric = "RUN apt-get install -y rdma-core"
    words = f"FROM debian:13{AT} AS one\n{fabric}\nFROM ubuntu:24.04{AT} AS two\nFROM one\n{VARIABLES}\n{TORCH}\n"
    assert rules(words) == []
    assert rules(words.replace("FROM one", "FROM two")) == [("no-fabric", 4)]


@pytest.mark.parametrize(
    ("base", "line", "accused"),
    [
        ("ubuntu:24.04", TORCH, True),
        ("docker.io/library/python:3.12", TORCH, True),
        ("rockylinux/rockylinux:9", TORCH, True),
        ("nvidia/cuda:13.0.1-base-ubuntu24.04", TORCH, True),
        ("pytorch/pytorch:2.9.1-cuda13.0-cudnn9-runtime", "RUN true", True),
        # Nothing is known of these, or they have it.
        ("nvcr.io/nvidia/pytorch:25.11-py3", TORCH, False),
        ("nvcr.io/nvidia/nemo:25.04", TORCH, False),
        ("mosaicml/pytorch:2.7", TORCH, False),
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.7", TORCH, False),
        ("our.registry.example/ubuntu:24.04", TORCH, False),
        ("ubuntu-of-ours:1", TORCH, False),
        # No torch for CUDA is seen.
        ("ubuntu:24.04", "RUN apt-get install -y tomcat", False),
        ("nvidia/cuda:13.0.1-base-ubuntu24.04", "RUN make", False),
        ("ubuntu:24.04", f"{TORCH} --index-url https://download.example/whl/cpu", False),
        ("ubuntu:24.04", f"{TORCH} --index-url https://download.example/whl/rocm6.4", False),
        # It is installed by a script of the vendor.
        ("ubuntu:24.04", f"{TORCH}\nRUN cd aws-efa-installer && ./efa_installer.sh -y", False),
        ("ubuntu:24.04", f"{TORCH}\nRUN MLNX_OFED/mlnxofedinstall --user-space-only", False),
        ("ubuntu:24.04", f"{TORCH}\nRUN apt-get install -y doca-ofed", False),
        ("ubuntu:24.04", f"{TORCH}\nRUN apt-get install -y libibverbs-dev", False),
        ("ubuntu:24.04", f"{TORCH}\nRUN apt-get remove -y libibverbs-dev", True),
    ],
)
def test_no_fabric_accuses_only_what_it_knows(base, line, accused):
    found = [rule for rule, _ in rules(f"FROM {base}{AT}\n{VARIABLES}\n{line}\n")]
    assert found == (["no-fabric"] if accused else [])


@pytest.mark.parametrize(
    ("base", "accused"),
    [("ubuntu:24.04", True), ("nvidia/cuda:13.0.1-base-ubuntu24.04", False), ("verlai/verl:base", False)],
)
def test_the_variables_for_nvidia_are_missed_only_where_the_base_is_known_to_lack_them(base, accused):
    found = [rule for rule, _ in rules(f"FROM {base}{AT}\nENV CUDA_HOME=/usr/local/cuda\n")]
    assert found == (["nvidia-variables"] if accused else [])


def test_a_stage_that_is_not_in_the_image_may_keep_private_folders():
    words = f"FROM a{AT} AS one\nRUN bash m.sh -p /root/miniconda3\n" + GOOD
    assert rules(words) == []
    assert rules(f"{words}FROM one\nRUN apt-get install libibverbs1\n") == [("private-folder", 2)]


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
        ("# hpcenv: allow add-url x\nRUN pip install --no-cache-dir x\n", [None]),
    ],
)
def test_a_comment_accepts_what_stands_below_it(words, reasons):
    found = recipe_lint.lint_dockerfile(GOOD + words, origin="x")
    assert [one.allowed for one in found if one.rule == "pip-no-hashes"] == reasons


def test_a_suppression_needs_a_reason_and_a_rule():
    words = "# hpcenv: allow pip-no-hashes\nRUN pip install --no-cache-dir x\n# hpcenv: allow no-such-rule x\nENV A=b\n"
    found = rules(GOOD + words)
    assert ("allow-without-reason", 4) in found
    assert ("allow-without-reason", 6) in found
    assert ("pip-no-hashes", 5) in found


def test_above_from_it_holds_for_the_stage():
    words = "# hpcenv: allow base-floating Apptainer only\n# hpcenv: allow no-fabric one node\nFROM a\n"
    assert rules(words) == []


def test_in_a_definition_file():
    words = f"# hpcenv: allow no-fabric one node\nBootstrap: docker\nFrom: a{AT}\n%post\n  # hpcenv: allow unpinned-upgrade x\n  apt-get upgrade\n"
    assert rules(words, recipe_lint.lint_definition) == []


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("ENV PIP_INDEX_URL=https://t0ken@index.example/simple", "index-credentials"),
        ("ENV PIP_INDEX_URL=https://index.example/simple", None),
        ("ENV UV_INDEX_LAB_PASSWORD=hunter2", "index-credentials"),
        ("RUN pip config set global.index-url https://alice:hunter2@index.example/simple", "index-credentials"),
        ("RUN pip config set global.index-url https://$USER:$PASS@index.example/simple", None),
        ("CMD jupyter lab --ServerApp.token=''", "open-notebook"),
        ('CMD ["jupyter", "lab", "--NotebookApp.token="]', "open-notebook"),
        ('CMD ["jupyter", "lab", "--NotebookApp.token=abc"]', None),
        ("ENV JUPYTER_TOKEN=", "open-notebook"),
        ("RUN apt-get install -y openssh-server=1:9", "sshd"),
        ("RUN apt-get install -y openssh-client", None),
        ("RUN service ssh start", "sshd"),
    ],
)
def test_what_an_image_would_expose(line, rule):
    found = {one.rule for one in recipe_lint.lint_dockerfile(f"FROM x\n{line}\n", origin="x")}
    assert found & {"index-credentials", "open-notebook", "sshd", "secret-in-file", "secret-in-environment"} == (
        {rule} if rule else set()
    )


@pytest.mark.parametrize(
    ("base", "install", "is_second"),
    [
        ("nvidia/cuda:13.0.1-runtime-ubuntu24.04", "torch==2.14.1", True),
        ("nvcr.io/nvidia/cuda:12.6.3-cudnn-devel-ubuntu22.04", "torch", True),
        ("nvidia/cuda:13.0.1-base-ubuntu24.04", "torch", False),
        ("nvidia/cuda:13.0.1-runtime-ubuntu24.04", "torch==2.14.1+cpu", False),
        ("nvidia/cuda:13.0.1-runtime-ubuntu24.04", "torchmetrics", False),
        ("ubuntu:24.04", "torch", False),
    ],
)
def test_a_base_with_cuda_beside_the_wheels(base, install, is_second):
    text = f"FROM {base}\nRUN pip install {install}\n"
    found = [one.rule for one in recipe_lint.lint_dockerfile(text, origin="x")]
    assert ("second-cuda" in found) is is_second


# -- the two-stage file of the seeds: its last stage has no Python, and a mirror stays in it --------


SEEDS = f"""
FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04{AT} AS builder
RUN apt-get update && apt-get install -y python3 python3-pip
RUN pip3 config set global.index-url https://mirror.example/simple && pip3 install torch==2.1.2
FROM nvidia/cuda:12.1.1-cudnn8-runtime-ubuntu22.04{AT}
RUN sed -i s@archive.ubuntu.com@mirror.example@g /etc/apt/sources.list
ENV PIP_INDEX_URL=https://mirror.example/simple
COPY --from=builder /usr/local/lib/python3.10/dist-packages /usr/local/lib/python3.10/dist-packages
"""


def found_in(words):
    return [(one.rule, one.line) for one in recipe_lint.lint_dockerfile(words, origin="x")]


def test_the_faults_of_the_seeds_dockerfile():
    found = found_in(SEEDS)
    assert ("no-python", 5) in found
    assert [line for rule, line in found if rule == "mirror-left"] == [6, 7], (
        "what the first stage sets is not in the image"
    )


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get install -y python3",
        "RUN apt-get install -y --no-install-recommends python3.10-venv",
        "COPY --from=builder / /",
        "COPY --from=builder /usr/local /usr/local",
        "COPY --from=builder /opt/conda /opt/conda",
        "COPY --from=builder /opt/python3.11/bin/python3.11 /usr/bin/python3",
        "RUN curl -O https://h.example/Miniconda3.sh && bash Miniconda3.sh -b",
        "RUN uv python install 3.11",
        "COPY setup.sh /\nRUN bash /setup.sh && python3 -c 'import torch'",
    ],
)
def test_a_last_stage_with_a_python(line):
    assert "no-python" not in {rule for rule, _ in found_in(SEEDS + line + "\n")}


@pytest.mark.parametrize(
    "line",
    [
        "COPY --from=builder /opt/venv /opt/venv",
        "RUN apt-get install -y git",
        "RUN python3 -c 'import torch'",
        "RUN pip3 config list",
        "RUN PYTHONPATH=/x /usr/bin/python3 -m torch.utils.collect_env",
    ],
)
def test_a_virtual_environment_is_no_python(line):
    assert "no-python" in {rule for rule, _ in found_in(SEEDS + line + "\n")}


LEFT = (
    "RUN pip config --global set global.index-url https://pkgs.example.org/simple",
    "RUN python3 -m pip config --user set global.extra-index-url https://pkgs.example.org/simple",
    "RUN pip3 config set global.index-url https://pkgs.example.org/simple && pip3 config unset global.extra-index-url",
    "RUN conda config --system --add channels https://pkgs.example.org/conda/main",
    "RUN conda config --set channel_alias https://pkgs.example.org/conda",
    "RUN npm config set registry https://pkgs.example.org/npm",
    "RUN git config --global url.https://git.example.org/.insteadOf https://git.example.com/",
    "RUN sed -i 's@archive.example.com@pkgs.example.org@g' /etc/apt/sources.list",
    "RUN sed -i 's|http://deb\\.example\\.com|https://pkgs.example.org|' /etc/apt/sources.list.d/debian.sources",
    "RUN sed -i 's/deb.example.com/pkgs.example.org/g' /etc/apt/sources.list.d/*.sources",
    'RUN sed -i "s#//.*archive.example.com#//$UBUNTU_MIRROR#" /etc/apt/sources.list',
    "RUN sed -i.bak -e 's,deb.example.com,pkgs.example.org,' /etc/apt/sources.list",
    "RUN echo 'deb http://pkgs.example.org/ubuntu jammy main' > /etc/apt/sources.list",
    "RUN echo 'deb http://pkgs.example.org/ubuntu jammy main' | tee /etc/apt/sources.list",
    "RUN printf '[global]\\nindex-url = https://pkgs.example.org/simple\\n' > /etc/pip.conf",
    "RUN mkdir -p ~/.pip && echo 'index-url = https://pkgs.example.org/simple' >> ~/.pip/pip.conf",
    "RUN { echo '[global]'; echo 'index-url = https://pkgs.example.org/simple'; } > /root/.config/pip/pip.conf",
    "RUN cat > /etc/pip.conf <<EOF\n[global]\nindex-url = https://pkgs.example.org/simple\nEOF",
    "RUN echo 'channels: [https://pkgs.example.org/conda]' > ~/.condarc",
    "RUN echo 'export PIP_INDEX_URL=https://pkgs.example.org/simple' >> ~/.bashrc",
    "COPY pip.conf /root/.pip/pip.conf",
    "COPY conf/pip.conf /etc/",
    "COPY pip.conf /root/.config/pip/pip.conf",
    "COPY debian.sources /etc/apt/sources.list.d/",
    "COPY pip.conf /etc/pip.conf\nRUN pip install x && rm /etc/apt/sources.list",
    "ENV UV_INDEX_URL=https://pkgs.example.org/simple",
    "ENV UV_DEFAULT_INDEX=https://pkgs.example.org/simple",
    "ENV HF_ENDPOINT=https://hub.example.org",
)
NOT_LEFT = (
    "RUN pip config set global.timeout 60",
    "RUN pip config set global.index-url https://pkgs.example.org/simple && pip install x && pip config unset global.index-url",
    "RUN pip config set global.index-url https://pkgs.example.org/simple\nRUN pip config unset global.index-url",
    "RUN echo 'index-url = https://pkgs.example.org/simple' > /etc/pip.conf && pip install x && rm -f /etc/pip.conf",
    "RUN echo 'index-url = https://pkgs.example.org/simple' > ~/.pip/pip.conf && pip install x && rm -r /root/.pip",
    "RUN cp /etc/apt/sources.list /tmp/old && sed -i s/archive.example.com/pkgs.example.org/ /etc/apt/sources.list && mv /tmp/old /etc/apt/sources.list",
    "COPY pip.conf /etc/pip.conf\nRUN pip install x && rm /etc/pip.conf",
    "ENV PIP_INDEX_URL=https://pkgs.example.org/simple\nRUN pip install x\nENV PIP_INDEX_URL=",
    "RUN PIP_INDEX_URL=https://pkgs.example.org/simple pip install x",
    "RUN export PIP_INDEX_URL=https://pkgs.example.org/simple && pip install x",
    "ARG UV_DEFAULT_INDEX=https://pkgs.example.org/simple",
    "RUN sed -i 's/deb.example.com/old.example.com/g' /etc/apt/sources.list",
    "RUN sed -i 's,http://,https://,' /etc/apt/sources.list",
    "RUN sed -i '/security/d' /etc/apt/sources.list",
    "RUN sed 's/deb.example.com/pkgs.example.org/' /etc/apt/sources.list",
    "RUN echo 'deb [signed-by=/k.gpg] https://apt.example.org/rocm/6.0/ubuntu jammy main' > /etc/apt/sources.list.d/rocm.list",
    "RUN printf '[global]\\nbreak-system-packages = true\\n' > /etc/pip.conf",
    "RUN cat /etc/apt/sources.list && curl -O https://pkgs.example.org/x",
    "RUN conda config --add channels conda-forge",
    "RUN git config --global url.https://git.example.com/.insteadOf git@git.example.com:",
    "RUN npm config set fund false",
    "COPY cuda.list /etc/apt/sources.list.d/cuda.list",
    "COPY pip.conf /app/pip.conf",
)


@pytest.mark.parametrize(
    ("line", "is_left"),
    [
        ("ENV PIP_INDEX_URL=https://mirror.example/simple", True),
        ("ARG PIP_INDEX_URL=https://mirror.example/simple", False),
        ("COPY pip.conf /etc/pip.conf", True),
        ("COPY sources.list /etc/apt/sources.list", True),
        ("RUN echo 'deb http://mirror.example/debian bookworm main' > /etc/apt/sources.list.d/m.list", True),
        ("RUN pip install -i https://mirror.example/simple x", False),
        ("RUN sed -i s/main/main\\ contrib/ /etc/apt/sources.list", False),
        ("RUN pip config set --global global.index-url https://mirror.example/simple", True),
        ("RUN pip config list", False),
        (
            "RUN rm -f /etc/apt/sources.list && echo 'deb http://mirror.example/debian x main' > /etc/apt/sources.list",
            True,
        ),
        ("RUN pip config unset global.index-url; pip config set global.index-url https://mirror.example/simple", True),
        *((line, True) for line in LEFT),
        *((line, False) for line in NOT_LEFT),
    ],
)
def test_a_mirror_that_stays_in_the_image(line, is_left):
    assert ("mirror-left" in {rule for rule, _ in found_in(f"FROM python:3.11{AT}\n{line}\n")}) is is_left
