"""A SIF of hpcenv's behaves like one of `apptainer build`: stock Apptainer runs and inspects both.

Small images with every kind of entry point, command and environment are made in the testbed
from programs of the node, converted by `apptainer build`, by hpcenv's stream and by its
fallback, and the same commands are run in all three.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

import pytest

from .conftest import HOST_PYTHON, Cluster

pytestmark = pytest.mark.cluster


EPOCH = 1714979289  # 2024-05-06T07:08:09Z
SAY = ["/bin/sh", "-c", 'for w; do printf "<%s>" "$w"; done', "say"]
ODD = {
    "QUOTES": "a\"b'c''", "DOLLAR": 'a$HOME"q', "COMMAND": "`id`$(id)", "BACKSLASH": "a\\b\\\\c\\n\\", "NEWLINE": "a\nb\n",
    "RETURN": "a\r\nb", "TAB": "\t", "NOT_ASCII": "äö€", "BLANKS": " a  b ", "STAR": "*", "EMPTY": "", "TILDE": "~/x",
    "BANG": "!!", "HASH": "#x", "CODE": "';touch /tmp/pwned;'",
}  # fmt: skip
WORDS = ["q\"'\\", "", "*", "`id`", "$HOME", "a\nb", "a\r\nb", "-n", "ü"]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {
        "Env": ["PATH=/opt/x:/usr/bin:/bin", "LD_LIBRARY_PATH=/opt/lib", "FOO=image", "BAR=a b", "LANG=de_DE.UTF-8"],
        "Entrypoint": SAY,
        "Cmd": ["default", "$HOME"],
        "User": "1000:1000",
        "WorkingDir": "/work",
        "Labels": {"maintainer": "a", 'odd "name"': "x\ny\t<&>", "é": "ü", "none": ""},
        "ExposedPorts": {"80/tcp": {}},
        "Volumes": {"/data": {}},
        "StopSignal": "SIGINT",
    },
    "odd": {"Env": [f"{name}={value}" for name, value in ODD.items()], "Cmd": [*SAY, *WORDS], "Labels": {"a": "b"}},
    "noshell": {"Entrypoint": ["/usr/bin/env"], "Cmd": ["-0"], "Env": ["FOO=image"]},
    "none": {},
    "links": {"Cmd": ["/usr/bin/env", "-0"], "Env": ["FOO=image"]},  # see MAKE
}
# `apptainer` is hpcenv's fallback, which calls it; `stock` is Apptainer as it comes.
MADE = [(name, "hpcenv") for name in CONFIGS] + [("plain", "stock"), ("odd", "apptainer")]

# Runs on the node: makes an OCI layout for each configuration.
MAKE = r"""
import functools, gzip, hashlib, io, json, os, pathlib, re, subprocess, sys, tarfile
where, epoch, configs = pathlib.Path(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin)

@functools.cache
def layer(*programs):
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=tarfile.PAX_FORMAT) as tar:
        def add(name, **what):
            member = tarfile.TarInfo(name)
            member.mtime, member.mode = epoch, 0o755
            data = what.pop("data", b"")
            for key, value in what.items():
                setattr(member, key, value)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        files, folders = {}, {"work"}
        for program in programs:
            files["/usr/bin/" + program] = None
            said = subprocess.run(["ldd", "/usr/bin/" + program], capture_output=True, text=True).stdout
            files.update((os.path.join(os.path.realpath(os.path.dirname(lib)), os.path.basename(lib)), None)
                         for lib in re.findall(r"/[^ ]+", said))
        for name in files:
            folders.update(str(p).lstrip("/") for p in pathlib.Path(name).parents if str(p) != "/")
        for name in sorted(folders):
            add(name, type=tarfile.DIRTYPE)
        for name in sorted(files):
            add(name.lstrip("/"), data=open(name, "rb").read())
        for name, target in [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")]:
            add(name, type=tarfile.SYMTYPE, linkname=target)
        if "dash" in programs:
            add("usr/bin/sh", type=tarfile.SYMTYPE, linkname="dash")
        if "cat" not in programs and "dash" in programs:
            add(".singularity.d", type=tarfile.SYMTYPE, linkname=str(where / "victim"))
    return body.getvalue()

for name, config in configs.items():
    blobs = where / name / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    def put(body, kind):
        digest = hashlib.sha256(body).hexdigest()
        (blobs / digest).write_bytes(body)
        return {"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + digest, "size": len(body)}
    tar = layer(*{"noshell": ["env"], "links": ["dash", "env"]}.get(name, ["dash", "env", "cat", "sleep"]))
    packed = put(gzip.compress(tar, 1, mtime=0), "layer.v1.tar+gzip")
    document = {"architecture": "amd64", "os": "linux", "created": "2024-05-06T07:08:09Z", "config": config,
                "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(tar).hexdigest()]}}
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": put(json.dumps(document).encode(), "config.v1+json"), "layers": [packed]}
    index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode(), "manifest.v1+json")]}
    (where / name / "index.json").write_text(json.dumps(index))
    (where / name / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
"""

# Runs on the node: many commands in one go; answers with status and output of each.
RUN = r"""
import json, os, subprocess, sys
answers = []
for variables, argv, stdin in json.load(sys.stdin):
    env = {**os.environ, **variables}
    done = subprocess.run(argv, env=env, input=stdin.encode(), capture_output=True)
    answers.append([done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr)])
