"""What hpcenv adds to an image: the scripts are run by real shells, and are always the same bytes."""

import json
import shutil
import subprocess

import pytest
from blake3 import blake3

from hpcenv.errors import HpcenvError, ImageUnavailable
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert.runtime_files import additions, followed_links, quoted, runtime_files

DIGEST = "sha256:" + "1" * 64
LABELS = {"hpcenv.source.manifest-digest": DIGEST, "hpcenv.format": "1"}
SHELLS = [[shell] for shell in ("dash", "bash", "sh") if shutil.which(shell)]
if shutil.which("busybox"):
    SHELLS.append(["busybox", "sh"])

# What has gone wrong in shells: all of it must arrive as it is.
ODD = [
    "", "a b", "  ", "'", "''", "a'b'c", '"', "$HOME", "$$", "`id`", "$(id)", "\\", "\\n", "a\\", "\n", "a\nb\n",
    "\r", "a\r\nb", "\t", "*", "~", "~/x", "!", "!!", "#x", ";id", "&", "|", "-n", "--", "ü€", "\U0001f600", "\x01",
    "';id;'", '"$(id)"', "${x}", "}", "{a,b}", "a=b", "\x7f", "\u2028", "$'x'",
]  # fmt: skip


def files(config=None, **changes):
    given = {"labels": LABELS, "architecture": "amd64", "epoch": 1700000000, **changes}
    return runtime_files({"config": config or {}}, **given)


def content(found, path):
    return next(data for entry, data in found.members if entry.path == path.encode()).decode()


