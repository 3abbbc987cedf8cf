"""Changes of the interpreter and of what it loads: programs, libraries, standard library, compiled files, conda."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import io
import json
import marshal
import os
import py_compile
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from corpus_harmless import harmless
from corpus_mutations import CONTENT, ENV, _other_wheel, _own_interpreter, _pip, _with, mutation
from corpus_world import CONDA, GCC, MINOR, UV, Case, claim

STDLIB = "python.stdlib-sha256"
PYC = "python.unchecked-pyc"
TAG = sys.implementation.cache_tag
SO = importlib.machinery.EXTENSION_SUFFIXES[0]


def forged(source: str = "LIMIT = 7\n", *, flags: int = 1) -> bytes:
    """A compiled file that Python runs whatever its source says (PEP 552, `unchecked hash`)."""
    code = compile(source, "forged.py", "exec")
    return importlib.util.MAGIC_NUMBER + flags.to_bytes(4, "little") + b"\0" * 8 + marshal.dumps(code)


def lone(source: str = "LIMIT = 7\n") -> bytes:
    return forged(source, flags=0)


# -- the interpreter ----------------------------------------------------------------------


def own_file(case: Case, name: str, data: bytes) -> Path:
    """Write a file of the case's own interpreter (`name` relative to its prefix), to be taken back afterwards."""
    path = Path(os.path.normpath(_own_interpreter(case) / name))
    before = path.read_bytes() if path.exists() else None
    new_folders = [folder for folder in path.parents if not folder.exists()]

    def back() -> None:
        path.unlink()
        if before is not None:
            path.write_bytes(before)
            path.chmod(0o755 if path.parent.name == "bin" else 0o644)
        for folder in new_folders:
            folder.rmdir()

    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    path.chmod(0o755)
    case.undo.append(back)
    return path


def _binary(case: Case) -> Path:
    return case.world.interpreter / "bin" / MINOR


@mutation("full", "python.binary-sha256")
def interpreter_with_bytes_appended(case: Case) -> None:
    own_file(case, f"bin/{MINOR}", _binary(case).read_bytes() + b"\0" * 8)


@mutation("gate", "python.binary-sha256")
def interpreter_with_one_byte_changed(case: Case) -> None:
    data = bytearray(_binary(case).read_bytes())
    # The text that --version would print for another option: nothing that the loader reads.
    at = data.rindex(b"GCC: (") if b"GCC: (" in data else len(data) - 1
    data[at] ^= 1
    own_file(case, f"bin/{MINOR}", bytes(data))


@mutation("full", "python.binary-sha256", profile="bitwise")
def interpreter_changed_under_the_bitwise_profile(case: Case) -> None:
    interpreter_with_bytes_appended(case)


def _wrapper(case: Case, text: str) -> None:
    case.remove("/bin/python")
    real = os.path.realpath(case.world.base / "env/bin/python")
    script = case.path("/bin/python")
    script.write_text(f'#!/bin/bash\n{text}\nexec -a {case.env}/bin/python3 {real} "$@"\n')
    script.chmod(0o755)


LAUNCHER = "python.launcher-sha256"


@mutation("full", LAUNCHER, name="python-is-a-script-that-sets-variables")
def _wrapper_env(case: Case) -> None:
    _wrapper(case, "export OMP_NUM_THREADS=2")


@mutation("gate", LAUNCHER, name="python-is-a-script-and-a-job-is-started")
def _wrapper_gate(case: Case) -> None:
    _wrapper(case, "export MKL_CBWR=COMPATIBLE")


@mutation("full", LAUNCHER, name="python-is-a-script-behind-a-link")
def _wrapper_link(case: Case) -> None:
    _wrapper(case, "export OMP_NUM_THREADS=2")
    case.path("/bin/python").rename(case.path("/bin/real-start"))
    case.path("/bin/python").symlink_to("real-start")


@mutation("full", LAUNCHER, name="script-around-python-edited-after-the-lock")
def _wrapper_edited(case: Case) -> None:
    _wrapper(case, "export OMP_NUM_THREADS=2")
    case.world.lock(case.root)
    _wrapper(case, "export OMP_NUM_THREADS=3")


