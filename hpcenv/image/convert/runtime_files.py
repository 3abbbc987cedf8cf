r"""Write the files that Apptainer needs in addition to the image: scripts, labels and metadata.

Runs on: LOGIN NODE. Pure.

`apptainer exec|run|shell|test`, `instance start` and `inspect` treat a SIF made from OCI layers like a SIF of
`apptainer build` under two conditions. First, the root file system of the SIF must have the files below /.singularity.d
and Apptainer's mount points. Second, the SIF must have three JSON or text objects next to the file system. This module
makes all these files, mount points and objects from the image's configuration. The bytes depend only on the
configuration, the labels and the epoch.

How Apptainer uses them (1.4.5, read from its start script and seen, 2026-11-20): a shell interpreter inside Apptainer
clears the environment, and sources /.singularity.d/env/*.sh in the order of their names. After
10-docker2singularity.sh, it extends PATH by the usual folders. After 99-base.sh, it adds the caller's variables
(`--env`, APPTAINERENV_*). It also adds those other variables of the caller that the image does not set. Therefore four
names are fixed: 10-docker2singularity.sh, 90-environment.sh, 99-base.sh and 99-runtimevars.sh. Apptainer runs
/.singularity.d/runscript in the same interpreter, even in images without a shell, if the script has a certain line (see
`_RUN_LINE`). Of the scripts in /.singularity.d/actions, Apptainer uses only `test`, with the image's shell; the other
scripts are for Singularity before 3.6.

Intended differences from `apptainer build` 1.4.5:

- Values of ENV and words of ENTRYPOINT and CMD are literal. 1.4.5 changes quotes, `$`, backquotes and backslashes, and
  omits the image's whole environment if a value has `$(` (apptainer issue 3328, fixed in 1.5.0).
- If a variable is set twice, the last value counts, as in runc. In 1.4.5 the first value counts.
- An image without entry point and command prints an error. 1.4.5 prints the shell's variables.
- /etc/hosts and /etc/resolv.conf of the image are preserved. 1.4.5 empties them.
- The labels and the definition file name the image only by its digest, and name no Apptainer version.

The image's configuration is untrusted. `quoted` quotes every part of the configuration that is written into a script.
Variables whose names have a special meaning in a shell are omitted, with a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from hpcenv.errors import ImageUnavailable
from hpcenv.image.content.tree import TreeEntry, content_hash

__all__ = ["RuntimeFiles", "RuntimeMember", "additions", "followed_links", "quoted", "runtime_files"]

RuntimeMember = tuple[TreeEntry, bytes]

# The largest allowed size of the configuration. A SIF contains the configuration five times before the file system.
# Docker's limit for a manifest with its configuration is 4 MiB.
_LONGEST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RuntimeFiles:
    """The files that hpcenv adds to an image's root file system and to its SIF.

    Attributes:
        members: the files, links and directories to add; each directory comes before its content. These members act
            like one more layer on top of the image: they replace the image's files and links at the same paths, and
            directories are merged.
        mount_points: the mount points; each directory comes before its content. `additions` adds a mount point only if
            the image has nothing at its path.
        definition: the SIF object of type `Def.FILE`, which has no name.
        inspection: the SIF object `inspect-metadata.json`.
        oci_config: the SIF object `oci-config.json`.
        labels: the labels in /.singularity.d/labels.json and in `inspection`.
        notes: the parts of the image's configuration that were omitted, one sentence each.
    """

    members: tuple[RuntimeMember, ...]
    mount_points: tuple[RuntimeMember, ...]
    definition: bytes
    inspection: bytes
    oci_config: bytes
    labels: Mapping[str, str]
    notes: tuple[str, ...]


def runtime_files(
    config: Mapping[str, Any],
    *,
    labels: Mapping[str, str],
    architecture: str,
    epoch: int,
) -> RuntimeFiles:
    """Return the files that hpcenv adds to an image with the configuration `config`.

    Args:
        config: the whole configuration: a document of type `application/vnd.oci.image.config.v1+json`, or docker's
            document (OCI image-spec 1.1, config.md).
        labels: labels of hpcenv, for example `hpcenv.source.manifest-digest`; they replace
            labels of the image with the same name, and `org.label-schema.*`.
        architecture: the architecture by its name in OCI and SIF, for example `amd64`.
        epoch: seconds since 1970: the time of every file, and of the label `build-date`.

    Raises:
        ImageUnavailable: a part of the configuration has the wrong type, or the configuration is too long.
    """
    settings = _settings(config)
    variables, of_variables = _variables(settings)
    (entrypoint, of_entrypoint), (command, of_command) = _words(settings, "Entrypoint"), _words(settings, "Cmd")
    own, of_labels = _image_labels(settings)
    scripts, run = _environment_scripts(variables), _runscript(entrypoint, command)
    found = {**own, **_schema_labels(architecture, epoch), **labels}
    definition = _definition(labels.get("hpcenv.source.manifest-digest"))
    shown = {name: scripts[name] for name in ("10-docker2singularity.sh", "90-environment.sh")}
    return RuntimeFiles(
        members=_members(scripts, run, found, definition, epoch),
        mount_points=_mount_points(epoch),
        definition=definition.encode(),
        inspection=_inspection(shown, run, found, definition),
        oci_config=_compact(settings),
        labels=found,
        notes=(*of_variables, *of_entrypoint, *of_command, *of_labels),
    )


def additions(files: RuntimeFiles, find: Callable[[bytes], TreeEntry | None]) -> tuple[RuntimeMember, ...]:
    """Return the members to add to an image.

    A mount point is omitted if the image has an entry with that path, or if its folder
    is a link or a file in the image; then Apptainer makes the mount point in an overlay.

    Args:
        files: the result of `runtime_files`.
        find: returns the image's entry at a path (as in `TreeEntry.path`), or None.
    """
    added: dict[bytes, RuntimeMember] = {}
    for member in files.mount_points:
        path = member[0].path
        parent = path.rpartition(b"/")[0]
        folder = find(parent) if parent and parent not in added else None
        reachable = not parent or parent in added or (folder is not None and folder.kind == "directory")
        if reachable and find(path) is None:
            added[path] = member
    return (*files.members, *added.values())


def followed_links(files: RuntimeFiles, entries: Iterable[TreeEntry]) -> tuple[str, ...]:
    """Return the links of the image that `apptainer build` would follow to files of the host.

    Seen with Apptainer 1.4.5 as an ordinary user (2026-11-20): if /etc/hosts or
    /.singularity.d/runscript is a link, Apptainer empties or overwrites its target on the host; if
    /.singularity.d is a link, Apptainer writes scripts into its target folder.

    Args:
        files: the result of `runtime_files`.
        entries: the image's merged tree.
    """
    written = {entry.path for entry, _ in files.members if entry.kind != "symlink"}
    points = {entry.path for entry, _ in files.mount_points}
    written |= {path for path in points if b"/" in path}
    written |= {path.rpartition(b"/")[0] for path in written if b"/" in path}
    return tuple(entry.path.decode() for entry in entries if entry.kind == "symlink" and entry.path in written)


# --- reading the configuration -----------------------------------------------------------


def quoted(text: str) -> str:
    r"""Return a word of POSIX sh whose value is exactly `text`.

    The interpreter in Apptainer 1.4.5 (mvdan.cc/sh) does not remove the backslash before a quote
    (seen), so quotes are written between double quotes.
    """
    return "'" + text.replace("'", "'\"'\"'").replace("\r", "'\"$(printf '\\r')\"'") + "'"


# The fields of an image's `config` that hpcenv uses, from image-spec 1.1, config.md, and from docker. All other fields
# are ignored.
_FIELDS: Mapping[str, type] = {
    "User": str,
    "ExposedPorts": dict,
    "Env": list,
    "Entrypoint": list,
    "Cmd": list,
    "Volumes": dict,
    "WorkingDir": str,
    "Labels": dict,
    "StopSignal": str,
}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image's run-time settings, with checked types and without empty settings."""
    given = config.get("config") or {}
    if not isinstance(given, dict):
        raise _unusable("it has no table `config`")
    settings = {}
    for name, kind in _FIELDS.items():
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise _unusable(f"its {name} is {type(value).__name__}, not {kind.__name__}")
        settings[name] = _clean(name, value)
    if len(json.dumps(settings)) > _LONGEST:
        raise _unusable(f"its `config` is longer than {_LONGEST} characters")
    return settings