def environment(found, shell, tmp_path, before=None):
    """Source the environment scripts as Apptainer does, and return the variables."""
    for name in ("01-base.sh", "10-docker2singularity.sh", "90-environment.sh", "94-appsbase.sh", "95-apps.sh",
                 "99-base.sh", "99-runtimevars.sh"):  # fmt: skip
        (tmp_path / name).write_text(content(found, f".singularity.d/env/{name}"), newline="")
    env = shutil.which("env")
    source = f'for f in "$0"/*.sh; do . "$f"; done; exec {env} -0'
    done = subprocess.run(
        [shutil.which(shell[0]), *shell[1:], "-c", source, str(tmp_path)],
        env={"PATH": "/host", **(before or {})},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return dict(item.split("=", 1) for item in done.stdout.decode().split("\0")[:-1])


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_values_arrive_literally(shell, tmp_path):
    given = {f"V{number}": value for number, value in enumerate(ODD)}
    found = files({"Env": [f"{name}={value}" for name, value in given.items()]})
    assert found.notes == ()
    seen = environment(found, shell, tmp_path)
    assert {name: seen[name] for name in given} == given


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_one_word_stays_one_word(shell):
    script = "printf '%s\\0' " + " ".join(quoted(word) for word in ODD)
    done = subprocess.run([*shell, "-c", script], capture_output=True, check=True)
    assert done.stdout.decode() == "".join(f"{word}\0" for word in ODD)


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_the_meaning_of_the_environment(shell, tmp_path):
    config = {"Env": ["PATH=/opt/bin:/bin", "LD_LIBRARY_PATH=/opt/lib", "A=image", "B=image", "DUP=1", "DUP=2", "N"]}
    before = {"A": "host", "B": "", "SING_USER_DEFINED_PREPEND_PATH": "/first", "SING_USER_DEFINED_APPEND_PATH": "/z"}
    seen = environment(files(config), shell, tmp_path, before)
    assert (seen["A"], seen["B"], seen["DUP"], seen["N"]) == ("host", "image", "2", "")
    assert seen["PATH"] == "/first:/opt/bin:/bin:/z"
    assert seen["LD_LIBRARY_PATH"] == "/opt/lib:/.singularity.d/libs"
    assert not [name for name in seen if name.startswith("SING_")]
    seen = environment(files(), shell, tmp_path, {"SING_USER_DEFINED_PATH": "/only"})
    assert seen["PATH"] == "/only"
    assert seen["LD_LIBRARY_PATH"] == "/.singularity.d/libs"


@pytest.mark.parametrize(
    "item",
    ["A-B=x", "1A=x", "=x", "A B=x", "$(id)=x", "a[0]=x", "A\n=x", "ä=x", "A.B=x", "IFS=:", "UID=0", "_=x", "PWD=/x",
     "APPTAINER_NAME=x", "SING_USER_DEFINED_PATH=/x", "V=a\0b", ";id;A=x"],
)  # fmt: skip
def test_variables_that_a_shell_cannot_hold_are_left_out(item):
    found = files({"Env": [item, "KEPT=1"]})
    assert len(found.notes) == 1
    script = content(found, ".singularity.d/env/10-docker2singularity.sh")
    assert script == "#!/bin/sh\n[ -n \"${KEPT:-}\" ] || KEPT='1'\nexport KEPT\n"


def run_script(found, shell, tmp_path, *arguments, no_eval=False):
    script = tmp_path / "runscript"
    script.write_text(content(found, ".singularity.d/runscript"), newline="")
    env = {"PATH": "/usr/bin:/bin", "HOME": "/home/a", **({"SINGULARITY_NO_EVAL": "1"} if no_eval else {})}
    done = subprocess.run([shutil.which(shell[0]), *shell[1:], str(script), *arguments], env=env, capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


SAY = ["sh", "-c", 'for w; do printf "<%s>" "$w"; done', "say"]


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_entry_point_and_command(shell, tmp_path):
    both = files({"Entrypoint": SAY, "Cmd": ["a b", "$HOME"]})
    assert run_script(both, shell, tmp_path) == (0, "<a b><$HOME>", "")
    assert run_script(both, shell, tmp_path, "x y", "$HOME", "") == (0, "<x y></home/a><>", "")
    assert run_script(both, shell, tmp_path, "x y", "$HOME", '"', no_eval=True) == (0, '<x y><$HOME><">', "")
    entry = files({"Entrypoint": SAY})
    assert run_script(entry, shell, tmp_path) == (0, "", "")
    assert run_script(entry, shell, tmp_path, "--", "-x") == (0, "<--><-x>", "")
    command = files({"Cmd": [*SAY, "default"]})
    assert run_script(command, shell, tmp_path) == (0, "<default>", "")
    assert run_script(command, shell, tmp_path, "echo", "own") == (0, "own\n", "")
    odd = files({"Entrypoint": SAY, "Cmd": ODD})
    assert run_script(odd, shell, tmp_path) == (0, "".join(f"<{word}>" for word in ODD), "")
    status, out, err = run_script(files(), shell, tmp_path)
    assert (status, out) == (1, "")
    assert "no entry point" in err
    assert run_script(files(), shell, tmp_path, "echo", "own") == (0, "own\n", "")


def test_apptainer_recognises_the_runscript():
    """Apptainer 1.4.5 runs a script itself, without the image's shell, if it has this line."""
    assert 'eval "set ${SINGULARITY_OCI_RUN}"' in content(files(), ".singularity.d/runscript").splitlines()


def test_a_nul_in_the_entry_point_leaves_it_out():
    found = files({"Entrypoint": ["a\0b"], "Cmd": ["echo"]})
    assert found.notes == ("the image's Entrypoint is omitted: it has a NUL byte",)
    assert "set -- 'echo'" in content(found, ".singularity.d/runscript")


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_every_script_is_one(shell, tmp_path):
    scripts = [(e.path, d) for e, d in files({"Env": ["A=b"], "Cmd": ["c"]}).members if d.startswith(b"#!")]
    assert len(scripts) == 13
    for path, data in scripts:
        script = tmp_path / path.decode().replace("/", "_")
        script.write_bytes(data)
        subprocess.run([*shell, "-n", str(script)], check=True)


def test_labels():
    image = {
        "a": "b", 'odd "l"': "x\ny\t<&>", "é": "ü", "empty": "", "org.label-schema.build-date": "mine",
        "hpcenv.source.manifest-digest": "forged", "hpcenv.source.config-digest": "forged",
    }  # fmt: skip
    found = files({"Labels": image})
    expected = {
        "a": "b", 'odd "l"': "x\ny\t<&>", "é": "ü", "empty": "", **LABELS,
        "org.label-schema.build-arch": "amd64",
        "org.label-schema.build-date": "2023-11-14T22:13:20Z",
        "org.label-schema.schema-version": "1.0",
    }  # fmt: skip
    assert found.labels == expected
    assert len(found.notes) == 2
    assert json.loads(content(found, ".singularity.d/labels.json")) == expected
    assert json.loads(found.inspection)["data"]["attributes"]["labels"] == expected


def test_objects():
    config = {
        "Cmd": ["a"],
        "User": "1:1",
        "WorkingDir": "/w",
        "ExposedPorts": {"80/tcp": {}},
        "Unknown": 1,
        "Env": None,
    }
    found = files(config)
    assert found.definition.decode() == f"bootstrap: oci\nfrom: .@{DIGEST}\n"
    assert json.loads(found.oci_config) == {
        "Cmd": ["a"], "User": "1:1", "WorkingDir": "/w", "ExposedPorts": {"80/tcp": {}},
    }  # fmt: skip
    document = json.loads(found.inspection)
    assert document["type"] == "container"
    attributes = document["data"]["attributes"]
    assert set(attributes) == {"deffile", "environment", "labels", "runscript", "startscript"}
    assert attributes["runscript"] == content(found, ".singularity.d/runscript").rstrip("\n")


def test_the_tree():
    found = files()
    paths = [entry.path.decode() for entry, _ in found.members]
    assert [p for p in paths if "/" not in p] == [
        ".singularity.d", ".exec", ".run", ".shell", ".test", "environment", "singularity",
    ]  # fmt: skip
    assert len(set(paths)) == len(paths) == 26
    for number, (entry, data) in enumerate(found.members):
        parent = entry.path.rpartition(b"/")[0].decode()
        assert not parent or parent in paths[:number]
        assert (entry.uid, entry.gid, entry.mtime, entry.size) == (0, 0, 1700000000, len(data))
        assert entry.blake3 == (blake3(data).hexdigest() if entry.kind == "file" else None)
        assert entry.inode == entry.path


def test_same_input_same_bytes():
    config = {"Env": ["A=1", "B=2"], "Labels": {"a": "1", "b": "2"}, "Volumes": {"/x": {}, "/y": {}}}
    turned = {"Volumes": {"/y": {}, "/x": {}}, "Labels": {"b": "2", "a": "1"}, "Env": ["A=1", "B=2"]}
    one = files(config)
    two = files(turned, labels=dict(reversed(LABELS.items())))
    assert (one.members, one.definition, one.inspection, one.oci_config) == (
        two.members, two.definition, two.inspection, two.oci_config,
    )  # fmt: skip


def added(image):
    found = files()
    tree = {entry.path: entry for entry in image}
    members = additions(found, tree.get)
    assert members[: len(found.members)] == found.members
    return [entry.path.decode() for entry, _ in members[len(found.members) :]]


def test_mount_points_are_added_where_there_is_nothing():
    every = ["dev", "etc", "home", "proc", "root", "sys", "tmp", "var", "var/tmp", "etc/hosts", "etc/resolv.conf"]
    assert added([]) == every
    folders = [TreeEntry(path=p.encode(), kind="directory", mode=0o755) for p in every[:9]]
    assert added(folders) == ["etc/hosts", "etc/resolv.conf"]
    assert added([*folders, TreeEntry(path=b"etc/hosts", kind="file", mode=0o644)]) == ["etc/resolv.conf"]


def test_nothing_is_added_through_a_link():
    links = [TreeEntry(path=p, kind="symlink", mode=0o777, target=b"/proc") for p in (b"var", b"etc", b"tmp")]
    assert added(links) == ["dev", "home", "proc", "root", "sys"]
    assert "etc/hosts" not in added([TreeEntry(path=b"etc", kind="file", mode=0o644)])


@pytest.mark.parametrize(
    ("path", "followed"),
    [(".singularity.d", True), (".singularity.d/env", True), (".singularity.d/runscript", True), ("etc", True),
     (".singularity.d/env/99-base.sh", True), ("etc/hosts", True), ("etc/resolv.conf", True), ("var", True),
     ("environment", False), (".exec", False), ("tmp", False), ("bin", False), ("etc/passwd", False)],
)  # fmt: skip
def test_links_that_apptainer_build_would_write_through(path, followed):
    link = TreeEntry(path=path.encode(), kind="symlink", mode=0o777, target=b"/x")
    folder = TreeEntry(path=path.encode(), kind="directory", mode=0o755)
    assert followed_links(files(), [link]) == ((path,) if followed else ())
    assert followed_links(files(), [folder]) == ()


@pytest.mark.parametrize(
    "config",
    ["x", 1, {"Env": "A=1"}, {"Env": [1]}, {"Env": [None]}, {"Entrypoint": "sh"}, {"Cmd": {}}, {"Labels": []},
     {"Labels": {"a": 1}}, {"User": 1000}, {"WorkingDir": []}, {"Volumes": ["/x"]}, {"Env": ["A=" + "x" * (1 << 20)]}],
)  # fmt: skip
def test_a_configuration_of_the_wrong_shape_is_refused(config):
    with pytest.raises(ImageUnavailable):
        runtime_files({"config": config}, labels=LABELS, architecture="amd64", epoch=0)


def test_any_json_is_either_used_or_refused():
    """Half a surrogate pair can stand in JSON, but not in a file."""
    found = files(json.loads('{"Env": ["A=\\ud800"], "Labels": {"\\udfff": "\\ud800"}, "Cmd": ["\\ud800"]}'))
    assert found.labels["\ufffd"] == "\ufffd"
    assert "A='\ufffd'" in content(found, ".singularity.d/env/10-docker2singularity.sh")
    for value in (None, True, 1, 1.5, "x", [], {}, [[]], [{}], {"a": {}}, {"a": []}):
        for name in ("User", "Env", "Entrypoint", "Cmd", "Volumes", "WorkingDir", "Labels", "StopSignal", "Other"):
            try:
                files({name: value})
            except HpcenvError as error:
                assert error.why