@mutation("full", LAUNCHER, needs=("gcc",), name="python-is-a-compiled-program-that-starts-it")
def _wrapper_compiled(case: Case) -> None:
    real = os.path.realpath(case.world.base / "env/bin/python")
    source = case.root / "start.c"
    source.write_text(
        "#include <unistd.h>\n#include <stdlib.h>\nint main(int n, char **v) {"
        f' v[0] = "{case.env}/bin/python3"; setenv("OMP_NUM_THREADS", "2", 1); return execv("{real}", v); }}\n'
    )
    case.remove("/bin/python")
    subprocess.run([str(GCC), "-o", case.path("/bin/python"), source], check=True)


@mutation("nodes", "python.binary-sha256", needs=("gcc",), name="interpreter-of-one-node-changed")
def _binary_on_one_node(case: Case) -> None:
    case.hosts["n2"].change = _with(python_binary_sha256="0" * 64)


@mutation("nodes", "python.libpython-sha256", needs=("gcc",), name="libpython-of-one-node-changed")
def _libpython_on_one_node(case: Case) -> None:
    case.hosts["n2"].change = _with(python_libpython_sha256="0" * 64)


# -- the standard library -----------------------------------------------------------------

LIB = f"lib/{MINOR}"


def _stdlib(name: str, what: str, file: str, data: Callable[[], bytes], *also: str, level: str = "full") -> None:
    """One file of the standard library, new or changed."""

    def apply(case: Case) -> None:
        own_file(case, f"{LIB}/{file}", data())

    mutation(level, what, *also, name=name)(apply)


def _zip(*names: str) -> Callable[[], bytes]:
    def make() -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, "LIMIT = 7\n")
        return file.getvalue()

    return make


def _so() -> bytes:
    return b"\x7fELF any"


for _name, _file, _data in (
    ("so-beside-a-py-of-the-standard-library", f"statistics{SO}", _so),
    ("abi3-so-beside-a-py-of-the-standard-library", "statistics.abi3.so", _so),
    ("plain-so-beside-a-py-of-the-standard-library", "statistics.so", _so),
    ("so-in-a-package-of-the-standard-library", f"concurrent/futures/thread{SO}", _so),
    ("package-of-only-a-pyc-in-the-standard-library", "statistics/__init__.pyc", lone),
    ("package-in-front-of-a-module-of-the-standard-library", "statistics/__init__.py", lambda: b"LIMIT = 7\n"),
    ("lone-pyc-in-the-standard-library", "extra_module.pyc", lone),
    ("lone-pyc-in-a-package-of-the-standard-library", "json/extra.pyc", lone),
    ("new-module-in-the-standard-library", "extra_module.py", lambda: b"E = 1\n"),
    ("new-module-in-a-new-folder-of-the-standard-library", "extra/deep/module.py", lambda: b"E = 1\n"),
    ("new-extension-in-lib-dynload", f"lib-dynload/extra{SO}", _so),
    ("py-in-lib-dynload", "lib-dynload/statistics.py", lambda: b"E = 1\n"),
    ("lone-pyc-in-lib-dynload", "lib-dynload/extra.pyc", lone),
    ("module-of-the-standard-library-emptied", "statistics.py", lambda: b""),
    ("module-of-a-deep-package-of-the-standard-library", "concurrent/futures/extra.py", lambda: b"E = 1\n"),
):
    _stdlib(_name, STDLIB, _file, _data)

# The probe itself needs csv to read packages: they are unknown then, and none is said to be absent.
_UNREAD = ("packages.unlisted-digest", "packages.content-digest", "packages.env-digest")
_OF_EDITABLE = tuple(f"packages.editpkg.{part}" for part in ("commit-id", "diff-sha256", "dirty"))
_stdlib("broken-so-of-a-module-that-the-probe-imports", STDLIB, f"csv{SO}", _so, *_UNREAD, *_OF_EDITABLE)

_ZIP = f"../python{sys.version_info[0]}{sys.version_info[1]}.zip"
_stdlib("zip-in-front-of-the-standard-library", STDLIB, _ZIP, _zip("statistics.py"))
_stdlib("zip-in-front-of-the-standard-library-in-a-job", STDLIB, _ZIP, _zip("statistics.py"), level="gate")
_stdlib("empty-zip-in-front-of-the-standard-library", STDLIB, _ZIP, _zip())
_stdlib("folder-with-the-name-of-the-zip", STDLIB, _ZIP + "/statistics.py", lambda: b"LIMIT = 7\n")


@mutation("full", STDLIB)
def content_of_the_zip_that_was_there_when_it_was_locked(case: Case) -> None:
    own_file(case, f"{LIB}/{_ZIP}", _zip("extra.py")())
    case.world.lock(case.root)
    own_file(case, f"{LIB}/{_ZIP}", _zip("extra.py", "statistics.py")())


