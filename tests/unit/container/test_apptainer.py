"""apptainer: the start line as data, the time of an image, and what Apptainer's words mean."""

import os
import subprocess
from dataclasses import dataclass

import pytest

from hpcenv.container import apptainer
from hpcenv.errors import ImageMismatch, ImageUnavailable, ToolFailed, UsageError
from hpcenv.records.manifest import Overlay


@dataclass(frozen=True)
class Bind:
    source: str
    target: str
    read_only: bool = False


# --- the start line ------------------------------------------------------------------------


def start_line(**changes):
    given = {
        "apptainer": "/usr/bin/apptainer",
        "image": "/proc/self/fd/9",
        "command": ["python3", "train.py"],
        "workdir": "/w",
    }
    return apptainer.exec_argv(**{**given, **changes})


def test_the_whole_start_line():
    argv = start_line(home="/run/home:/home/alice", binds=[Bind("/data", "/data", read_only=True)], gpus=True)
    assert argv == [
        "/usr/bin/apptainer", "-q", "exec", "--cleanenv", "--no-eval", "--no-mount", "cwd",
        "--home", "/run/home:/home/alice",
        "--mount", 'type=bind,"source=/data","destination=/data",ro',
        "--pwd", "/w", "--nv", "/proc/self/fd/9", "python3", "train.py",
    ]  # fmt: skip


def test_a_squashfs_is_mounted_read_only_at_its_target():
    venv = Overlay(source='/p,"q"/v.sqsh', use="venv", target="/user-software")
    argv = start_line(binds=[Bind("/data", "/data")], overlay=venv)
    assert argv[argv.index("--pwd") - 1] == (
        'type=bind,"source=/p,""q""/v.sqsh","destination=/user-software",image-src=/,ro'
    )
    assert "image-src" not in argv[argv.index("--mount") + 1]


def test_the_libraries_of_rocm_are_brought_in_where_they_are_asked_for():
    argv = start_line(rocm=True)
    assert argv[argv.index("--pwd") :] == ["--pwd", "/w", "--rocm", "/proc/self/fd/9", "python3", "train.py"]


def test_without_a_home_there_is_none():
    argv = start_line()
    assert "--no-home" in argv
    assert not {"--home", "--nv", "--rocm", "--contain", "-c", "--bind"} & set(argv)


@pytest.mark.parametrize("word", ["a b", "$HOME", "`id`", "$(id)", '"', "'", "\\", "\n", "--", "-x", "ü", ""])
def test_arguments_stay_one_word_each(word):
    assert start_line(command=["python3", word])[-2:] == ["python3", word]


@pytest.mark.parametrize(
    ("path", "quoted"),
    [("/a b", "/a b"), ("/a,b", "/a,b"), ("/a:b", "/a:b"), ('/a"b', '/a""b'), ("/a\nb", "/a\nb")],
)
def test_bind_paths_are_quoted_as_csv(path, quoted):
    argv = start_line(binds=[Bind(path, path)])
    value = argv[argv.index("--mount") + 1]
    assert value == f'type=bind,"source={quoted}","destination={quoted}"'


@pytest.mark.parametrize(
    "change",
    [
        {"command": []}, {"command": [""]}, {"command": ["-x"]}, {"command": ["a", "b\0"]},
        {"workdir": "w"}, {"workdir": ""}, {"image": "--debug"}, {"image": "docker://python"},
        {"home": "/a"}, {"home": "/a:/b:/c"}, {"home": "a:/b"}, {"home": "/a:b"}, {"home": "/a:/\0"},
        {"binds": [Bind("a", "/a")]}, {"binds": [Bind("/a", "")]}, {"binds": [Bind("/a\0", "/a")]},
    ],
)  # fmt: skip
def test_what_cannot_be_passed_literally_is_refused(change):
    with pytest.raises(UsageError):
        start_line(**change)


