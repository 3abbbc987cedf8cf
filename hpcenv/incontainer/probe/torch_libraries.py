"""Find the libraries that torch would load.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.files import read_small
from hpcenv.incontainer.probe.paths import list_folder
from hpcenv.incontainer.probe.library_versions import LIBRARIES
from hpcenv.incontainer.probe.loader import Loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.library import Library


def find_torch_libraries(env: ProbedEnvironment, folder: str) -> None:
    """Find the libraries that ``import torch`` loads: its global dependencies, its preloads, its extension module."""
    lib = folder + "/lib/"
    extensions = sorted(n for n in list_folder(folder) if n.startswith("_C.") and n.endswith(".so"))
    own = [n for n in extensions if n == f"_C.{env.values.get('python.soabi')}.so"] or extensions
    if not own:
        raise ValueError("no such library found: torch has no extension module _C")
    source = read_small(env, folder + "/__init__.py")[0].decode("utf-8", "replace")
    loader = Loader(env)
    global_deps = lib + "libtorch_global_deps.so"
    if os.path.isfile(global_deps):
        loader.open(global_deps)
        if loader.missing:  # then torch opens the libraries that it can find by path, and tries again
            loader = Loader(env)
            _preload(env, loader, _preload_names(source, "_preload_cuda_deps"))
            loader.open(global_deps)
        else:
            _preload(env, loader, _eager_preloads(source, loader))
    loader.open(os.path.join(folder, own[0]))
    at_import = list(loader.loaded)
    env.torch_incomplete = bool(loader.missing)
    # torch opens these libraries later, when it needs them.
    cuda = next((mapped for mapped in loader.loaded if os.path.basename(mapped.path) == "libtorch_cuda.so"), None)
    for name in ("libcaffe2_nvrtc.so", "libtorch_nvshmem.so"):
        if cuda is not None and os.path.isfile(lib + name):
            loader.open(lib + name, cuda)
    env.missing_libraries = loader.missing
    for name, (stem, _, _) in LIBRARIES.items():
        library = next((mapped for mapped in loader.loaded[1:] if _is_library(stem, mapped)), None)
        if library is not None:
            env.libraries[name] = library
            if library in at_import:
                env.at_import.add(name)


def _is_library(stem: str, library: Library) -> bool:
    return any(has_stem(stem, os.path.basename(n)) for n in (library.path, library.elf.soname, *library.names))


def has_stem(stem: str, name: str) -> bool:
    """Return whether a file name belongs to the library with this stem, for example libnccl-1a2b.so.2 to libnccl."""
    import re

    return name.startswith(stem) and bool(re.match(re.escape(stem) + r"(-[0-9a-f]+)?\.so(\.[0-9]+)*$", name))


def _preload_names(source: str, function: str) -> list[tuple[str, str]]:
    """Return the pairs (folder, file pattern) that a function of torch/__init__.py names, in its order."""
    import re

    body = re.search(rf"^def {function}\(.*?(?=^\S)", source, re.MULTILINE | re.DOTALL)
    return re.findall(r"""["'](\w+)["']\s*[,:]\s*["'](lib[^"'/]+\.so[^"'/]*)["']""", body.group()) if body else []


def _eager_preloads(source: str, loader: Loader) -> list[tuple[str, str]]:
    """Return the libraries that this torch version preloads even if its global dependencies were found."""
    import re

    body = re.search(r"^def _load_global_deps\(.*?(?=^\S)", source, re.MULTILINE | re.DOTALL)
    text = body.group() if body else ""
    condition = re.search(r"""if ["']([^"']+)["'] not in _maps""", text)
    if condition is None or not any(condition.group(1) in mapped.path for mapped in loader.loaded):
        return []
    if re.search(r"^\s*_preload_cuda_deps\(\)", text, re.MULTILINE):
        return _preload_names(source, "_preload_cuda_deps")
    return _preload_names(source, "_load_global_deps")


def _preload(env: ProbedEnvironment, loader: Loader, pairs: list[tuple[str, str]]) -> None:
    """Open each library from the first folder on sys.path that has it, as torch's _preload_cuda_lib does."""
    from fnmatch import fnmatchcase

    cuda = "cu" + str(env.values.get("torch.cuda", "")).split(".")[0]
    for folder, pattern in pairs:
        for path in env.path:
            for inner in (f"nvidia/{folder}/lib", f"nvidia/{cuda}/lib", f"{folder}/lib"):
                names = sorted(n for n in env.names(os.path.join(path, inner)) if fnmatchcase(n, pattern))
                if names:
                    break
            if names:
                loader.open(os.path.join(path, inner, names[0]))
                break


def with_needs(library: Library) -> list[Library]:
    """Return the files to open, in this order, to load a library as torch does. The last file is the library."""
    ordered: list[Library] = []
    seen: set[int] = set()

    def visit(item: Library) -> None:
        if id(item) not in seen and not item.system:
            seen.add(id(item))
            for need in item.needs:
                visit(need)
            ordered.append(item)

    visit(library)
    return ordered or [library]
