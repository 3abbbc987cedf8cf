"""Every change that must be caught: its name, the level that claims to catch it, the field that must be named.

`also` lists the fields that may be named beside it (patterns): any other one is a wrong name, and
counts as not caught. A digest over all packages always comes with the package that explains it.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import re
import shutil
import sys
import venv
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from corpus_world import ARCHS, CONDA, NCCL, OLD_ABI, OTHER_PYTHON, PLATFORM, PURE, VENDOR, Case, Host, make_wheel

from hpcenv.project import lockfile as lock_model
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Manifest

# Looked at in a host environment: record, full, deep (hpcenv verify), gate (a job's own check, with
# [env] of hpcenv.toml), nodes (two nodes judged together), submit (refused before the queue). sif: a SIF's own bytes. lockfile: without
# looking at any environment. relock and diff: another lockfile against this one.
LEVELS = ("record", "full", "deep", "gate", "nodes", "submit", "sif", "lockfile", "relock", "diff")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One thing changed.

    Attributes:
        field: the one that must be named, with `severity`; several patterns where either is right.
        also: fields that may be named beside it.
        needs: what the machine must have for it.
        image: the environment is a SIF.
    """

    name: str
    level: str
    field: str | tuple[str, ...]
    apply: Callable[[Case], None]
    also: tuple[str, ...] = ()
    severity: str = "must"
    profile: str = "off"
    needs: tuple[str, ...] = ()
    image: bool = False


ENV = ("packages.env-digest", "packages.count")
CONTENT = ("packages.content-digest", *ENV)
UNLISTED = ("packages.unlisted-digest",)
_CORE = f"__pycache__/core.{sys.implementation.cache_tag}.pyc"

MUTATIONS: list[Mutation] = []