def test_only_an_allow_list_of_the_host_remains():
    inherited = {
        "PATH": "/usr/bin", "HOME": "/home/a", "USER": "a", "LD_PRELOAD": "x", "LD_LIBRARY_PATH": "y",
        "APPTAINER_BIND": "/", "APPTAINERENV_X": "1", "SINGULARITY_CONTAINALL": "1", "SINGULARITYENV_Y": "2",
        "APPTAINER_CACHEDIR": "/c", "APPTAINER_NOENV": "NCCL_DEBUG", "PYTHONPATH": "/p", "TERM": "xterm",
        "http_proxy": "p", "SLURM_JOB_ID": "1",
    }  # fmt: skip
    assert apptainer.host_environment(inherited) == {"PATH": "/usr/bin", "HOME": "/home/a", "USER": "a"}


def given(settings):
    """The variables that a shell gets from the file."""
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", "set -a; . /dev/stdin; env -0"],
        input=apptainer.env_file(settings).encode(), capture_output=True, check=True, env={},
    )  # fmt: skip
    return dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0") if "=" in entry)


def test_settings_win_over_defaults():
    env = given({"LANG": "de_DE.UTF-8", "PATH": os.environ["PATH"], "PREPEND_PATH": "/y"})
    assert (env["LANG"], env["PREPEND_PATH"], env["PYTHONNOUSERSITE"]) == ("de_DE.UTF-8", "/y", "1")
    assert given({"A": "1", "PATH": os.environ["PATH"]})["LANG"] == "C.UTF-8"


VALUES = [
    "",
    "a,b=c",
    "$HOME `id` $(id)",
    "q\"'\\",
    "ü€",
    "a\nb",
    "  x ",
    "*",
    "~/a:~b",
    "a\rb\r",
    "#x",
    "!",
    "a;b&c",
    "\t",
]


@pytest.mark.parametrize("value", VALUES)
def test_values_are_handed_over_as_they_are(value):
    assert given({"V": value, "PATH": os.environ["PATH"]})["V"] == value


def test_the_file_of_variables_is_an_option_of_exec():
    argv = apptainer.with_env_file(start_line(command=["exec", "--env-file"]), "/proc/self/fd/5")
    assert argv[:5] == ("/usr/bin/apptainer", "-q", "exec", "--env-file", "/proc/self/fd/5")
    assert argv[-2:] == ("exec", "--env-file")


@pytest.mark.parametrize(
    "name",
    ["", "1A", "A-B", "A B", "A=B", "A\n", "Ä", "A.B", "$(id)", "HOME", "UID", "EUID", "GID",
     "PROMPT_COMMAND", "IFS", "OPTIND", "PWD", "APPTAINER_BIND", "APPTAINERENV_X", "SINGULARITY_NAME"],
)  # fmt: skip
def test_names_that_would_not_arrive_are_refused(name):
    with pytest.raises(UsageError, match="cannot be set"):
        apptainer.env_file({name: "x"})


@pytest.mark.parametrize("value", ["a\0b", "\udcff", "a\r\nb"])
def test_values_that_would_not_arrive_are_refused(value):
    with pytest.raises(UsageError):
        apptainer.env_file({"A": value})


# --- the time of an image ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("created", "history", "epoch"),
    [
        ("2026-01-02T03:04:05Z", [], 1767323045),
        ("2026-01-02T03:04:05.000000000Z", [], 1767323045),
        ("2026-01-02T03:04:05.123456789Z", [], 1767323046),
        ("2026-01-02T03:04:05+01:00", [], 1767319445),
        (None, ["2020-01-01T00:00:00Z", "2021-01-01T00:00:00Z", "x"], 1609459200),
        ("0001-01-01T00:00:00Z", ["2021-01-01T00:00:00Z"], 1609459200),
        ("1970-01-01T00:00:00Z", [], 315532800),
        ("1970-01-01T00:00:01Z", ["1970-01-01T00:00:00Z"], 315532800),
        ("9999-01-01T00:00:00Z", [], 315532800),
        ("2026-13-02T03:04:05Z", [], 315532800),
        ("nonsense", [], 315532800),
        (None, [], 315532800),
    ],
)
def test_source_date_epoch_belongs_to_the_image(created, history, epoch):
    said = []
    assert apptainer.source_date_epoch(created, history, said.append) == epoch
    assert bool(said) == (epoch == 315532800)