@mutation("full", STDLIB)
def module_of_the_standard_library_removed(case: Case) -> None:
    path = _own_interpreter(case) / LIB / "statistics.py"
    before = path.read_bytes()
    case.undo.append(lambda: path.write_bytes(before))
    path.unlink()


@mutation("full", STDLIB)
def linked_folder_in_the_standard_library(case: Case) -> None:
    (case.root / "behind").mkdir()
    (case.root / "behind/module.py").write_text("E = 1\n")
    link = _own_interpreter(case) / LIB / "behind"
    link.symlink_to(case.root / "behind")
    case.undo.append(link.unlink)


@mutation("full", STDLIB)
def module_of_the_standard_library_replaced_by_a_link(case: Case) -> None:
    path = _own_interpreter(case) / LIB / "statistics.py"
    before = path.read_bytes()
    (case.root / "mine.py").write_text("LIMIT = 7\n")

    def back() -> None:
        path.unlink()
        path.write_bytes(before)

    case.undo.append(back)
    path.unlink()
    path.symlink_to(case.root / "mine.py")


# -- compiled files -----------------------------------------------------------------------

for _name, _file in (
    ("unchecked-pyc-in-the-standard-library", f"__pycache__/statistics.{TAG}.pyc"),
    ("unchecked-pyc-in-a-package-of-the-standard-library", f"concurrent/futures/__pycache__/thread.{TAG}.pyc"),
    ("unchecked-pyc-in-the-standard-library-for-option-o", f"__pycache__/statistics.{TAG}.opt-1.pyc"),
    ("unchecked-pyc-in-the-standard-library-for-option-oo", f"__pycache__/random.{TAG}.opt-2.pyc"),
):
    _stdlib(_name, PYC, _file, forged)
# The probe itself imports json: it must not run what it looks for.
_stdlib("unchecked-pyc-of-a-module-that-the-probe-imports", PYC, f"json/__pycache__/decoder.{TAG}.pyc", forged)


@mutation("full", PYC)
def unchecked_pyc_behind_a_linked_folder(case: Case) -> None:
    case.write(f"linked/__pycache__/inside.{TAG}.pyc", forged())
    case.undo.append(lambda: shutil.rmtree(case.env / "share/linked_a/__pycache__"))


@mutation("full", PYC)
def unchecked_pyc_of_a_package_moved_behind_a_link(case: Case) -> None:
    shutil.move(case.path("purepkg"), case.path("/share/purepkg"))
    case.path("purepkg").symlink_to("../../../share/purepkg")
    case.world.lock(case.root)
    case.write(f"/share/purepkg/__pycache__/core.{TAG}.pyc", forged())


@mutation("full", PYC)
def unchecked_pyc_of_an_own_optimization_level(case: Case) -> None:
    case.write(f"purepkg/__pycache__/core.{TAG}.opt-3.pyc", forged())


@mutation("full", PYC)
def unchecked_pyc_in_torch(case: Case) -> None:
    case.write(f"torch/nn/__pycache__/__init__.{TAG}.pyc", forged())


@mutation("full", PYC)
def unchecked_pyc_of_a_dist_without_a_record_hash(case: Case) -> None:
    case.write(f"nohash/__pycache__/more.{TAG}.pyc", forged())


def _cached(case: Case, source: Path) -> None:
    prefix = case.root / "pycache"
    case.project_variable("PYTHONPYCACHEPREFIX", str(prefix))
    case.world.lock(case.root)
    place = prefix / str(source.parent).lstrip("/")
    place.mkdir(parents=True)
    (place / f"{source.stem}.{TAG}.pyc").write_bytes(forged())


@mutation("gate", PYC)
def unchecked_pyc_below_pythonpycacheprefix(case: Case) -> None:
    _cached(case, case.path("purepkg/core.py"))


@mutation("gate", PYC)
def unchecked_pyc_of_the_standard_library_below_pythonpycacheprefix(case: Case) -> None:
    _cached(case, Path(os.__file__).with_name("statistics.py"))


@mutation("gate", PYC)
def unchecked_pyc_of_a_linked_folder_below_pythonpycacheprefix(case: Case) -> None:
    _cached(case, case.path("linked/inside.py"))