def mutation(
    level: str, field: str | tuple[str, ...], *also: str, name: str = "", **words: object
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    def add(apply: Callable[[Case], None]) -> Callable[[Case], None]:
        given = name or apply.__name__.strip("_").replace("_", "-")
        MUTATIONS.append(Mutation(name=given, level=level, field=field, also=also, apply=apply, **words))  # type: ignore[arg-type]
        return apply

    return add


def flip(case: Case, name: str, *, at: bytes | None = None) -> None:
    """Change one bit, leaving size and times."""
    data = bytearray(case.path(name).read_bytes())
    place = data.index(at) if at else len(data) // 2
    data[place] ^= 1
    case.write(name, bytes(data), keep_times=True)


# -- files of a package -------------------------------------------------------------------


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def byte_in_a_py_with_size_and_time_kept(case: Case) -> None:
    case.edit("purepkg/core.py", "LIMIT = 100", "LIMIT = 101", keep_times=True)


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def line_appended_to_a_py(case: Case) -> None:
    case.write("purepkg/util.py", case.path("purepkg/util.py").read_bytes() + b"\nprint('x')\n")


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def py_emptied(case: Case) -> None:
    case.write("purepkg/core.py", b"")


@mutation("full", "packages.extpkg.content-sha256", *CONTENT)
def byte_in_a_so(case: Case) -> None:
    flip(case, f"extpkg/native{case.world.suffix}", at=b"note of")


@mutation("full", "packages.extpkg.content-sha256", *CONTENT, needs=("gcc",))
def so_swapped_for_another_build(case: Case) -> None:
    body = "int answer(void) { return 43; }"
    other = case.world.libraries.build(f"native{case.world.suffix}", body, variant="other")
    case.write(f"extpkg/native{case.world.suffix}", other.read_bytes())


@mutation("full", "packages.extpkg.content-sha256", *CONTENT)
def so_with_bytes_appended(case: Case) -> None:
    name = f"extpkg/native{case.world.suffix}"
    case.write(name, case.path(name).read_bytes() + b"\0" * 16)


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def file_deleted(case: Case) -> None:
    case.remove("purepkg/util.py")


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def file_replaced_by_a_folder(case: Case) -> None:
    case.remove("purepkg/util.py")
    case.path("purepkg/util.py").mkdir()


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def file_replaced_by_a_dangling_link(case: Case) -> None:
    case.remove("purepkg/util.py")
    case.path("purepkg/util.py").symlink_to("nowhere.py")


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def file_replaced_by_a_link_to_other_content(case: Case) -> None:
    case.remove("purepkg/util.py")
    case.path("purepkg/util.py").symlink_to("core.py")


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def hard_link_broken_with_other_content(case: Case) -> None:
    data = case.path("purepkg/util.py").read_bytes()
    aside = case.path("purepkg/util.new")
    aside.write_bytes(data.replace(b"2", b"3"))
    os.replace(aside, case.path("purepkg/util.py"))


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def file_that_cannot_be_read(case: Case) -> None:
    # Opens as a regular file and fails to read, also for root.
    case.remove("purepkg/util.py")
    case.path("purepkg/util.py").symlink_to("/proc/self/mem")


@mutation("full", "packages.purepkg.content-sha256", *CONTENT, needs=("user",))
def file_without_permission_to_read(case: Case) -> None:
    case.write("purepkg/util.py", case.path("purepkg/util.py").read_bytes())
    case.path("purepkg/util.py").chmod(0)


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def package_folder_replaced_by_a_link_elsewhere(case: Case) -> None:
    elsewhere = case.root / "elsewhere"
    shutil.copytree(case.path("purepkg"), elsewhere)
    (elsewhere / "core.py").write_text("LIMIT = 1\n")
    case.remove("purepkg")
    case.path("purepkg").symlink_to(elsewhere)


@mutation("full", "packages.purepkg.content-sha256", *CONTENT, *UNLISTED)
def file_with_its_case_changed(case: Case) -> None:
    case.path("purepkg/util.py").rename(case.path("purepkg/Util.py"))


@mutation("full", "packages.datapkg.content-sha256", *CONTENT)
def data_file_in_the_package(case: Case) -> None:
    case.edit("datapkg/table.csv", "1,2", "1,3")


@mutation("full", "packages.datapkg.content-sha256", *CONTENT)
def data_file_in_share(case: Case) -> None:
    case.edit("/share/datapkg/words.txt", "two", "six")


@mutation("full", "packages.datapkg.content-sha256", *CONTENT)
def header_file(case: Case) -> None:
    [header] = case.env.glob("include/**/datapkg.h")
    case.edit("/" + str(header.relative_to(case.env)), "3", "4")


@mutation("full", "packages.datapkg.programs-sha256", *CONTENT)
def script_in_bin(case: Case) -> None:
    case.edit("/bin/datapkg-tool", "tool", "evil")


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def entry_point_in_the_metadata(case: Case) -> None:
    case.edit("purepkg-1.0.dist-info/entry_points.txt", "core:main", "util:twice")


@mutation("full", "packages.pip.content-sha256", *CONTENT)
def file_of_pip_itself(case: Case) -> None:
    case.write("pip/__init__.py", case.path("pip/__init__.py").read_bytes() + b"#\n")


@mutation("full", ("packages.nohash.content-sha256", "packages.unlisted-digest"), *CONTENT, *UNLISTED)
def file_whose_record_row_has_no_hash(case: Case) -> None:
    case.edit("nohash/__init__.py", "N = 1", "N = 2", keep_times=True)


@mutation("full", "python.startup-files", "python.sys-path", *UNLISTED)
def editable_install_led_elsewhere(case: Case) -> None:
    (case.root / "fork").mkdir()
    case.write("__editable__.editpkg.pth", str(case.root / "fork") + "\n")


@mutation("full", "packages.editpkg.dirty", "packages.editpkg.diff-sha256", severity="warn", needs=("git",))
def editable_source_edited(case: Case) -> None:
    source = case.world.source / "src/editpkg/__init__.py"
    before = source.read_bytes()
    case.undo.append(lambda: source.write_bytes(before))
    source.write_bytes(b"E = 2\n")


@mutation("full", "packages.editpkg.dirty", "packages.editpkg.diff-sha256", severity="warn", needs=("git",))
def editable_source_edited_where_git_trusts_size_and_time(case: Case) -> None:
    source = case.world.source / "src/editpkg/__init__.py"
    before, status = source.read_bytes(), source.stat()
    loose = (("core.trustctime", "false"), ("core.checkStat", "minimal"))

    def back() -> None:
        source.write_bytes(before)
        for name, _ in loose:
            case.world.git("config", "--unset", name)

    case.undo.append(back)
    for name, value in loose:
        case.world.git("config", name, value)
    os.utime(source, (1, 1))
    case.world.git("update-index", "-q", "--refresh")
    source.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    os.utime(source, (1, 1))
    assert status.st_size == len(before)


@mutation("full", "packages.editpkg.dirty", "packages.editpkg.diff-sha256", profile="bitwise", needs=("git",))
def editable_source_edited_under_the_bitwise_profile(case: Case) -> None:
    editable_source_edited(case)


@mutation("record", "packages.editpkg.diff-sha256", severity="warn", needs=("git",))
def compiled_module_in_an_editable_source_that_git_ignores(case: Case) -> None:
    (case.world.source / ".git/info/exclude").write_text("*.so\n")
    module = case.world.source / "src/editpkg/fast.so"
    case.undo.append(module.unlink)
    module.write_bytes(b"\x7fELF any")


@mutation("full", "packages.editpkg.commit-id", needs=("git",))
def editable_source_at_another_commit(case: Case) -> None:
    source = case.world.source / "src/editpkg/__init__.py"
    before = source.read_bytes()
    source.write_bytes(b"E = 3\n")
    case.world.git("commit", "-q", "-a", "-m", "second")

    def back() -> None:
        case.world.git("reset", "-q", "--hard", "HEAD~1")
        source.write_bytes(before)

    case.undo.append(back)


@mutation("relock", "relock.packages.editpkg", needs=("git",))
def editable_source_edited_and_locked_again(case: Case) -> None:
    editable_source_edited(case)


@mutation("full", "python.unchecked-pyc")
def compiled_file_that_python_takes_unchecked(case: Case) -> None:
    # PEP 552, 'unchecked hash': loaded whatever its source says.
    code = compile("def main():\n    return 'forged'\n", "core.py", "exec")
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + b"\0" * 8
    case.write("purepkg/" + _CORE, head + marshal.dumps(code))


# -- packages as a whole ------------------------------------------------------------------


def _other_wheel(case: Case, name: str, version: str, files: dict[str, bytes], **words: object) -> Path:
    folder = case.root / "wheels"
    folder.mkdir(exist_ok=True)
    return make_wheel(folder, name, version, files, **words)  # type: ignore[arg-type]


def _pip(case: Case, *words: str) -> None:
    case.world.pip(case.env, *words)


@mutation("record", "packages.purepkg", *ENV)
def package_upgraded_in_place_by_pip(case: Case) -> None:
    _pip(case, "install", "--upgrade", str(_other_wheel(case, "purepkg", "1.1", PURE)))


@mutation("record", "packages.purepkg", *ENV)
def package_downgraded_by_pip(case: Case) -> None:
    _pip(case, "install", str(_other_wheel(case, "purepkg", "0.9", PURE)))


@mutation("record", "packages.purepkg", *ENV)
def package_removed_by_pip(case: Case) -> None:
    _pip(case, "uninstall", "--yes", "purepkg")


@mutation("record", "packages.newpkg", *ENV)
def package_added_by_pip(case: Case) -> None:
    _pip(case, "install", str(_other_wheel(case, "newpkg", "1.0", {"newpkg.py": b"N = 1\n"})))


@mutation("record", "packages.count (package)", *ENV)
def package_added_with_the_name_of_a_key(case: Case) -> None:
    _pip(case, "install", str(_other_wheel(case, "count", "1.0", {"count.py": b"N = 1\n"})))


@mutation("record", "packages.purepkg.record-sha256", *ENV)
def same_version_built_again_with_other_content(case: Case) -> None:
    files = PURE | {"purepkg/core.py": PURE["purepkg/core.py"].replace(b"100", b"200")}
    _pip(case, "install", "--force-reinstall", str(_other_wheel(case, "purepkg", "1.0", files)))


@mutation("record", "packages.torch.record-sha256", *ENV)
def wheel_installed_again_with_another_build_tag(case: Case) -> None:
    wheel = _other_wheel(case, "torch", "2.13.0", case.world.torch_files(), build="2", tag=PLATFORM)
    _pip(case, "install", "--force-reinstall", str(wheel))


@mutation("record", "packages.purepkg", *ENV, *UNLISTED)
def package_folder_removed_by_hand(case: Case) -> None:
    case.remove("purepkg", "purepkg-1.0.dist-info")


@mutation("record", "packages.purepkg.record-sha256", *ENV, *UNLISTED)
def dist_info_renamed(case: Case) -> None:
    case.path("purepkg-1.0.dist-info").rename(case.path("purepkg-9.9.dist-info"))


@mutation("record", "packages.purepkg", *ENV)
def version_edited_in_the_metadata(case: Case) -> None:
    case.edit("purepkg-1.0.dist-info/METADATA", "Version: 1.0", "Version: 1.1")


@mutation("record", "packages.*", *ENV)
def name_edited_in_the_metadata(case: Case) -> None:
    case.edit("purepkg-1.0.dist-info/METADATA", "Name: purepkg", "Name: otherpkg")


@mutation("record", "packages.purepkg.record-sha256", *ENV)
def record_edited_together_with_the_file(case: Case) -> None:
    from corpus_world import claim

    before, after = PURE["purepkg/core.py"], PURE["purepkg/core.py"].replace(b"100", b"101")
    case.edit("purepkg-1.0.dist-info/RECORD", claim(before), claim(after))
    case.write("purepkg/core.py", after, keep_times=True)


@mutation("record", "packages.purepkg.record-sha256", *ENV, *UNLISTED)
def record_row_taken_out(case: Case) -> None:
    rows = case.path("purepkg-1.0.dist-info/RECORD").read_text().splitlines(keepends=True)
    case.write("purepkg-1.0.dist-info/RECORD", "".join(r for r in rows if not r.startswith("purepkg/util.py")))


@mutation("record", "packages.purepkg.record-sha256", *ENV, *UNLISTED)
def record_hash_taken_out(case: Case) -> None:
    text = case.path("purepkg-1.0.dist-info/RECORD").read_text()
    case.write("purepkg-1.0.dist-info/RECORD", re.sub(r"(?m)^purepkg/core.py,.*$", "purepkg/core.py,,", text))


@mutation("record", "packages.purepkg.record-sha256", *ENV, *UNLISTED)
def record_deleted(case: Case) -> None:
    case.remove("purepkg-1.0.dist-info/RECORD")


@mutation("full", "packages.purepkg.content-sha256", *CONTENT, *UNLISTED)
def record_deleted_and_all_files_hashed(case: Case) -> None:
    case.remove("purepkg-1.0.dist-info/RECORD")


@mutation("record", "packages.purepkg", *ENV, *UNLISTED)
def second_dist_of_the_name_in_front(case: Case) -> None:
    case.install("purepkg", "0.5", {})


@mutation("record", "packages.caf*", *ENV)
def package_with_a_name_that_is_no_utf_8(case: Case) -> None:
    info = b"caf\xe9-1.0.dist-info"
    case.write(info + b"/METADATA", b"Metadata-Version: 2.1\nName: caf\xe9\nVersion: 1.0\n")
    case.write(info + b"/RECORD", b"caf\xe9-1.0.dist-info/RECORD,,\n")


@mutation("record", "packages.*", *ENV, *UNLISTED, "torch.*", "libs.*")
def torch_removed(case: Case) -> None:
    _pip(case, "uninstall", "--yes", "torch")


@mutation("record", "packages.oldpkg", *ENV)
def egg_info_dropped_in(case: Case) -> None:
    case.write("oldpkg.egg-info/PKG-INFO", "Metadata-Version: 2.1\nName: oldpkg\nVersion: 3\n")


# -- files that are not listed ------------------------------------------------------------


@mutation("record", "packages.unlisted-digest")
def unlisted_module(case: Case) -> None:
    case.write("helper.py", "H = 1\n")


@mutation("record", "packages.unlisted-digest")
def unlisted_module_inside_a_package(case: Case) -> None:
    case.write("purepkg/extra.py", "X = 1\n")


@mutation("record", "packages.unlisted-digest")
def unlisted_so(case: Case) -> None:
    case.write(f"purepkg/fast{case.world.suffix}", b"\x7fELF any")


@mutation("record", "packages.unlisted-digest")
def module_that_is_only_compiled(case: Case) -> None:
    code = marshal.dumps(compile("H = 1\n", "hidden.py", "exec"))
    case.write("hidden.pyc", importlib.util.MAGIC_NUMBER + b"\0" * 12 + code)


@mutation("record", "packages.unlisted-digest")
def module_in_a_namespace_package(case: Case) -> None:
    case.write("nspkg/gamma.py", "G = 1\n")


@mutation("record", "packages.unlisted-digest")
def init_file_that_ends_a_namespace_package(case: Case) -> None:
    case.write("nspkg/__init__.py", "")


@mutation("record", "packages.unlisted-digest")
def unlisted_module_whose_name_is_no_utf_8(case: Case) -> None:
    case.write(b"caf\xe9.py", "C = 1\n")


@mutation("record", "packages.unlisted-digest")
def linked_folder_led_to_another_one(case: Case) -> None:
    case.remove("linked")
    case.path("linked").symlink_to("../../../share/linked_b")


@mutation("record", "packages.unlisted-digest")
def module_behind_a_link_out_of_the_environment(case: Case) -> None:
    (case.root / "outside").mkdir()
    (case.root / "outside/mod.py").write_text("M = 1\n")
    case.path("outside").symlink_to(case.root / "outside")


@mutation("record", "packages.unlisted-digest")
def edited_file_that_was_unlisted_before(case: Case) -> None:
    case.edit("/share/linked_a/inside.py", "a", "c")


# What setuptools writes for an editable install whose packages are not in one folder (__editable___NAME_finder.py).
_FINDER = """import sys
from importlib.util import spec_from_file_location
MAPPING = {mapping!r}
class _Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return spec_from_file_location(name, MAPPING[name]) if name in MAPPING else None
def install():
    sys.meta_path.append(_Finder)
"""


def import_hook(case: Case, mapping: dict[str, str]) -> None:
    case.write("__editable___mine_finder.py", _FINDER.format(mapping=mapping))
    case.write("__editable__.mine.pth", "import __editable___mine_finder; __editable___mine_finder.install()\n")


@mutation("record", "packages.unlisted-digest")
def import_hook_that_leads_to_another_file(case: Case) -> None:
    import_hook(case, {"hooked": "/home/me/mine/hooked.py"})
    case.world.lock(case.root)
    import_hook(case, {"hooked": "/home/me/fork/hooked.py"})


# -- what runs at the start of Python -----------------------------------------------------


@mutation("record", "python.startup-files", "packages.unlisted-digest", "python.sys-path")
def pth_with_a_folder(case: Case) -> None:
    (case.root / "more").mkdir()
    case.write("more.pth", str(case.root / "more") + "\n")


@mutation("record", "python.startup-files", "packages.unlisted-digest")
def pth_with_an_import_line(case: Case) -> None:
    case.write("hook.pth", "import os; os.environ.setdefault('SEED', '1')\n")


@mutation("record", "python.startup-files", *UNLISTED)
def pth_of_a_package_edited(case: Case) -> None:
    # setuptools brings it with every environment of this Python, or the editable install does.
    [name, *_] = sorted(p.name for p in case.site.glob("*.pth"))
    case.write(name, case.path(name).read_text().rstrip("\n") + "\nimport sys\n")


@mutation("record", "python.startup-files", "packages.unlisted-digest")
def sitecustomize_in_site_packages(case: Case) -> None:
    case.write("sitecustomize.py", "import sys\n")


@mutation("gate", "python.startup-files", "python.user-site", "python.sys-path", *UNLISTED)
def usercustomize_in_an_enabled_user_site(case: Case) -> None:
    _enable_user_site(case).joinpath("usercustomize.py").write_text("import sys\n")


def _enable_user_site(case: Case) -> Path:
    """As in an environment made with --system-site-packages, and a user who asks for ~/.local."""
    _own_interpreter(case)  # without packages of its own
    case.write("/pyvenv.cfg", case.path("/pyvenv.cfg").read_text().replace("packages = false", "packages = true"))
    case.variable("PYTHONNOUSERSITE", "")
    minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
    site = Path(case.environ["HOME"]) / f".local/lib/python{minor}/site-packages"
    site.mkdir(parents=True)
    return site


@mutation("gate", "python.user-site", "python.sys-path", "packages.*")
def user_site_package_in_the_way(case: Case) -> None:
    case.install("numpy", "9.9", {"numpy/__init__.py": b""}, into=_enable_user_site(case))


@mutation("gate", "python.path-variable", "python.sys-path")
def pythonpath_for_the_ranks(case: Case) -> None:
    (case.root / "mine").mkdir()
    case.variable("PYTHONPATH", str(case.root / "mine"))


@mutation("gate", "packages.purepkg", *CONTENT, *UNLISTED, "python.path-variable", "python.sys-path")
def package_shadowed_through_pythonpath(case: Case) -> None:
    case.install("purepkg", "1.0.post1", PURE, into=case.root / "mine")
    case.variable("PYTHONPATH", str(case.root / "mine"))


@mutation("gate", "environment")
def pythonhome_without_a_python(case: Case) -> None:
    case.variable("PYTHONHOME", "/nonexistent")


@mutation("gate", "python.stdlib-sha256", "python.variables")
def pythonhome_with_another_standard_library(case: Case) -> None:
    file_of_the_standard_library(case)
    own = case.world.interpreter
    case.remove("/bin/python", "/pyvenv.cfg")
    for name in ("bin/python", "pyvenv.cfg"):
        os.link(case.world.base / "env" / name, case.env / name, follow_symlinks=False)
    case.variable("PYTHONHOME", str(own))


@mutation("record", "python.sys-path", "*")
def system_site_packages_switched_on(case: Case) -> None:
    _own_interpreter(case)
    case.write("/pyvenv.cfg", case.path("/pyvenv.cfg").read_text().replace("packages = false", "packages = true"))


# -- the interpreter ----------------------------------------------------------------------


@mutation("record", "python.version", "*", needs=("python",))
def another_python(case: Case) -> None:
    case.remove("/bin/python")
    case.path("/bin/python").symlink_to(str(OTHER_PYTHON))
    home = os.path.dirname(os.path.realpath(str(OTHER_PYTHON)))
    case.write("/pyvenv.cfg", f"home = {home}\ninclude-system-site-packages = false\n")


@mutation("record", ("environment", "python.version"))
def python_that_does_not_start(case: Case) -> None:
    case.remove("/bin/python")
    case.path("/bin/python").write_text("#!/bin/sh\nexit 3\n")
    case.path("/bin/python").chmod(0o755)


@mutation("full", "python.stdlib-sha256")
def file_of_the_standard_library(case: Case) -> None:
    own = _own_interpreter(case)
    target = own / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/statistics.py"
    before = target.read_bytes()
    case.undo.append(lambda: target.write_bytes(before))
    target.write_bytes(before + b"\n# edited\n")


@mutation("full", "python.stdlib-sha256")
def extension_of_the_standard_library(case: Case) -> None:
    own = _own_interpreter(case)
    target = next(own.glob("lib/python*/lib-dynload/_heapq*.so"))
    before = target.read_bytes()
    case.undo.append(lambda: target.write_bytes(before))
    target.write_bytes(before + b"\0")


def _own_interpreter(case: Case) -> Path:
    own = case.world.interpreter
    case.remove("/bin/python")
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    case.path("/bin/python").symlink_to(own / "bin" / name)
    case.write("/pyvenv.cfg", f"home = {own / 'bin'}\ninclude-system-site-packages = false\n")
    return own


# -- torch and the libraries under it -----------------------------------------------------

VERSION = "torch/version.py"


@mutation("record", "torch.git-version")
def torch_of_the_same_version_from_another_commit(case: Case) -> None:
    case.edit(VERSION, "cf30153c4c13", "0123456789ab")


@mutation("record", "torch.cuda", "libs.*")
def torch_for_another_cuda(case: Case) -> None:
    case.edit(VERSION, "'13.0'", "'12.8'")


@mutation("record", "torch.version")
def torch_with_another_local_version(case: Case) -> None:
    case.edit(VERSION, "+cu130", "+cu128")


@mutation("record", "torch.debug")
def torch_built_for_debugging(case: Case) -> None:
    case.edit(VERSION, "debug = False", "debug = True")


@mutation("record", "torch.hip")
def torch_for_rocm(case: Case) -> None:
    case.edit(VERSION, "hip: Optional[str] = None", "hip: Optional[str] = '6.4'")


@mutation("record", "torch.arch-list", needs=("gcc",))
def torch_with_kernels_for_other_gpus(case: Case) -> None:
    case.write("torch/lib/libtorch_python.so", _torch(case, "libtorch_python.so", ARCHS % "sm_80 sm_100"))


@mutation("record", "torch.cxx11-abi", needs=("gcc",))
def torch_with_the_other_cxx_abi(case: Case) -> None:
    case.write("torch/lib/libc10.so", _torch(case, "libc10.so", OLD_ABI))


def _torch(case: Case, name: str, body: str, *flags: str) -> bytes:
    variant = f"variant-{zlib.crc32(repr((name, body, flags)).encode())}"
    return case.world.libraries.torch_variant(name, body, variant, flags).read_bytes()


@mutation(
    "full",
    "packages.torch.content-sha256",
    *CONTENT,
    "libs.libtorch_cpu.build-id",
    "libs.libtorch_cpu.sha256",
    needs=("gcc",),
)
def libtorch_of_another_build(case: Case) -> None:
    case.write("torch/lib/libtorch_cpu.so", _torch(case, "libtorch_cpu.so", "int patched(void) { return 1; }"))


def _vendor(case: Case, name: str, body: str, *flags: str) -> bytes:
    variant = f"variant-{zlib.crc32(repr((name, body, flags)).encode())}"
    return case.world.libraries.vendor(name, body, variant, flags).read_bytes()


NCCL_NAME, CUDNN_NAME = "nccl/lib/libnccl.so.2", "cudnn/lib/libcudnn.so.9"


@mutation("record", "libs.nccl.version", "libs.nccl.build-id", needs=("gcc",))
def nccl_of_another_version_in_its_place(case: Case) -> None:
    case.write("nvidia/" + NCCL_NAME, _vendor(case, NCCL_NAME, NCCL % 22203))


@mutation("record", "libs.cudnn.version", "libs.cudnn.build-id", needs=("gcc",))
def cudnn_of_another_version_in_its_place(case: Case) -> None:
    body = VENDOR[CUDNN_NAME].replace("92000", "91900")
    case.write("nvidia/" + CUDNN_NAME, _vendor(case, CUDNN_NAME, body))


@mutation(
    "full", "libs.cublas.version", *CONTENT, "packages.nvidia-cuda.content-sha256", "libs.cublas.*", needs=("gcc",)
)
def cublas_of_another_version_in_its_place(case: Case) -> None:
    name = "cu13/lib/libcublas.so.13"
    case.write("nvidia/" + name, _vendor(case, name, VENDOR[name].replace("13,1,1", "13,0,2")))


@mutation(
    "full", "packages.nvidia-nccl.content-sha256", *CONTENT, "libs.nccl.build-id", "libs.nccl.sha256", needs=("gcc",)
)
def nccl_of_the_same_version_from_another_build(case: Case) -> None:
    case.write("nvidia/" + NCCL_NAME, _vendor(case, NCCL_NAME, VENDOR[NCCL_NAME] + "int more;"))


@mutation("record", "libs.nccl.build-id", severity="warn", needs=("gcc",))
def nccl_build_seen_by_its_build_id(case: Case) -> None:
    nccl_of_the_same_version_from_another_build(case)


@mutation("record", "libs.nccl.build-id", profile="bitwise", needs=("gcc",))
def nccl_build_under_the_bitwise_profile(case: Case) -> None:
    nccl_of_the_same_version_from_another_build(case)


@mutation(
    "full", "libs.nccl.sha256", *CONTENT, "packages.nvidia-nccl.content-sha256", profile="bitwise", needs=("gcc",)
)
def patched_nccl_under_the_bitwise_profile(case: Case) -> None:
    flip(case, "nvidia/" + NCCL_NAME, at=b"note of")


# No library of torch can be told then: one row with the cause, which names the missing file.
@mutation("record", "environment", "libs.*", needs=("gcc",))
def nccl_removed(case: Case) -> None:
    case.remove("nvidia/" + NCCL_NAME)


@mutation("record", "libs.nccl.origin", "libs.nccl.*", *UNLISTED, needs=("gcc",))
def nccl_put_beside_torch(case: Case) -> None:
    case.write("torch/lib/libnccl.so.2", _vendor(case, NCCL_NAME, NCCL % 22203))


def _module(case: Case, *, same: bool = False) -> Path:
    """A folder as a module system loads it, with an NCCL of its own."""
    folder = case.root / "modules/nccl/lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").write_bytes(_vendor(case, NCCL_NAME, VENDOR[NCCL_NAME] if same else NCCL % 22203))
    return folder