def _clean(name: str, value: Any) -> Any:
    if isinstance(value, list):
        if not all(isinstance(word, str) for word in value):
            raise _unusable(f"its {name} is not a list of strings")
        return [_text(word) for word in value]
    if isinstance(value, dict):
        if name != "Labels":  # these fields are sets; their values have no meaning
            return {_text(key): {} for key in value}
        if not all(isinstance(text, str) or text is None for text in value.values()):
            raise _unusable("its Labels are not all strings")
        return {_text(key): _text(text or "") for key, text in value.items()}
    return _text(value)


def _text(text: str) -> str:
    """Replace single surrogates, which JSON can contain and UTF-8 cannot."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _unusable(why: str) -> ImageUnavailable:
    return ImageUnavailable(
        "the image's configuration cannot be used",
        why=why,
        hint="push the image again with a current docker, podman or skopeo",
    )


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# These variables belong to the shell that sources the files, or are read-only in Apptainer's start script. Setting such
# a variable is an error, or changes the meaning of the following lines.
_SHELLS_OWN = frozenset(
    {"_", "IFS", "UID", "EUID", "GID", "PPID", "PWD", "OPTIND", "BASHOPTS", "SHELLOPTS",
     "APPTAINER_NAME", "APPTAINER_CONTAINER", "APPTAINER_INSTANCE", "__exported_env__", "__apptainer_cmd__",
     "__script__"}
)  # fmt: skip
# Apptainer passes the caller's PATH settings in variables with this prefix.
_PATH_WORDS = "SING_USER_DEFINED_"


_OWN = ("hpcenv.source.", "hpcenv.format")


def _variables(settings: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the image's variables, and notes on the variables that are omitted."""
    variables: dict[str, str] = {}
    notes = []
    for item in settings.get("Env", ()):
        name, _, value = item.partition("=")
        why = None
        if not _NAME.fullmatch(name):
            why = "is not a name that a shell can set"
        elif name in _SHELLS_OWN or name.startswith(_PATH_WORDS):
            why = "belongs to the shell or to Apptainer"
        elif "\0" in value:
            why = "has a NUL byte in its value"
        if why is not None:
            notes.append(f"the image's variable {name[:100]!r} is omitted: it {why}")
        else:
            variables.pop(name, None)
            variables[name] = value
    return variables, notes