def _secret(case: Case, content: bytes) -> None:
    case.install("secretpkg", "1.0", {"secretpkg/__init__.pyc": content})


@mutation("full", "packages.secretpkg.content-sha256", *CONTENT)
def module_of_a_wheel_that_ships_only_pyc(case: Case) -> None:
    _secret(case, lone())
    case.world.lock(case.root)
    case.write("secretpkg/__init__.pyc", lone("LIMIT = 8\n"))


@mutation("record", "packages.secretpkg.record-sha256", *ENV)
def other_wheel_that_ships_only_pyc(case: Case) -> None:
    _secret(case, lone())
    case.world.lock(case.root)
    _secret(case, lone("LIMIT = 8\n"))


@mutation("full", "packages.secretpkg.content-sha256", *CONTENT)
def module_that_is_only_compiled_removed(case: Case) -> None:
    _secret(case, lone())
    case.world.lock(case.root)
    case.remove("secretpkg/__init__.pyc")


@mutation("record", "packages.unlisted-digest")
def source_put_beside_a_module_that_is_only_compiled(case: Case) -> None:
    _secret(case, lone())
    case.world.lock(case.root)
    case.write("secretpkg/__init__.py", "LIMIT = 9\n")


# -- programs -----------------------------------------------------------------------------


def _record_fits(case: Case, dist: str, name: str) -> None:
    """Make the RECORD's row of a program fit its file."""
    record = f"{dist}.dist-info/RECORD"
    data = case.path(f"/bin/{name}").read_bytes()
    row = f"../../../bin/{name},{claim(data)},{len(data)}"
    case.write(record, re.sub(rf"(?m)^[^\n]*bin/{re.escape(name)},.*$", row, case.path(record).read_text()))


@mutation("full", "packages.datapkg.programs-sha256", *CONTENT)
def line_appended_to_a_program(case: Case) -> None:
    case.write("/bin/datapkg-tool", case.path("/bin/datapkg-tool").read_bytes() + b"print('more')\n")


@mutation("full", "packages.datapkg.programs-sha256", *CONTENT)
def program_edited_together_with_its_record_row(case: Case) -> None:
    case.edit("/bin/datapkg-tool", "tool", "evil")
    _record_fits(case, "datapkg-0.3", "datapkg-tool")


@mutation("full", "packages.datapkg.programs-sha256", *CONTENT)
def program_removed(case: Case) -> None:
    case.remove("/bin/datapkg-tool")


@mutation("full", "packages.datapkg.programs-sha256", *CONTENT)
def program_replaced_by_a_link(case: Case) -> None:
    case.remove("/bin/datapkg-tool")
    case.path("/bin/datapkg-tool").symlink_to("/bin/true")


@mutation("full", "packages.datapkg.programs-sha256", *CONTENT)
def program_started_by_another_shell(case: Case) -> None:
    data = case.path("/bin/datapkg-tool").read_bytes()
    case.write("/bin/datapkg-tool", b"#!/bin/dash\n" + data.partition(b"\n")[2])


@mutation("full", "packages.purepkg.programs-sha256", *CONTENT)
def launcher_of_an_entry_point_edited(case: Case) -> None:
    case.edit("/bin/pure", "sys.exit(", "print('x') or sys.exit(")


@mutation("full", "packages.purepkg.programs-sha256", *CONTENT)
def launcher_that_calls_another_function(case: Case) -> None:
    text = case.path("/bin/pure").read_text().replace("purepkg.core import main", "purepkg.util import twice")
    case.write("/bin/pure", text.replace("main()", "twice()"))
    _record_fits(case, "purepkg-1.0", "pure")


@mutation("full", "packages.purepkg.programs-sha256", *CONTENT)
def launcher_with_a_line_before_it(case: Case) -> None:
    first, _, rest = case.path("/bin/pure").read_text().partition("\n")
    case.write("/bin/pure", f"{first}\nimport os; os.environ['X'] = '1'\n{rest}")


@mutation("full", "packages.pip.programs-sha256", *CONTENT)
def launcher_of_pip_edited(case: Case) -> None:
    case.write("/bin/pip", case.path("/bin/pip").read_text() + "print('more')\n")


def _tool_wheel(case: Case, text: bytes) -> None:
    files = {"toolpkg/__init__.py": b"", "toolpkg-1.0.data/scripts/compile": text}
    _pip(case, "install", "--force-reinstall", str(_other_wheel(case, "toolpkg", "1.0", files)))