json.dump(answers, sys.stdout)
"""


@dataclass(frozen=True)
class Images:
    """The same images three times, and a way to run commands beside them."""

    cluster: Cluster
    folder: str
    paths: dict[tuple[str, str], str]

    def ask(self, *commands: tuple[dict[str, str], list[str], str]) -> list[tuple[int, str, str]]:
        said = self.cluster.must(HOST_PYTHON, "-c", RUN, cwd=self.folder, stdin=json.dumps(commands))
        return [(status, out, err) for status, out, err in json.loads(said)]

    def each(self, name: str, maker: str, *ways: tuple[dict[str, str], str, str]) -> list[tuple[int, str, str]]:
        """Run `apptainer WORDS` for each (variables, words, standard input); `{}` is the image."""
        image = self.paths[name, maker]
        return self.ask(
            *(
                (variables, ["apptainer", "-s", *(image if w == "{}" else w for w in words.split("|"))], stdin)
                for variables, words, stdin in ways
            )
        )


@pytest.fixture(scope="module")
def images(cluster: Cluster) -> Images:
    folder = f"/home/alice/hpcenv-tests/runs-{uuid.uuid4().hex[:6]}"
    cluster.must(HOST_PYTHON, "-c", MAKE, f"{folder}/oci", str(EPOCH), stdin=json.dumps(CONFIGS))
    paths = {}
    for name, maker in MADE:
        layout = f"oci:{folder}/oci/{name}"
        if maker == "stock":
            paths[name, maker] = f"{folder}/{name}.sif"
            cluster.must("apptainer", "build", "--disable-cache", paths[name, maker], layout)
        else:
            pull = ("hpcenv", "image", "pull", layout, "--builder", maker, "--store", f"{folder}/{maker}")
            paths[name, maker] = cluster.must(*pull).splitlines()[-1]
    return Images(cluster, folder, paths)


# What names the image file, and what our shell around the programs sets.
_OF_THE_FILE = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "APPTAINER_NAME", "SINGULARITY_NAME")


def environment(text: str) -> dict[str, str]:
    found = dict(item.split("=", 1) for item in text.split("\0") if item)
    return {name: value for name, value in found.items() if name not in _OF_THE_FILE}


WAYS: list[tuple[dict[str, str], str, str]] = [
    ({"FOO": "host", "OTHER": "a\nb"}, "exec|{}|env|-0", ""),
    ({"FOO": "", "BAR": ""}, "exec|{}|env|-0", ""),
    ({"FOO": "host", "LD_LIBRARY_PATH": "/host"}, "exec|--cleanenv|{}|env|-0", ""),
    ({"APPTAINERENV_BAR": "x$HOME"}, "exec|--env|FOO=mine,NEW=a b|{}|env|-0", ""),
    ({"APPTAINERENV_FOO": "x$HOME`id`\"'"}, "exec|--cleanenv|--no-eval|{}|env|-0", ""),
    ({"APPTAINERENV_PREPEND_PATH": "/first", "APPTAINERENV_APPEND_PATH": "/last"}, "exec|--nv|{}|env|-0", ""),
    ({"APPTAINERENV_PATH": "/only:/usr/bin", "APPTAINERENV_LD_LIBRARY_PATH": "/mine"}, "exec|{}|env|-0", ""),
    ({}, "exec|--containall|--pwd|/work|{}|env|-0", ""),
]


def test_the_environment_is_that_of_apptainer_build(images: Images) -> None:
    stock, ours = images.each("plain", "stock", *WAYS), images.each("plain", "hpcenv", *WAYS)
    for way, (status, expected, _), (ours_status, found, said) in zip(WAYS, stock, ours, strict=True):
        assert (status, ours_status) == (0, 0), (way, said)
        assert environment(found) == environment(expected), way
    assert environment(ours[0][1])["FOO"] == "image"
    assert environment(ours[5][1])["LD_LIBRARY_PATH"] == "/opt/lib:/.singularity.d/libs"
    assert environment(ours[6][1])["LD_LIBRARY_PATH"] == "/mine:/.singularity.d/libs"


RUNS: list[tuple[dict[str, str], str, str]] = [
    ({}, "run|{}", ""),
    ({}, "run|{}||$HOME|it's|*|-x|--", ""),
    ({}, 'run|--no-eval|{}||$HOME|q"|`id`|--', ""),
    ({}, "shell|{}|-c|echo $FOO $0; pwd", ""),
    ({}, "shell|{}", "echo $FOO $SHELL\n"),
    ({}, "exec|{}|/bin/sh|-c|exit 7", ""),
]


def test_run_and_shell_do_what_they_do_with_apptainer_build(images: Images) -> None:
    stock, ours = images.each("plain", "stock", *RUNS), images.each("plain", "hpcenv", *RUNS)
    for way, expected, found in zip(RUNS, stock, ours, strict=True):
        assert found[:2] == expected[:2], (way, found[2])
    assert ours[0][:2] == (0, "<default><$HOME>")
    assert ours[5][0] == 7


@pytest.mark.parametrize("maker", ["hpcenv", "apptainer"])
def test_what_apptainer_1_4_5_garbles_arrives_literally(images: Images, maker: str) -> None:
    env, run, test = images.each(
        "odd", maker, ({}, "exec|--cleanenv|{}|env|-0", ""), ({}, "run|{}", ""), ({}, "test|{}", "")
    )
    assert env[0] == 0, env[2]
    found = environment(env[1])
    assert {name: found.get(name) for name in ODD} == ODD
    assert run[:2] == (0, "".join(f"<{word}>" for word in WORDS))
    assert test[0] == 0, test[2]


def test_images_without_a_shell_or_anything_to_run(images: Images) -> None:
    ((status, text, said),) = images.each("noshell", "hpcenv", ({}, "run|--cleanenv|{}", ""))
    assert (status, environment(text).get("FOO")) == (0, "image"), said
    (status, text, said), own = images.each(
        "none", "hpcenv", ({}, "run|{}", ""), ({}, "run|{}|/bin/sh|-c|echo own", "")
    )
    assert (status, text) == (1, "")
    assert "no entry point and no command" in said
    assert own[:2] == (0, "own\n")


def test_a_sif_is_a_program_and_can_be_an_instance(images: Images) -> None:
    name = f"i{uuid.uuid4().hex[:6]}"
    image = images.paths["plain", "hpcenv"]
    program, start, inside, _ = images.ask(
        ({"APPTAINER_SILENT": "1"}, ["run-singularity", image, "a b"], ""),
        ({}, ["apptainer", "-s", "instance", "start", image, name], ""),
        ({}, ["apptainer", "-s", "exec", f"instance://{name}", "/bin/sh", "-c", "echo $FOO"], ""),
        ({}, ["apptainer", "-s", "instance", "stop", "--force", name], ""),
    )
    assert program[:2] == (0, "<a b>"), program[2]
    assert start[0] == 0, start[2]
    assert inside[:2] == (0, "image\n"), inside[2]


INSPECT = ({}, "inspect|--json|--labels|--runscript|--startscript|--environment|--deffile|{}", "")


def attributes(images: Images, name: str, maker: str) -> dict[str, Any]:
    ((status, text, said),) = images.each(name, maker, INSPECT)
    assert status == 0, said
    document = json.loads(text)
    assert document["type"] == "container"
    return document["data"]["attributes"]


def test_inspect_shows_what_it_shows_of_apptainer_build(images: Images) -> None:
    expected, found = attributes(images, "plain", "stock"), attributes(images, "plain", "hpcenv")
    assert set(found) == set(expected)
    assert set(found["environment"]) == set(expected["environment"])
    for name in (*CONFIGS["plain"]["Labels"], "org.label-schema.build-arch", "org.label-schema.schema-version"):
        assert found["labels"][name] == expected["labels"][name]
    ((status, text, said),) = images.ask(({}, ["apptainer", "sif", "dump", "3", images.paths["plain", "hpcenv"]], ""))
    assert status == 0, said
    assert json.loads(text) == CONFIGS["plain"]


@pytest.mark.parametrize("maker", ["hpcenv", "apptainer"])
def test_a_sif_says_by_digest_what_it_was_made_from_and_not_where(images: Images, maker: str) -> None:
    found = attributes(images, "odd", maker)
    digest = found["labels"]["hpcenv.source.manifest-digest"]
    assert images.paths["odd", maker].endswith(f"{digest.replace(':', '-')}.sif")
    assert f"@{digest}" in found["deffile"]
    assert found["labels"]["org.label-schema.build-date"] == "2024-05-06T07:08:09Z"
    assert found["labels"]["a"] == "b"
    assert "hpcenv-tests" not in json.dumps(found)


def test_nothing_is_written_through_the_links_of_an_image(images: Images) -> None:
    """Apptainer 1.4.5 itself does: /.singularity.d or /etc as a link leads its build to the host's files."""
    victim = f"{images.folder}/oci/victim"
    images.cluster.must("mkdir", "-p", victim)
    layout = f"oci:{images.folder}/oci/links"
    done = images.cluster.run(
        "hpcenv", "image", "pull", layout, "--builder", "apptainer", "--store", f"{images.folder}/refused"
    )
    assert done.status == 11, done.text
    assert "must not convert" in done.stderr
    ((status, text, said),) = images.each("links", "hpcenv", ({}, "run|--cleanenv|{}", ""))
    assert (status, environment(text).get("FOO")) == (0, "image"), said
    assert images.cluster.must("ls", "-A", victim) == ""