@mutation("gate", "libs.nccl.origin", "libs.nccl.*", "libs.ld-library-path", "libs.system", needs=("gcc",))
def ld_library_path_shadows_nccl(case: Case) -> None:
    case.variable("LD_LIBRARY_PATH", str(_module(case)))


@mutation("record", "libs.nccl.origin", "libs.nccl.*", "libs.ld-library-path", "libs.system", needs=("gcc",))
def module_loaded_that_shadows_nccl(case: Case) -> None:
    case.environ["LD_LIBRARY_PATH"] = str(_module(case))


@mutation("record", "libs.ld-library-path")
def ld_library_path_with_nothing_of_torchs_in_it(case: Case) -> None:
    case.environ["LD_LIBRARY_PATH"] = "/opt/vendor/lib"


@mutation("gate", "libs.ld-preload", "libs.nccl.*", "libs.system", needs=("gcc",))
def ld_preload_brings_another_nccl(case: Case) -> None:
    case.variable("LD_PRELOAD", str(_module(case) / "libnccl.so.2"))


# -- deep ---------------------------------------------------------------------------------


@mutation("deep", "loaded.nccl", "loaded.differs", *CONTENT, *UNLISTED, "python.startup-files", needs=("gcc",))
def another_nccl_loaded_before_torch(case: Case) -> None:
    path = _module(case) / "libnccl.so.2"
    case.write("early.pth", f"import ctypes; ctypes.CDLL({str(path)!r})\n")