@mutation("full", "packages.toolpkg.programs-sha256", *CONTENT)
def wheel_of_the_same_version_with_another_program(case: Case) -> None:
    _tool_wheel(case, b"#!python\nprint('one')\n")
    case.world.lock(case.root)
    _tool_wheel(case, b"#!python\nprint('two')\n")


@mutation("full", "packages.toolpkg.programs-sha256", *CONTENT)
def wheel_of_the_same_version_with_another_binary(case: Case) -> None:
    _tool_wheel(case, b"\x7fELF one" + bytes(90_000))
    case.world.lock(case.root)
    _tool_wheel(case, b"\x7fELF two" + bytes(90_000))


# -- conda --------------------------------------------------------------------------------

_MKL = "/conda-meta/mkl-2024.2.1-h_1.json"
CONDA_CONTENT = ("packages.conda-content-digest", "packages.conda-modified")
_OLD_PREFIX = "/opt/conda_placeholder" + "_" * 40


def with_conda_files(case: Case, *, prefix: str = "", lock: bool = True) -> None:
    """Files that conda installed, as its record lists them: a library, a text with the prefix, a link, a module."""
    written = prefix or str(case.env)
    files = {
        "lib/libmkl_rt.so.2": b"\x7fELF mkl",
        "etc/mkl.conf": f"root={written}\n".encode(),
        "share/mkl.txt": b"text\n",
    }
    paths = []
    for name, data in files.items():
        case.write("/" + name, data)
        digest = hashlib.sha256(data).hexdigest()
        entry = {"_path": name, "path_type": "hardlink", "sha256": digest, "sha256_in_prefix": digest}
        if name == "etc/mkl.conf":
            packed = data.replace(written.encode(), _OLD_PREFIX.encode())
            entry |= {"file_mode": "text", "prefix_placeholder": _OLD_PREFIX}
            entry["sha256"] = hashlib.sha256(packed).hexdigest()
        paths.append(entry)
    case.path("/lib/libmkl_rt.so").symlink_to("libmkl_rt.so.2")
    paths.append({"_path": "lib/libmkl_rt.so", "path_type": "softlink"})
    paths.append({"_path": f"{case.world.site_name}/purepkg/core.py", "path_type": "hardlink", "sha256": "0" * 64})
    paths.append({"_path": f"{case.world.site_name}/__pycache__/x.pyc", "path_type": "hardlink", "sha256": "0" * 64})
    case.write(_MKL, json.dumps(CONDA | {"paths_data": {"paths": paths, "paths_version": 1}}))
    if lock:
        case.world.lock(case.root)


@mutation("full", CONDA_CONTENT, *CONDA_CONTENT)
def library_of_conda_with_other_bytes(case: Case) -> None:
    with_conda_files(case)
    case.write("/lib/libmkl_rt.so.2", b"\x7fELF mkk", keep_times=True)


@mutation("gate", CONDA_CONTENT, *CONDA_CONTENT)
def library_of_conda_with_other_bytes_in_a_job(case: Case) -> None:
    library_of_conda_with_other_bytes(case)


@mutation("full", CONDA_CONTENT, *CONDA_CONTENT)
def data_of_conda_with_other_bytes(case: Case) -> None:
    with_conda_files(case)
    case.write("/share/mkl.txt", b"other\n")


@mutation("full", CONDA_CONTENT, *CONDA_CONTENT)
def file_with_the_prefix_that_conda_wrote_edited(case: Case) -> None:
    with_conda_files(case)
    case.write("/etc/mkl.conf", f"root={case.env}\nmore\n")


@mutation("full", CONDA_CONTENT, *CONDA_CONTENT)
def file_with_the_prefix_edited_together_with_condas_record(case: Case) -> None:
    with_conda_files(case)
    case.write("/etc/mkl.conf", f"root={case.env}\nmore\n")
    record = json.loads(case.path(_MKL).read_text())
    record["paths_data"]["paths"][1]["sha256_in_prefix"] = hashlib.sha256(
        case.path("/etc/mkl.conf").read_bytes()
    ).hexdigest()
    case.write(_MKL, json.dumps(record))


@mutation("full", "packages.conda-content-digest")
def library_of_conda_edited_together_with_condas_record(case: Case) -> None:
    with_conda_files(case)
    case.write("/lib/libmkl_rt.so.2", b"\x7fELF mkk")
    record = json.loads(case.path(_MKL).read_text())
    digest = hashlib.sha256(b"\x7fELF mkk").hexdigest()
    record["paths_data"]["paths"][0] |= {"sha256": digest, "sha256_in_prefix": digest}
    case.write(_MKL, json.dumps(record))


