"""Find what modules set for containers and communication: compare the environment before and after `module load`.

Runs on: COMPUTE NODE (the batch node). Standard library only. Pure.

Sites configure the network fabric in this way: modules set APPTAINER_BIND, APPTAINERENV_LD_LIBRARY_PATH, NCCL_NET and
so on (LUMI `lumi-aif-singularity-bindings`, OLCF `apptainer-enable-mpi`, Isambard `brics/apptainer-multi-node`). hpcenv
starts containers with a cleaned environment. So hpcenv sets these values itself, and records the module as the origin
of each value. Apptainer 1.4 also reads these variables if their names begin with SINGULARITY instead of APPTAINER. If a
variable is set under both names, the name with APPTAINER has priority (Apptainer's documentation, "Environment and
Metadata", 2026-11). OLCF's modules set APPTAINER_WRAPPER_*. At OLCF, `apptainer` is a shell script of the site, which
appends these values to APPTAINER_* and APPTAINERENV_* (OLCF, container training of 2026-03-26, "Using the
apptainer-enable-mpi and apptainer-enable-gpu modules").
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpcenv.records.codec import SCHEMA
from hpcenv.records.manifest import Bind, Setting
from hpcenv.records.modules import ModuleEffects
from hpcenv.records.variables import is_left_alone, is_tuning, looks_like_credential

# Variables with a list of binds, separated by commas; a bind is SOURCE[:TARGET[:ro|rw]].
_BINDS = (
    "APPTAINER_WRAPPER_BINDPATH", "APPTAINER_WRAPPER_BIND",
    "SINGULARITY_BINDPATH", "SINGULARITY_BIND", "APPTAINER_BINDPATH", "APPTAINER_BIND",
)  # fmt: skip
_FOR_CONTAINER = ("SINGULARITYENV_", "APPTAINERENV_")
_LIBRARIES = ("APPTAINER_WRAPPER_CONTAINLIBS", "SINGULARITY_CONTAINLIBS", "APPTAINER_CONTAINLIBS")
_LIBRARY_PATH = "LD_LIBRARY_PATH"
_WRAPPED_LIBRARY_PATH = "APPTAINER_WRAPPER_LD_LIBRARY_PATH"
# The folder where Apptainer and SingularityCE mount the libraries of CONTAINLIBS. It is on the container's library
# path.
_LIBRARY_FOLDER = "/.singularity.d/libs"
# Variables of GPU and network libraries, in addition to the variables of `is_tuning`.
_OF_LIBRARIES = re.compile(r"(RCCL|HSA|MIOPEN|OFI)_\w+\Z")
# Other settings of the container runtime are not used, because hpcenv makes these settings itself.
_OF_RUNTIME = re.compile(r"(APPTAINER|SINGULARITY)_\w+\Z")
# The variable with the loaded modules, in Lmod and in Environment Modules.
_LOADED = "LOADEDMODULES"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One module: the environment before and after it was loaded."""

    name: str
    before: Mapping[str, str]
    after: Mapping[str, str]

    @property
    def changed(self) -> dict[str, str]:
        """The variables that the module set or changed."""
        return {name: value for name, value in self.after.items() if self.before.get(name) != value}

    @property
    def was_there(self) -> bool:
        """Whether the module was loaded before the job and could not be unloaded. Then its effect cannot be seen."""
        listed = self.before.get(_LOADED, "").split(":")
        return any(one == self.name or one.startswith(f"{self.name}/") for one in listed)

    @property
    def has_failed(self) -> bool:
        """Whether loading the module failed. Old versions of `module` always end with status 0."""
        return not self.was_there and self.before.get(_LOADED, "") == self.after.get(_LOADED, "")


def read_report(text: str) -> tuple[Loaded, ...]:
    """Return the modules in the report of steps/modules.sh, in the order in which they were loaded.

    Args:
        text: a line `before NAME ENVIRONMENT` and a line `after NAME ENVIRONMENT` for each module; the environment is
            the output of `env -0`, in base64.
    """
    lines = text.splitlines()
    return tuple(
        Loaded(name=_name(after), before=_environment(before), after=_environment(after))
        for before, after in zip(lines[::2], lines[1::2], strict=True)
    )


def _name(line: str) -> str:
    return line.partition(" ")[2].rpartition(" ")[0]


def _environment(line: str) -> dict[str, str]:
    entries = base64.b64decode(line.rpartition(" ")[2]).decode("utf-8", "surrogateescape").split("\0")
    return {name: value for name, equals, value in (entry.partition("=") for entry in entries) if equals}