@mutation(
    "deep",
    "loaded.nccl",
    *CONTENT,
    "packages.torch.content-sha256",
    "loaded.differs",
    "libs.libtorch_cuda.*",
    needs=("gcc",),
)
def library_that_opens_another_nccl_itself(case: Case) -> None:
    path = _module(case) / "libnccl.so.2"
    body = f'#include <dlfcn.h>\n__attribute__((constructor)) static void f(void) {{ dlopen("{path}", 2); }}'
    case.write("torch/lib/libtorch_cuda.so", _torch(case, "libtorch_cuda.so", body))


@mutation("deep", "torch.running-differs", *UNLISTED, "python.startup-files")
def torch_that_says_something_else_when_it_runs(case: Case) -> None:
    hook = "import sys, types; m = types.ModuleType('torch.version'); "
    hook += "m.__dict__.update(__version__='2.13.0+cu130', debug=False, cuda='12.8', git_version='x'); "
    case.write("patch.pth", hook + "sys.modules['torch.version'] = m\n")


@mutation("deep", "torch.config-digest", *CONTENT, "packages.torch.content-sha256")
def torch_of_another_configuration(case: Case) -> None:
    case.edit("torch/__config__.py", "MKL 2024.2", "OpenBLAS 0.3")


@mutation("deep", "packages.torch.content-sha256", *CONTENT, "loaded.*", "torch.*")
def torch_that_cannot_be_imported(case: Case) -> None:
    case.write("torch/__init__.py", "raise ImportError('broken')\n")