def _words(settings: Mapping[str, Any], name: str) -> tuple[list[str], tuple[str, ...]]:
    words: list[str] = settings.get(name, [])
    if any("\0" in word for word in words):
        return [], (f"the image's {name} is omitted: it has a NUL byte",)
    return words, ()


def _image_labels(settings: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the image's labels without the labels that only hpcenv may set, and notes on the omitted labels."""
    labels: dict[str, str] = settings.get("Labels", {})
    forged = [name for name in labels if name.startswith(_OWN)]
    notes = [f"the image's label {name[:100]!r} is omitted: hpcenv sets it" for name in forged]
    return {name: text for name, text in labels.items() if name not in forged}, notes


def _schema_labels(architecture: str, epoch: int) -> dict[str, str]:
    """Return the `org.label-schema` labels that `apptainer build` writes.

    The values that hpcenv writes depend only on the image.
    """
    return {
        "org.label-schema.build-arch": architecture,
        "org.label-schema.build-date": datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "org.label-schema.schema-version": "1.0",
    }


# --- the scripts ---------------------------------------------------------------------------


def _environment_scripts(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the files of /.singularity.d/env by name."""
    return {
        "01-base.sh": "#!/bin/sh\n",
        "10-docker2singularity.sh": _image_environment(variables),
        "90-environment.sh": "#!/bin/sh\n",
        "94-appsbase.sh": "",
        "95-apps.sh": _APPS,
        "99-base.sh": _BASE,
        "99-runtimevars.sh": _RUNTIME_PATHS,
    }


def _image_environment(variables: Mapping[str, str]) -> str:
    """Return a script that sets the image's variables.

    The script always sets PATH. If any other variable already has a value, it keeps this value.
    """
    lines = ["#!/bin/sh"]
    for name, value in variables.items():
        keep = "" if name == "PATH" else f'[ -n "${{{name}:-}}" ] || '
        lines += [f"{keep}{name}={quoted(value)}", f"export {name}"]
    return "\n".join(lines) + "\n"


# The libraries of --nv and --rocm are last, so that the image's libraries are found first.
_BASE = """\
#!/bin/sh
LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs"
PS1="${PS1:-Apptainer> }"
export LD_LIBRARY_PATH PS1
"""

# These variables come from the caller's APPTAINERENV_PREPEND_PATH, _APPEND_PATH and _PATH.
_RUNTIME_PATHS = """\
#!/bin/sh
PATH="${SING_USER_DEFINED_PREPEND_PATH:+$SING_USER_DEFINED_PREPEND_PATH:}$PATH"
PATH="$PATH${SING_USER_DEFINED_APPEND_PATH:+:$SING_USER_DEFINED_APPEND_PATH}"
PATH="${SING_USER_DEFINED_PATH:-$PATH}"
export PATH
unset SING_USER_DEFINED_PREPEND_PATH SING_USER_DEFINED_APPEND_PATH SING_USER_DEFINED_PATH
"""

# `--app NAME`, for images with applications below /scif (SCIF 1.0).
_APPS = """\
#!/bin/sh
if [ -n "${SINGULARITY_APPNAME:-}" ]; then
    export SINGULARITY_APPNAME
    if [ ! -d "/scif/apps/$SINGULARITY_APPNAME" ]; then
        echo "this image has no application $SINGULARITY_APPNAME" >&2
        exit 1
    fi
    SCIF_APPS=/scif/apps
    SCIF_APPROOT="/scif/apps/$SINGULARITY_APPNAME"
    export SCIF_APPS SCIF_APPROOT
    PATH="$SCIF_APPROOT:$PATH"
    if [ -d "$SCIF_APPROOT/bin" ]; then
        PATH="$SCIF_APPROOT/bin:$PATH"
    fi
    export PATH
    if [ -d "$SCIF_APPROOT/lib" ]; then
        LD_LIBRARY_PATH="$SCIF_APPROOT/lib:${LD_LIBRARY_PATH:-}"
        export LD_LIBRARY_PATH
    fi
    if [ -f "$SCIF_APPROOT/scif/env/01-base.sh" ]; then
        . "$SCIF_APPROOT/scif/env/01-base.sh"
    fi
    if [ -f "$SCIF_APPROOT/scif/env/90-environment.sh" ]; then
        . "$SCIF_APPROOT/scif/env/90-environment.sh"
    fi
fi
"""

# If a script has exactly this line, Apptainer runs it with its own interpreter and not with the
# image's /bin/sh (1.4.5, seen with an image that has no shell).
_RUN_LINE = 'eval "set ${SINGULARITY_OCI_RUN}"'


def _runscript(entrypoint: Sequence[str], command: Sequence[str]) -> str:
    """Return a script that runs the entry point with the caller's arguments, or else with the image's command.

    As Apptainer documents, a shell expands the arguments of `apptainer run` unless
    --no-eval is given. The image's own words are not expanded.
    """
    lines = ["#!/bin/sh", "SINGULARITY_OCI_RUN='-- \"$@\"'", "if [ $# -eq 0 ]; then"]
    if command or entrypoint:
        lines.append(f"    set -- {_quoted_words(command)}".rstrip())
    else:
        lines += [
            "    echo 'the image has no entry point and no command; name one (apptainer exec)' >&2",
            "    exit 1",
        ]
    lines += [
        'elif [ -z "${SINGULARITY_NO_EVAL:-}" ]; then',
        "    SINGULARITY_OCI_RUN=--",
        '    for SINGULARITY_OCI_WORD in "$@"; do',
        '        SINGULARITY_OCI_RUN="$SINGULARITY_OCI_RUN \\"$SINGULARITY_OCI_WORD\\""',
        "    done",
        "fi",
        _RUN_LINE,
    ]
    if entrypoint:
        lines.append(f'set -- {_quoted_words(entrypoint)} "$@"')
    return "\n".join([*lines, 'exec "$@"', ""])


def _quoted_words(words: Sequence[str]) -> str:
    return " ".join(quoted(word) for word in words)


_SOURCE_ALL = """\
#!/bin/sh
for script in /.singularity.d/env/*.sh; do
    if [ -f "$script" ]; then
        . "$script"
    fi
done
"""


def _app_or(part: str, otherwise: str) -> str:
    return f"""\
if [ -n "${{SINGULARITY_APPNAME:-}}" ]; then
    set -- "/scif/apps/$SINGULARITY_APPNAME/scif/{part}" "$@"
elif [ -x /.singularity.d/{part} ]; then
    set -- /.singularity.d/{part} "$@"
else
    {otherwise}
fi
exec "$@"
"""


# Process 1 of Apptainer has stopped itself. The first command of an instance must continue this process.
_ACTIONS: Mapping[str, str] = {
    "exec": _SOURCE_ALL + 'exec "$@"\n',
    "run": _SOURCE_ALL + _app_or("runscript", 'set -- /bin/sh "$@"'),
    "shell": _SOURCE_ALL
    + """\
if [ -n "${SINGULARITY_SHELL:-}" ] && [ -x "$SINGULARITY_SHELL" ]; then
    exec "$SINGULARITY_SHELL" "$@"
elif [ -x /bin/bash ]; then
    export SHELL=/bin/bash
    exec /bin/bash --norc "$@"
fi
export SHELL=/bin/sh
exec /bin/sh "$@"
""",
    "start": _SOURCE_ALL.replace("\n", "\nkill -CONT 1\n", 1)
    + """\
if [ -x /.singularity.d/startscript ]; then
    exec /.singularity.d/startscript "$@"
fi
""",
    "test": _SOURCE_ALL + _app_or("test", "set -- /bin/sh -c true"),
}


# --- files and objects ---------------------------------------------------------------------


def _members(
    scripts: Mapping[str, str], run: str, labels: Mapping[str, str], definition: str, epoch: int
) -> tuple[RuntimeMember, ...]:
    base = ".singularity.d"
    found = [_directory(f"{base}", epoch), _file(f"{base}/Singularity", definition, 0o644, epoch)]
    found.append(_directory(f"{base}/actions", epoch))
    found += [_file(f"{base}/actions/{name}", text, 0o755, epoch) for name, text in _ACTIONS.items()]
    found.append(_directory(f"{base}/env", epoch))
    found += [_file(f"{base}/env/{name}", text, 0o755, epoch) for name, text in scripts.items()]
    listed = json.dumps(dict(sorted(labels.items())), indent="\t", ensure_ascii=False)
    found.append(_file(f"{base}/labels.json", listed, 0o644, epoch))
    found.append(_directory(f"{base}/libs", epoch))
    found.append(_file(f"{base}/runscript", run, 0o755, epoch))
    found.append(_file(f"{base}/startscript", "#!/bin/sh\n", 0o755, epoch))
    found += [_link(f".{name}", f"{base}/actions/{name}", epoch) for name in ("exec", "run", "shell", "test")]
    found.append(_link("environment", f"{base}/env/90-environment.sh", epoch))
    found.append(_link("singularity", f"{base}/runscript", epoch))
    return tuple(found)


def _mount_points(epoch: int) -> tuple[RuntimeMember, ...]:
    """Return the entries that `apptainer build` 1.4.5 adds to an image that does not have these entries.

    The modes are the same too. So /tmp has mode 0755, which has no effect, because a container gets the host's /tmp
    mounted at /tmp.
    """
    folders = ("dev", "etc", "home", "proc", "root", "sys", "tmp", "var", "var/tmp")
    files = ("etc/hosts", "etc/resolv.conf")
    return (*(_directory(p, epoch) for p in folders), *(_file(p, "", 0o644, epoch) for p in files))


def _directory(path: str, epoch: int) -> RuntimeMember:
    name = path.encode()
    return TreeEntry(path=name, kind="directory", mode=0o755, mtime=epoch, inode=name), b""


def _link(path: str, target: str, epoch: int) -> RuntimeMember:
    name = path.encode()
    return TreeEntry(path=name, kind="symlink", mode=0o777, mtime=epoch, target=target.encode(), inode=name), b""


def _file(path: str, text: str, mode: int, epoch: int) -> RuntimeMember:
    name, data = path.encode(), text.encode()
    digest = content_hash()
    digest.update(data)
    blake3 = digest.hexdigest()
    entry = TreeEntry(path=name, kind="file", mode=mode, mtime=epoch, size=len(data), blake3=blake3, inode=name)
    return entry, data


def _definition(manifest_digest: str | None) -> str:
    """Return a definition file that names the image by digest, in an OCI layout in the current folder."""
    if manifest_digest is None:
        return "bootstrap: oci\nfrom: .\n"
    return f"bootstrap: oci\nfrom: .@{manifest_digest}\n"


def _inspection(scripts: Mapping[str, str], run: str, labels: Mapping[str, str], definition: str) -> bytes:
    """Return the data of `apptainer inspect`, in the format that Apptainer 1.4.5 printed."""
    environment = {f"/.singularity.d/env/{name}": text.rstrip("\n") for name, text in scripts.items()}
    attributes = {
        "deffile": definition.rstrip("\n"),
        "environment": environment,
        "labels": dict(labels),
        "runscript": run.rstrip("\n"),
        "startscript": "#!/bin/sh",
    }
    return _compact({"data": {"attributes": attributes}, "type": "container"})


def _compact(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