def effects_of(loaded: Sequence[Loaded], *, in_container: bool) -> ModuleEffects:
    """Return the settings of the modules for the ranks.

    Args:
        loaded: the modules in the order in which they were loaded.
        in_container: whether the ranks run in a SIF.
    """
    settings: dict[str, Setting] = {}
    binds: dict[str, Bind] = {}
    notes: list[str] = []
    for module in loaded:
        if module.was_there:
            continue
        origin = f"module {module.name}"
        changed = module.changed
        for name, value in _variables(module, changed, in_container=in_container).items():
            if looks_like_credential(name):
                notes.append(f"{origin}: {name} looks like a credential; to pass it on: --secret {name}=file:PATH")
            else:
                settings[name] = Setting(name=name, value=value, origin=origin, reason="the job loads it")
        if not in_container:
            continue
        for bind in _binds(module, origin):
            if isinstance(bind, Bind):
                binds[bind.target] = bind
            else:
                notes.append(bind)
        used = (*_BINDS, *_LIBRARIES, _WRAPPED_LIBRARY_PATH)
        ignored = [n for n in changed if _OF_RUNTIME.match(n) and n not in used]
        notes += [f"{origin}: {name} is not used; hpcenv itself makes this setting" for name in sorted(ignored)]
    known = "its settings for the ranks are not known: it was loaded before the job, and cannot be unloaded"
    notes += [f"module {module.name}: {known}" for module in loaded if module.was_there]
    shown, hidden = _visible(settings, tuple(binds), in_container=in_container)
    return ModuleEffects(
        schema=SCHEMA,
        settings=tuple(shown[name] for name in sorted(shown)),
        binds=tuple(binds.values()),
        notes=(*notes, *hidden),
    )


def _variables(module: Loaded, changed: Mapping[str, str], *, in_container: bool) -> dict[str, str]:
    """Return the variables of a module that the ranks get. Variables for containers have priority."""
    found = {n: v for n, v in changed.items() if is_tuning(n) or _OF_LIBRARIES.match(n)}
    if in_container:
        for prefix in _FOR_CONTAINER:
            inner = {n.removeprefix(prefix): v for n, v in changed.items() if n.startswith(prefix)}
            found |= {name: value for name, value in inner.items() if _NAME.match(name)}
        if _WRAPPED_LIBRARY_PATH in changed or _LIBRARY_PATH in found:
            folders = [module.after.get(f"{prefix}{_LIBRARY_PATH}", "") for prefix in reversed(_FOR_CONTAINER)]
            own = next(filter(None, folders), "")
            found[_LIBRARY_PATH] = ":".join(filter(None, (own, module.after.get(_WRAPPED_LIBRARY_PATH, ""))))
    return found


def _binds(module: Loaded, origin: str) -> Iterable[Bind | str]:
    """Yield the binds of a module, and notes on the binds that are not used."""
    for name in _BINDS:
        known = _items(module.before.get(name, ""))
        for text in _items(module.after.get(name, "")):
            if text not in known:
                try:
                    yield _bind(text, origin)
                except ValueError as error:
                    yield f"{origin}: {name}: `{text}` is not used: {error}"
    for name in _LIBRARIES:
        known = _items(module.before.get(name, ""))
        for path in _items(module.after.get(name, "")):
            if path not in known and path.startswith("/"):
                target = f"{_LIBRARY_FOLDER}/{path.rpartition('/')[2]}"
                yield Bind(source=path, target=target, read_only=True, optional=True, origin=origin)


def _items(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _bind(text: str, origin: str) -> Bind:
    """Return a bind of APPTAINER_BIND.

    Raises:
        ValueError: the bind has a form that hpcenv does not mount.
    """
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if mode not in ("", "ro", "rw"):
        raise ValueError(f"`{mode}` is not a mode that hpcenv knows (ro or rw)")
    if not source.startswith("/") or not (target or source).startswith("/"):
        raise ValueError("a path is not absolute")
    # The bind is optional, because sites name folders that some nodes do not have.
    return Bind(source=source, target=target or source, read_only=mode == "ro", optional=True, origin=origin)


def _visible(
    settings: Mapping[str, Setting], targets: Sequence[str], *, in_container: bool
) -> tuple[dict[str, Setting], list[str]]:
    """Leave out variables that name a library of the host if the container does not see this library."""
    shown: dict[str, Setting] = {}
    notes: list[str] = []
    for name, setting in settings.items():
        hidden = in_container and name.endswith("_PLUGIN") and setting.value.startswith("/")
        if not hidden or any(_is_below(setting.value, target) for target in targets):
            shown[name] = setting
            continue
        why = f"{setting.value} is a library of the host, which the container does not see"
        if is_left_alone(name):
            shown[name] = Setting(name=name, value="", origin=setting.origin, reason=why)
        notes.append(f"{setting.origin}: {name} is not set: {why}")
    return shown, notes


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