def _capability(case: Case) -> None:
    case.options["level"] = "deep"
    case.variable("ATEN_CPU_CAPABILITY", "default")


mutation("gate", "torch.cpu-capability", severity="info", name="other-vector-instructions")(_capability)
mutation(
    "gate", "torch.cpu-capability", severity="warn", profile="bitwise", name="other-vector-instructions-under-bitwise"
)(_capability)


# -- conda --------------------------------------------------------------------------------


@mutation("record", "packages.conda-digest")
def conda_package_of_another_build(case: Case) -> None:
    case.write("/conda-meta/mkl-2024.2.1-h_1.json", json.dumps(CONDA | {"build": "h_2", "sha256": "b" * 64}))


@mutation("record", "packages.conda-digest")
def conda_package_added(case: Case) -> None:
    case.write("/conda-meta/blas-1.0-mkl.json", json.dumps(CONDA | {"name": "blas"}))


@mutation("record", "packages.conda-digest")
def conda_package_removed(case: Case) -> None:
    case.remove("/conda-meta/mkl-2024.2.1-h_1.json")


@mutation("record", "packages.conda-digest")
def conda_package_where_there_was_none(case: Case) -> None:
    case.remove("/conda-meta")
    case.world.lock(case.root)
    case.write("/conda-meta/blas-1.0-mkl.json", json.dumps(CONDA | {"name": "blas"}))


