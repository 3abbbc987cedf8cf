"""What a lockfile covers since revision 2 (docs/decisions/0039-lockfile-revision-2.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from corpus_binds import bind, relock
from corpus_harmless import harmless
from corpus_mutations import UNLISTED, mutation
from corpus_not_checked import outside
from corpus_world import CONDA, Case

_CONDA_CONTENT = "packages.conda-content-digest"


def linked_module(case: Case) -> Path:
    """A module of the user's own folder, behind a link in site-packages."""
    module = outside(case, "mylib/__init__.py", "X = 1\n")
    case.path("mylib").symlink_to(module.parent)
    return module


def locked_data(case: Case) -> Path:
    """Data with three classes, one folder each, one of them empty."""
    folder = outside(case, "data/cats/1.png", "1").parents[1]
    (folder / "dogs").mkdir()
    case.spec(f'[[data]]\npath = "{folder}"\ncompare = "sha256"\n')
    return folder


def old_conda_record(case: Case) -> None:
    """A package whose record has a list of files and no hashes, in the old form."""
    case.write("/lib/libmkl_rt.so", "one")
    record = CONDA | {"name": "blas", "files": ["lib/libmkl_rt.so", "share/doc/blas.txt"]}
    case.write("/share/doc/blas.txt", "one")
    case.write("/conda-meta/blas-1.0-mkl.json", json.dumps(record))


# -- caught -------------------------------------------------------------------------------


@mutation("record", *UNLISTED)
def module_changed_behind_a_link_out_of_the_environment(case: Case) -> None:
    module = linked_module(case)
    case.world.lock(case.root)
    module.write_text("X = 2\n")


@mutation("record", *UNLISTED)
def module_added_behind_a_link_out_of_the_environment(case: Case) -> None:
    module = linked_module(case)
    case.world.lock(case.root)
    outside(case, "mylib/inner/more.py", "Y = 1\n")
    assert module.exists()


@mutation("record", *UNLISTED)
def entry_points_given_to_a_package_without(case: Case) -> None:
    case.write("extpkg-2.1.dist-info/entry_points.txt", "[torch.backends]\nx = purepkg.core:main\n")


@mutation("record", *UNLISTED)
def entry_points_given_to_an_editable_install(case: Case) -> None:
    case.write("editpkg-1.0.dist-info/entry_points.txt", "[torch.backends]\nx = purepkg.core:main\n")


@mutation("record", *UNLISTED)
def data_whose_record_row_has_no_hash(case: Case) -> None:
    case.edit("nohash/table.json", "1", "2", keep_times=True)


@mutation("full", *UNLISTED)
def data_whose_record_row_has_no_hash_removed(case: Case) -> None:
    case.remove("nohash/table.json")


@mutation("full", "packages.nohash.programs-sha256")
def program_whose_record_row_has_no_hash(case: Case) -> None:
    case.edit("/bin/nohash-tool", "one", "two", keep_times=True)


for _name in ("torch/lib/libdevice.10.bc", "extpkg/kernel.cubin", "torch/lib/rocblas/library/Kernels.so-000-gfx942.co"):

    def _device_code(case: Case, name: str = _name) -> None:
        case.write(name, b"one")
        case.world.lock(case.root)
        case.write(name, b"two")

    mutation("record", *UNLISTED, name=f"unlisted-{_name.rpartition('.')[2]}-changed")(_device_code)


@mutation("full", _CONDA_CONTENT)
def library_of_a_conda_record_without_hashes(case: Case) -> None:
    old_conda_record(case)
    case.world.lock(case.root)
    case.write("/lib/libmkl_rt.so", "two")


def preloaded_changed(variable: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        body = "int corpus_preloaded(void) { return %d; }"
        library = outside(case, "libmine.so", "")
        library.write_bytes(case.world.libraries.build("libmine.so", body % 1).read_bytes())
        case.project_variable(variable, str(library))
        case.world.lock(case.root)
        library.unlink()
        library.write_bytes(case.world.libraries.build("libmine.so", body % 2, variant="other").read_bytes())

    return change


mutation("gate", "libs.ld-preload", "libs.system", needs=("gcc",), name="preloaded-library-changed")(
    preloaded_changed("LD_PRELOAD")
)
mutation("gate", "libs.ld-audit", needs=("gcc",), name="audit-library-changed")(preloaded_changed("LD_AUDIT"))


def bound(case: Case, target: str, file: str) -> Path:
    """A folder of modules, bound where PYTHONPATH leads to it."""
    (case.root / "mine" / file).parent.mkdir(parents=True)
    (case.root / "mine" / file).write_text("X = 1\n")
    bind(case, target, "mine")
    case.project_variable("PYTHONPATH", "/opt/pp")
    relock(case)
    return case.root / "mine" / file


@mutation("gate", "container.bind-content", image=True)
def module_in_a_bind_on_the_search_path(case: Case) -> None:
    bound(case, "/opt/pp", "helper.py").write_text("X = 2\n")


@mutation("gate", "container.bind-content", image=True)
def module_below_a_bind_above_the_search_path(case: Case) -> None:
    bound(case, "/opt", "pp/helper.py").write_text("X = 2\n")


@mutation("record", "container.bind-content", image=True)
def module_in_a_bind_on_the_search_path_seen_by_verify(case: Case) -> None:
    bound(case, "/opt/pp", "helper.py").write_text("X = 2\n")


@mutation("gate", "data.data")
def empty_folder_added_to_data(case: Case) -> None:
    folder = locked_data(case)
    case.stored["between"] = (folder / "birds").mkdir


@mutation("gate", "data.data")
def empty_folder_of_data_removed(case: Case) -> None:
    folder = locked_data(case)
    case.stored["between"] = (folder / "dogs").rmdir


# -- harmless -----------------------------------------------------------------------------


@harmless()
def leftovers_of_editors_and_archives(case: Case) -> None:
    case.path("purepkg/.#core.py").symlink_to("alice@login.1234:1700000000")
    for name in ("purepkg/._core.py", "._purepkg", "._native.so", "purepkg/.ipynb_checkpoints/core-checkpoint.py"):
        case.write(name, b"\0\5\x16\7")
    for name in ("~urepkg/__init__.py", "~urepkg/core.py", "~xtpkg.libs/libx.so"):
        case.write(name, "X = 1\n")


@harmless()
def data_behind_a_link_out_of_the_environment(case: Case) -> None:
    module = linked_module(case)
    case.world.lock(case.root)
    outside(case, "mylib/table.csv", "1\n")
    outside(case, "mylib/.git/hooks/hook.py", "1\n")
    outside(case, "mylib/__pycache__/x.cpython-311.pyc", "1\n")
    assert module.exists()


@harmless("gate", image=True)
def what_lies_beside_the_code_in_a_bind(case: Case) -> None:
    module = bound(case, "/opt", "pp/helper.py")
    (case.root / "mine/data").mkdir()
    (case.root / "mine/data/1.bin").write_text("1")
    (module.parent / "__pycache__").mkdir()
    (module.parent / "__pycache__/helper.cpython-311.pyc").write_text("1")


@harmless("gate")
def data_with_empty_folders_as_it_is(case: Case) -> None:
    locked_data(case)