# --- the program, and what it says ----------------------------------------------------------


FATAL = "FATAL:   While performing build: conveyor failed to get: "
FAILURES = [
    ("corrupted image: unknown compression algorithm value 6", ToolFailed, "SingularityCE does not read this SIF"),
    ("write /t/bundle-temp-1/x: no space left on device", ToolFailed, "not enough space"),
    ("short write: write /t/build-temp-3", ToolFailed, "not enough space"),
    ("creating container: write X: Disk quota exceeded", ToolFailed, "quota is used up"),
    ("'noexec' mount option set on /t, temporary root filesystem won't be usable", ToolFailed, "noexec"),
    ("Failed to create user namespace: not allowed to create user namespace", ToolFailed, "user namespaces"),
    ("Could not write info to setgroups: Permission denied", ToolFailed, "user namespaces"),
    ("http: server gave HTTP response to HTTPS client", ImageUnavailable, "plain http"),
    ("GET http://r/v2/a/manifests/x: MANIFEST_UNKNOWN: manifest unknown", ImageUnavailable, "no longer has"),
    ("dial tcp 127.0.0.1:5079: connect: connection refused", ImageUnavailable, "registry is down"),
    ("dial tcp: lookup x on 10.0.0.1:53: no such host", ImageUnavailable, "does not resolve"),
    ("TOOMANYREQUESTS: You have reached your pull rate limit", ImageUnavailable, "more requests"),
    ("UNAUTHORIZED: authentication required", ImageUnavailable, "denies access"),
    ("x509: certificate signed by unknown authority", ImageUnavailable, "not trusted"),
    ("read tcp: i/o timeout", ImageUnavailable, "was interrupted"),
    ("lsetxattr /t/rootfs: operation not supported", ToolFailed, "cannot hold an unpacked image"),
    ("something never seen before", ToolFailed, "apptainer ended with status 255"),
]


@pytest.mark.parametrize(("text", "kind", "what"), FAILURES)
def test_failures_to_build_are_explained(text, kind, what):
    error = apptainer.explain(f"INFO:    noise\n{FATAL}{text}\n", argv=["apptainer", "build"], status=255)
    assert type(error) is kind
    assert what in error.what
    assert error.why == FATAL + text
    assert error.hint


def test_the_time_limit_is_told_from_a_failure():
    said = f"INFO:    noise\n{FATAL}{FAILURES[0][0]}\n"
    error = apptainer.explain(said, argv=["apptainer", "build"], status=None)
    assert (type(error), error.what) == (ToolFailed, "apptainer did not finish in time")


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        ("FATAL:   ... squashfuse_ll exited: Something went wrong trying to read the squashfs image.",
         ImageMismatch, "the SIF is damaged"),
        ("FATAL:   ... could not open image /x.sif: failed to ...: lstat /x.sif: no such file or directory",
         ToolFailed, "the SIF does not exist"),
        ("INFO:    Converting SIF file to temporary sandbox...", ToolFailed, "mounted with FUSE"),
        ("FATAL:   the image's architecture (arm64) could not run on the host's (amd64)",
         ToolFailed, "another processor architecture"),
        ("FATAL:   Couldn't determine user account information: user: unknown userid 12345",
         ToolFailed, "does not know your user account"),
        ("", ToolFailed, "apptainer ended with status 255"),
    ],
)  # fmt: skip
def test_failures_to_start_are_explained(text, kind, what):
    error = apptainer.explain(text, argv=["apptainer", "exec"], status=255)
    assert type(error) is kind
    assert what in error.what
    assert error.why