# -- the lockfile and hpcenv.toml ---------------------------------------------------------


def _text(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text, f"{old!r} is not in the lockfile"
        return text.replace(old, new, 1)

    return change


@mutation("lockfile", "stale.edited")
def lockfile_edited_by_hand(case: Case) -> None:
    case.edit_lockfile(_text('version = "2.13.0"', 'version = "2.12.0"'))


@mutation("lockfile", "stale.edited", "stale.policy-changed")
def lockfile_loosened_by_hand(case: Case) -> None:
    case.edit_lockfile(lambda text: text.rstrip("\n") + '\n\n[policy]\n"packages.content-digest" = "info"\n')


@mutation("lockfile", "stale.edited")
def package_taken_out_of_the_lockfile(case: Case) -> None:
    def change(text: str) -> str:
        parts = text.split("[[packages.dist]]")
        kept = [part for part in parts if 'name = "purepkg"' not in part]
        assert len(kept) == len(parts) - 1
        count = len(parts) - 1
        return "[[packages.dist]]".join(kept).replace(f"count = {count}", f"count = {count - 1}")

    case.edit_lockfile(change)


@mutation("lockfile", "error.lockfile-invalid")
def lockfile_cut_short(case: Case) -> None:
    case.edit_lockfile(lambda text: text[: len(text) // 2])


@mutation("lockfile", "error.lockfile-newer")
def lockfile_of_a_newer_schema(case: Case) -> None:
    case.edit_lockfile(_text("schema = 1", "schema = 2"))


@mutation("lockfile", "error.lockfile-missing")
def lockfile_gone(case: Case) -> None:
    case.lockfile().unlink()


@mutation("full", "packages.purepkg.content-sha256", *CONTENT)
def lockfile_forged_with_a_fingerprint_that_fits(case: Case) -> None:
    locked = read_lockfile(case.lockfile())
    dists = tuple(
        d.model_copy(update={"record_sha256": "0" * 64}) if d.name == "purepkg" else d for d in locked.packages.dist
    )
    changed = locked.model_copy(update={"packages": locked.packages.model_copy(update={"dist": dists})})
    fitting = lock_model.fingerprint(lock_model.to_data(changed))

    def change(text: str) -> str:
        old = next(d.record_sha256 for d in locked.packages.dist if d.name == "purepkg")
        return text.replace(str(old), "0" * 64).replace(locked.fingerprint, fitting)

    case.edit_lockfile(change)


@mutation("lockfile", "stale.policy-changed")
def policy_loosened_in_the_project(case: Case) -> None:
    case.spec('[policy]\n"packages.content-digest" = "info"\n')


@mutation("lockfile", "stale.profile-changed")
def profile_changed_in_the_project(case: Case) -> None:
    case.spec('[determinism]\nprofile = "bitwise"\n')


@mutation("lockfile", "stale.gpu-changed")
def gpu_changed_in_the_project(case: Case) -> None:
    case.spec('[host]\ngpu = "h100"\n')


@mutation("lockfile", "stale.gpu-memory-changed")
def gpu_memory_asked_in_the_project(case: Case) -> None:
    case.spec('[host]\ngpu-memory = "40GB"\n')


@mutation("sif", "stale.python-changed", image=True)
def python_changed_in_the_project(case: Case) -> None:
    text = (case.root / "hpcenv.toml").read_text()
    (case.root / "hpcenv.toml").unlink()
    (case.root / "hpcenv.toml").write_text('python = "python3.9"\n' + text)


@mutation("full", "packages.env-digest", "*")
def python_of_another_environment_in_the_project(case: Case) -> None:
    # On the host, `python` says where the environment is; what it is, is compared.
    venv.create(case.root / "other", symlinks=True)
    (case.root / "hpcenv.toml").unlink()
    (case.root / "hpcenv.toml").write_text('image = "host"\npython = "other/bin/python"\n')


@mutation("lockfile", "stale.platform-changed")
def platform_changed_in_the_project(case: Case) -> None:
    text = (case.root / "hpcenv.toml").read_text()
    (case.root / "hpcenv.toml").unlink()
    (case.root / "hpcenv.toml").write_text('platform = "linux/arm64"\n' + text)


@mutation("lockfile", "stale.image-changed", "stale.*")
def image_changed_in_the_project(case: Case) -> None:
    (case.root / "hpcenv.toml").unlink()
    (case.root / "hpcenv.toml").write_text('image = "docker://r.example.org/lab/torch:2"\npython = "env/bin/python"\n')


# -- a job's own files --------------------------------------------------------------------


@mutation("gate", "code.script-sha256")
def script_edited_while_the_job_waits(case: Case) -> None:
    def edit() -> None:
        (case.root / "train.py").unlink()
        (case.root / "train.py").write_text("print('trains otherwise')\n")

    case.stored["between"] = edit


@mutation("gate", "code.script-sha256")
def script_gone_while_the_job_waits(case: Case) -> None:
    case.stored["between"] = (case.root / "train.py").unlink


@mutation("gate", "packages.purepkg.content-sha256", *CONTENT)
def package_edited_while_the_job_waits(case: Case) -> None:
    case.stored["between"] = lambda: byte_in_a_py_with_size_and_time_kept(case)


# -- nodes --------------------------------------------------------------------------------


def _with(**values: object) -> Callable[[Facts], Facts]:
    """Facts with other values; `_` in a name stands for `.` at the first place, then for `-`."""

    def change(facts: Facts) -> Facts:
        named = {name.replace("_", ".", 1).replace("_", "-"): value for name, value in values.items()}
        return replace(facts, values=facts.values | named)  # type: ignore[arg-type]

    return change


def on_all(case: Case, **driver: str) -> None:
    for host in case.hosts.values():
        host.driver.update(driver)


@mutation("nodes", "host.driver-version", needs=("gcc",))
def driver_lower_than_the_floor_on_one_node(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_DRIVER"] = "535.183.01"


@mutation("nodes", "host.driver-version", needs=("gcc",))
def driver_lower_than_the_floor_on_all_nodes(case: Case) -> None:
    on_all(case, FAKE_DRIVER="535.183.01")


@mutation("nodes", "host.driver-version", needs=("gcc",))
def drivers_that_differ_above_the_floor(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_DRIVER"] = "590.48.01"


@mutation("nodes", "host.driver-version", "host.gpu-*", needs=("gcc",))
def node_without_a_driver(case: Case) -> None:
    case.hosts["n2"] = Host(kernel_module=False, libraries=False)


@mutation("nodes", "host.gpu-*", "host.driver-version", "host.gpu-count", needs=("gcc",))
def driver_that_nothing_answers_for(case: Case) -> None:
    case.hosts["n2"] = Host(libraries=False)


@mutation("nodes", "host.gpu-*", "host.driver-version", needs=("gcc",))
def driver_that_does_not_start(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_INIT"] = "9"


@mutation("nodes", "host.gpu-compute-capabilities", needs=("gcc",))
def gpus_that_torch_has_no_kernels_for(case: Case) -> None:
    on_all(case, FAKE_NAME="NVIDIA B200", FAKE_MAJOR="10", FAKE_CORES="18944")


@mutation("nodes", "host.gpu-compute-capabilities", "host.gpu-models", "host.gpu-sm-counts", needs=("gcc",))
def gpu_that_torch_has_no_kernels_for_on_one_node(case: Case) -> None:
    case.hosts["n2"].driver.update(
        FAKE_NAME="Tesla V100-SXM2-16GB", FAKE_MAJOR="7", FAKE_CORES="5120", FAKE_MIB="16160"
    )


@mutation("nodes", "host.gpu-models", "host.gpu-sm-counts", needs=("gcc",))
def gpu_models_that_differ_between_nodes(case: Case) -> None:
    case.hosts["n2"].driver.update(FAKE_NAME="NVIDIA A100-SXM4-80GB", FAKE_MAJOR="8", FAKE_CORES="6912")


@mutation("nodes", "host.gpu-mig", "host.gpu-models", needs=("gcc",))
def mig_on_one_node(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_MIG"] = "1"


@mutation("nodes", "host.gpu-mig", needs=("gcc",))
def mig_on_all_nodes(case: Case) -> None:
    on_all(case, FAKE_MIG="1")


@mutation("nodes", "host.gpu-mig", needs=("gcc",))
def mig_on_one_gpu_of_a_node(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_MIG"] = "0,1"


@mutation("nodes", "host.cpu-model", needs=("gcc",), severity="info")
def processors_of_two_types(case: Case) -> None:
    case.hosts["n1"].change = _with(host_cpu_model="AMD EPYC 7763 64-Core Processor")
    case.hosts["n2"].change = _with(host_cpu_model="Intel(R) Xeon(R) Platinum 8480+")


@mutation("nodes", "host.cpu-model", needs=("gcc",), profile="bitwise")
def processors_of_two_types_under_the_bitwise_profile(case: Case) -> None:
    processors_of_two_types(case)


@mutation("nodes", "env.ATEN_CPU_CAPABILITY", needs=("gcc",), severity="warn")
def variable_that_a_wrapper_sets_on_one_node(case: Case) -> None:
    case.hosts["n2"].change = lambda facts: replace(facts, values=facts.values | {"env.ATEN_CPU_CAPABILITY": "default"})


@mutation("nodes", "host.gpu-count", "host.gpu-*", needs=("gcc",))
def node_with_a_gpu_less(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_COUNT"] = "1"


@mutation("nodes", "host.gpu-count", "host.*", needs=("gcc",))
def node_with_a_lost_gpu(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_LOST"] = "1"


@mutation("nodes", "host.gpu-sm-counts", severity="warn", needs=("gcc",))
def gpus_of_one_name_with_fewer_multiprocessors(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_CORES"] = "14592"


@mutation("nodes", "host.gpu-sm-counts", needs=("gcc",), profile="bitwise")
def fewer_multiprocessors_under_the_bitwise_profile(case: Case) -> None:
    case.hosts["n2"].driver["FAKE_CORES"] = "14592"


@mutation("nodes", "host.machine", needs=("gcc",))
def node_with_another_processor(case: Case) -> None:
    case.hosts["n2"].change = _with(host_machine="aarch64")


@mutation("nodes", "facts", "network.route", needs=("gcc",))
def node_that_says_nothing(case: Case) -> None:
    case.hosts["n2"].change = lambda facts: None


@mutation("nodes", "facts", needs=("gcc",))
def facts_of_another_attempt(case: Case) -> None:
    case.hosts["n2"].change = lambda facts: replace(facts, attempt=1)


@mutation("nodes", "facts", needs=("gcc",))
def facts_of_another_run(case: Case) -> None:
    case.hosts["n2"].change = lambda facts: replace(facts, run="yesterday")


@mutation("nodes", "job.nodes", needs=("gcc",))
def job_with_fewer_nodes_than_planned(case: Case) -> None:
    del case.hosts["n2"]


def _second(case: Case) -> Case:
    """Another copy, which is what the second node has."""
    other = case.world.copy(case.root / "second-node")
    case.hosts["n2"].case = other
    return other


@mutation(
    "nodes", "libs.nccl.version", "libs.nccl.*", "compat.nccl", *CONTENT, "packages.nvidia-nccl.content-sha256",
    needs=("gcc",),
)  # fmt: skip
def node_with_another_library(case: Case) -> None:
    nccl_of_another_version_in_its_place(_second(case))


@mutation("nodes", "packages.purepkg", *CONTENT, needs=("gcc",))
def node_with_another_package(case: Case) -> None:
    other = _second(case)
    other.edit("purepkg-1.0.dist-info/METADATA", "Version: 1.0", "Version: 1.1")


@mutation("nodes", "libs.nccl.origin", "libs.*", "compat.nccl", needs=("gcc",))
def node_where_a_module_is_loaded(case: Case) -> None:
    other = _second(case)
    other.environ["LD_LIBRARY_PATH"] = str(_module(other))


@mutation("nodes", "container.nvidia-require", needs=("gcc",))
def driver_that_the_image_refuses(case: Case) -> None:
    def require(manifest: Manifest) -> Manifest:
        assert manifest.gpu_needs is not None
        needs = replace(manifest.gpu_needs, require={"NVIDIA_REQUIRE_CUDA": "cuda>=13.2"})
        return replace(manifest, gpu_needs=needs)

    case.stored["manifest"] = require


@mutation("nodes", "host.kernel", severity="info", needs=("gcc",))
def kernels_that_differ_are_only_told(case: Case) -> None:
    case.hosts["n2"].change = _with(host_kernel="4.18.0-other")


@mutation("nodes", "host.gpu", needs=("gcc",), profile="bitwise", name="another-gpu-than-the-locked-one-under-bitwise")
def _other_gpu(case: Case) -> None:
    # The lockfile names an H100; every node has an A100, which torch has kernels for.
    case.spec('[host]\ngpu = "h100"\n')
    case.world.lock(case.root)
    on_all(case, FAKE_NAME="NVIDIA A100-SXM4-80GB", FAKE_MAJOR="8", FAKE_CORES="6912")


@mutation("submit", "error.submit-rejected", needs=("gcc",))
def partition_with_gpus_that_torch_has_no_kernels_for(case: Case) -> None:
    gpus_of_the_partition(case, "v100")


def gpus_of_the_partition(case: Case, name: str) -> None:
    (case.root / "slurm").mkdir()
    for suffix, text in (
        ("out", f"gpu*|up|infinite|1-infinite|64|idle|256|4000000|gpu:{name}:16|(null)|n[1-64]\n"),
        ("err", ""),
        ("status", "0"),
    ):
        (case.root / f"slurm/sinfo.{suffix}").write_text(text)


@mutation("submit", "error.submit-rejected", needs=("gcc",))
def gpu_of_the_project_that_torch_has_no_kernels_for(case: Case) -> None:
    case.spec('[host]\ngpu = "v100"\n')
    case.world.lock(case.root)


# -- the image ----------------------------------------------------------------------------


def _other_sif(case: Case) -> bytes:
    data = bytearray(case.stored["file"].read_bytes())
    data[-1] ^= 0xFF
    return bytes(data)


SIF = "container.sif.sha256"


def _replace_sif(case: Case, data: bytes) -> None:
    path = case.stored["file"]
    status = path.stat()
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o444)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@mutation("sif", SIF, image=True)
def other_sif_of_the_same_size_and_time(case: Case) -> None:
    _replace_sif(case, _other_sif(case))


@mutation("sif", SIF, image=True)
def one_bit_in_the_header_of_the_sif(case: Case) -> None:
    data = bytearray(case.stored["file"].read_bytes())
    data[60] ^= 1  # in the UUID: no content
    _replace_sif(case, bytes(data))


@mutation("sif", SIF, image=True)
def sif_cut_short(case: Case) -> None:
    _replace_sif(case, case.stored["file"].read_bytes()[:-100])


@mutation("sif", SIF, image=True)
def sif_with_something_appended(case: Case) -> None:
    _replace_sif(case, case.stored["file"].read_bytes() + b"\0")


@mutation("sif", SIF, image=True)
def sif_that_is_empty(case: Case) -> None:
    _replace_sif(case, b"")


@mutation("sif", SIF, "environment", image=True)
def sif_that_is_gone(case: Case) -> None:
    case.stored["file"].unlink()


@mutation("sif", SIF, image=True)
def link_to_the_sif_led_to_another_one(case: Case) -> None:
    path = case.stored["file"]
    good, bad = path.with_name("good.sif"), path.with_name("bad.sif")
    bad.write_bytes(_other_sif(case))
    path.rename(good)
    path.symlink_to(bad)


@mutation("sif", SIF, image=True)
def other_sif_given_by_name(case: Case) -> None:
    case.stored["sif"] = case.root / "copy.sif"
    case.stored["sif"].write_bytes(_other_sif(case))


@mutation("sif", "system.packages-digest", severity="info", image=True)
def dpkg_upgrade_in_an_overlay(case: Case) -> None:
    status = case.stored["root"] / "var/lib/dpkg/status"
    status.write_text(status.read_text().replace("5.0.0-1", "5.0.0-2"))


@mutation("sif", "system.packages-digest", image=True, profile="bitwise")
def dpkg_upgrade_under_the_bitwise_profile(case: Case) -> None:
    dpkg_upgrade_in_an_overlay(case)


@mutation("sif", "packages.purepkg", *ENV, image=True)
def package_upgraded_in_an_overlay(case: Case) -> None:
    case.edit("purepkg-1.0.dist-info/METADATA", "Version: 1.0", "Version: 1.1")


@mutation("gate", "error.image-mismatch", image=True)
def sif_of_another_size_at_submission(case: Case) -> None:
    _replace_sif(case, case.stored["file"].read_bytes() + b"\0")


# What the tag now names; `before` and `after` are lockfiles of one project.
_IMAGE = ("container.*", "packages.*")


@mutation("diff", "container.env-digest", *_IMAGE, image=True)
def variable_of_the_image_changed(case: Case) -> None:
    case.stored["moved"]("--env", env=("LD_LIBRARY_PATH=/opt/lib",))


@mutation("diff", "container.rootfs-chain-id", *_IMAGE, image=True)
def layer_of_the_image_changed(case: Case) -> None:
    case.stored["moved"]("layer", layers=(b"one", b"two", b"four"))


@mutation("diff", "container.config-digest", *_IMAGE, image=True)
def entry_point_of_the_image_changed(case: Case) -> None:
    case.stored["moved"]("entrypoint", entrypoint=["/bin/other"])