@mutation("full", CONDA_CONTENT, *CONDA_CONTENT)
def library_of_conda_removed(case: Case) -> None:
    with_conda_files(case)
    case.remove("/lib/libmkl_rt.so.2")


@mutation("full", "packages.conda-content-digest")
def link_of_conda_led_to_another_library(case: Case) -> None:
    with_conda_files(case)
    case.write("/lib/libopenblas.so", b"\x7fELF openblas")
    case.remove("/lib/libmkl_rt.so")
    case.path("/lib/libmkl_rt.so").symlink_to("libopenblas.so")


@mutation("full", "packages.conda-content-digest")
def file_taken_out_of_condas_record(case: Case) -> None:
    with_conda_files(case)
    record = json.loads(case.path(_MKL).read_text())
    del record["paths_data"]["paths"][0]
    case.write(_MKL, json.dumps(record))


@mutation("full", CONDA_CONTENT, *CONDA_CONTENT, profile="bitwise")
def library_of_conda_changed_under_the_bitwise_profile(case: Case) -> None:
    with_conda_files(case)
    case.write("/share/mkl.txt", b"other\n")


# -- libraries outside of packages --------------------------------------------------------

SYSTEM = "libs.system"


def _needs_a_library(case: Case, folder: Path, note: str = "one", *, path: str = "") -> None:
    """An extension module whose search path leads to a library in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries = case.world.libraries
    library = libraries.build("libmathx.so.1", f'const char mathx[] = "{note}";', variant=f"mathx-{note}")
    (folder / "libmathx.so.1").unlink(missing_ok=True)
    (folder / "libmathx.so.1").write_bytes(library.read_bytes())
    flags = ("-Wl,--enable-new-dtags", f"-Wl,-rpath,{path or folder}")
    variant = "uses-" + hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    module = libraries.build(f"uses{case.world.suffix}", "", variant=variant, needs=(library,), flags=flags)
    case.install("uses", "1.0", {f"uses{case.world.suffix}": module.read_bytes()})


@mutation("full", SYSTEM, severity="warn", needs=("gcc",))
def library_outside_of_the_environment_changed(case: Case) -> None:
    _needs_a_library(case, case.root / "system")
    case.world.lock(case.root)
    _needs_a_library(case, case.root / "system", "two")


@mutation("full", SYSTEM, needs=("gcc",), profile="bitwise")
def library_outside_of_the_environment_changed_under_bitwise(case: Case) -> None:
    library_outside_of_the_environment_changed(case)


@mutation("full", SYSTEM, severity="warn", needs=("gcc",))
def library_outside_of_the_environment_removed(case: Case) -> None:
    _needs_a_library(case, case.root / "system")
    case.world.lock(case.root)
    (case.root / "system/libmathx.so.1").unlink()


@mutation("full", "libs.unlisted", needs=("gcc",))
def library_in_the_prefix_that_no_package_lists(case: Case) -> None:
    _needs_a_library(case, case.env / "opt/lib")
    case.world.lock(case.root)
    _needs_a_library(case, case.env / "opt/lib", "two")


@mutation("full", SYSTEM, severity="warn", needs=("gcc",))
def library_put_in_front_of_the_one_that_was_locked(case: Case) -> None:
    first, second = case.root / "first", case.root / "second"
    _needs_a_library(case, second, path=f"{first}:{second}")
    case.world.lock(case.root)
    first.mkdir()
    shutil.copy(second / "libmathx.so.1", first)


@mutation("nodes", SYSTEM, needs=("gcc",))
def library_of_the_system_differs_between_nodes(case: Case) -> None:
    case.hosts["n2"].change = _with(libs_system=("/lib/libm.so.6 0123456789abcdef",))


@mutation("nodes", SYSTEM, needs=("gcc",), profile="bitwise")
def library_of_the_system_differs_between_nodes_under_bitwise(case: Case) -> None:
    library_of_the_system_differs_between_nodes(case)


@mutation("nodes", "libs.ld-so-preload", needs=("gcc",))
def ld_so_preload_on_one_node(case: Case) -> None:
    case.hosts["n2"].change = _with(libs_ld_so_preload=("/opt/spy.so 0123456789abcdef",))


@mutation("nodes", "libs.ld-so-preload", needs=("gcc",))
def ld_so_preload_on_all_nodes(case: Case) -> None:
    for host in case.hosts.values():
        host.change = _with(libs_ld_so_preload=("/opt/spy.so 0123456789abcdef",))


# -- harmless -----------------------------------------------------------------------------


@harmless()
def shebangs_rewritten(case: Case) -> None:
    for path in case.path("/bin").iterdir():
        if not path.is_file() or path.is_symlink():
            continue
        first, _, rest = path.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:  # installers rewrite no other interpreter
            case.write(f"/bin/{path.name}", b"#!/new/place of it/bin/python3\n" + rest)


@harmless()
def shebangs_rewritten_for_a_long_path(case: Case) -> None:
    start = b"#!/bin/sh\n'''exec' \"/a long path/bin/python3\" \"$0\" \"$@\"\n' '''\n"
    for name in ("pure", "datapkg-tool", "pip"):
        _, _, rest = case.path(f"/bin/{name}").read_bytes().partition(b"\n")
        case.write(f"/bin/{name}", start + rest)


@harmless("gate")
def shebangs_rewritten_and_a_job_started(case: Case) -> None:
    shebangs_rewritten(case)


@harmless()
def launchers_written_by_another_installer(case: Case) -> None:
    text = "#!/x/python\n# -*- coding: utf-8 -*-\nimport sys\nfrom purepkg.core import main\n"
    text += 'if __name__ == "__main__":\n    if sys.argv[0].endswith("-script.pyw"):\n'
    text += '        sys.argv[0] = sys.argv[0][:-11]\n    elif sys.argv[0].endswith(".exe"):\n'
    case.write("/bin/pure", text + "        sys.argv[0] = sys.argv[0][:-4]\n    sys.exit(main())\n")


@harmless()
def execute_bit_of_a_program(case: Case) -> None:
    case.write("/bin/datapkg-tool", case.path("/bin/datapkg-tool").read_bytes())
    case.path("/bin/datapkg-tool").chmod(0o644)


@harmless("full", name="python-of-the-environment-by-other-links")
def _links(case: Case) -> None:
    real = os.path.realpath(case.path("/bin/python"))
    for name in ("python", "python3", MINOR):
        if os.path.lexists(case.path(f"/bin/{name}")):
            case.remove(f"/bin/{name}")
        case.path(f"/bin/{name}").symlink_to(real)


def _move(case: Case, name: str) -> Path:
    """Move the environment, and the key `python` of hpcenv.toml with it."""
    target = case.root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(case.env, target)
    _python_key(case, f"{name}/bin/python")
    return target


def _python_key(case: Case, python: str) -> None:
    spec = case.root / "hpcenv.toml"
    text = spec.read_text().replace("env/bin/python", python)
    spec.unlink()
    spec.write_text(text)


@harmless("full", name="environment-moved-together-with-the-key-python")
def _moved_with_python(case: Case) -> None:
    _move(case, "elsewhere/new-env")


@harmless("gate", name="job-in-an-environment-moved-together-with-the-key-python")
def _moved_with_python_gate(case: Case) -> None:
    _move(case, "elsewhere/new-env")


@harmless(name="python-named-by-its-absolute-path")
def _absolute_python(case: Case) -> None:
    _python_key(case, f"{case.env}/bin/python3")


def _outside_row(case: Case) -> None:
    case.install("confpkg", "1.0", {"confpkg/__init__.py": b"C = 1\n"}, rows="/opt/confpkg.conf,sha256=Zm9v,3\n")
    case.world.lock(case.root)


@harmless(name="record-row-outside-of-the-prefix")
def _outside(case: Case) -> None:
    _outside_row(case)


@harmless("gate", name="record-row-outside-of-the-prefix-in-a-job")
def _outside_gate(case: Case) -> None:
    _outside_row(case)


@mutation("full", "packages.confpkg.content-sha256", *CONTENT)
def file_of_a_package_with_a_record_row_outside(case: Case) -> None:
    _outside_row(case)
    case.write("confpkg/__init__.py", "C = 2\n")


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def file_of_another_package_than_that_with_a_row_outside(case: Case) -> None:
    _outside_row(case)
    case.edit("purepkg/core.py", "100", "101")


@harmless()
def conda_files_as_they_were_locked(case: Case) -> None:
    with_conda_files(case)


@harmless()
def conda_environment_moved_without_new_prefixes(case: Case) -> None:
    with_conda_files(case)
    _move(case, "moved")


@harmless()
def conda_environment_unpacked_at_another_place(case: Case) -> None:
    with_conda_files(case)
    target = _move(case, "unpacked")
    (target / "etc/mkl.conf").write_text(f"root={target}\n")


@harmless()
def library_added_to_the_lib_folder_of_the_environment(case: Case) -> None:
    case.write("/lib/libnobody_needs_me.so", b"\x7fELF any")
    case.write("/lib/libm.so.6.old", b"\x7fELF any")


@harmless(name="compiled-files-in-the-standard-library-that-fit")
def _checked(case: Case) -> None:
    own = _own_interpreter(case)
    cache = own / LIB / "__pycache__"
    cache.mkdir(exist_ok=True)
    case.undo.append(lambda: shutil.rmtree(cache))
    for number, mode in enumerate(py_compile.PycInvalidationMode, 1):
        target = str(cache / f"statistics.{TAG}.opt-{number}.pyc")
        py_compile.compile(str(own / LIB / "statistics.py"), cfile=target, invalidation_mode=mode, doraise=True)


@harmless("gate", name="pycacheprefix-with-compiled-files-that-fit")
def _prefix(case: Case) -> None:
    prefix = case.root / "pycache"
    case.project_variable("PYTHONPYCACHEPREFIX", str(prefix))
    case.world.lock(case.root)
    source = case.path("purepkg/core.py")
    place = prefix / str(source.parent).lstrip("/")
    place.mkdir(parents=True)
    target = str(place / f"core.{TAG}.pyc")
    py_compile.compile(str(source), cfile=target, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


@harmless("gate", name="unchecked-pyc-that-pycacheprefix-leaves-unused")
def _unused(case: Case) -> None:
    case.project_variable("PYTHONPYCACHEPREFIX", str(case.root / "pycache"))
    case.world.lock(case.root)
    case.write(f"purepkg/__pycache__/core.{TAG}.pyc", forged())


@harmless(name="compiled-file-of-another-python-in-the-standard-library")
def _other_python(case: Case) -> None:
    own_file(case, f"{LIB}/__pycache__/statistics.cpython-38.pyc", forged())


@harmless(name="data-and-tests-of-the-standard-library")
def _stdlib_data(case: Case) -> None:
    own_file(case, f"{LIB}/test/test_statistics.py", b"T = 1\n")
    own_file(case, f"{LIB}/pydoc_data/notes.txt", b"text\n")


@harmless(name="compiled-file-beside-its-source-in-the-standard-library")
def _beside(case: Case) -> None:
    own_file(case, f"{LIB}/statistics.pyc", forged())


@harmless("full", name="wheel-of-only-pyc-installed-again")
def _secret_again(case: Case) -> None:
    _secret(case, lone())
    case.world.lock(case.root)
    _secret(case, lone())


@harmless("full", name="program-of-a-wheel-installed-again")
def _tool_again(case: Case) -> None:
    _tool_wheel(case, b"#!python\nprint('one')\n")
    case.world.lock(case.root)
    _tool_wheel(case, b"#!python\nprint('one')\n")


@harmless("full", name="program-installed-by-uv-instead-of-pip", needs=("uv",))
def _tool_uv(case: Case) -> None:
    _tool_wheel(case, b"#!python\nprint('one')\n")
    case.world.lock(case.root)
    wheel = next((case.root / "wheels").glob("toolpkg-*.whl"))
    argv = [str(UV), "pip", "install", "--no-config", "--no-cache", "--no-index", "--no-deps", "--reinstall"]
    argv += ["--python", str(case.env / "bin/python"), str(wheel)]
    subprocess.run(argv, check=True, capture_output=True, env=case.world.environ)


@harmless(needs=("gcc",), name="library-outside-of-the-environment-touched")
def _touched(case: Case) -> None:
    _needs_a_library(case, case.root / "system")
    case.world.lock(case.root)
    os.utime(case.root / "system/libmathx.so.1", (1_000_000_000, 1_000_000_000))


@harmless("full", name="policy-lets-the-content-of-packages-differ")
def _policy(case: Case) -> None:
    case.spec('[policy]\n"packages.content-digest" = "info"\n')
    case.world.lock(case.root)
    case.edit("purepkg/core.py", "100", "101")
    case.edit("/bin/datapkg-tool", "tool", "evil")
