"""Changes that raise nothing: no finding that blocks, and none that warns."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import zstandard
from corpus_mutations import Mutation, _own_interpreter, _with, gpus_of_the_partition, on_all
from corpus_world import GIT, MINOR, UV, Case

from hpcenv.records.facts import Facts, Interface

# A finding of this severity in these fields is documented as worth no worry (project/fields.py).
DOCUMENTED = {"recompressed-layers": ("container.manifest-digest",)}

HARMLESS: list[Mutation] = []


def harmless(
    level: str = "full", *, name: str = "", **words: object
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    def add(apply: Callable[[Case], None]) -> Callable[[Case], None]:
        given = name or apply.__name__.strip("_").replace("_", "-")
        HARMLESS.append(Mutation(name=given, level=level, field=(), apply=apply, **words))  # type: ignore[arg-type]
        return apply

    return add


# -- the same environment elsewhere -------------------------------------------------------


@harmless()
def moved_to_another_place(case: Case) -> None:
    """Every copy is."""


@harmless("record", name="moved-to-another-place-and-looked-at-quickly")
def _moved_record(case: Case) -> None:
    pass


@harmless("deep", name="moved-to-another-place-and-looked-at-deeply")
def _moved_deep(case: Case) -> None:
    pass


@harmless("gate", name="moved-to-another-place-and-started-as-a-job")
def _moved_gate(case: Case) -> None:
    pass


@harmless(profile="bitwise", name="moved-to-another-place-under-the-bitwise-profile")
def _moved_bitwise(case: Case) -> None:
    pass


@harmless("deep", profile="bitwise", name="looked-at-deeply-under-the-bitwise-profile")
def _moved_bitwise_deep(case: Case) -> None:
    pass


@harmless()
def moved_to_a_long_path_with_blanks(case: Case) -> None:
    target = case.root / ("a long name with blanks é " * 4) / "x"
    target.mkdir(parents=True)
    for name in ("env", "hpcenv.toml", "lockfiles", "train.py"):
        shutil.move(case.root / name, target / name)
    case.root = target


@harmless("gate")
def run_folder_at_a_longer_path(case: Case) -> None:
    case.options["runs_dir"] = str(case.root / "scratch/users/alice/projects/2026/runs")


@harmless()
def interpreter_moved_to_another_place(case: Case) -> None:
    _own_interpreter(case)


@harmless("relock")
def locked_again_elsewhere(case: Case) -> None:
    case.environ |= {"USER": "bob", "HOME": str(case.root / "bob")}


# -- files that are not imported ----------------------------------------------------------


@harmless()
def compiled_files_made_again(case: Case) -> None:
    for cache in case.site.rglob("__pycache__"):
        shutil.rmtree(cache)
    compileall.compile_dir(case.site, quiet=2, force=True, maxlevels=3, optimize=0)


@harmless()
def compiled_files_removed(case: Case) -> None:
    for cache in case.site.rglob("__pycache__"):
        shutil.rmtree(cache)


@harmless()
def compiled_files_of_other_pythons(case: Case) -> None:
    for tag in ("cpython-38", "cpython-314", "pypy310"):
        case.write(f"purepkg/__pycache__/core.{tag}.pyc", b"\0" * 20)


@harmless()
def times_touched(case: Case) -> None:
    for path in case.path("purepkg").rglob("*.py"):
        data = path.read_bytes()
        case.write(str(path.relative_to(case.site)), data)
        os.utime(path, (1_000_000_000, 1_000_000_000))


@harmless()
def permissions_of_another_umask(case: Case) -> None:
    for name in ("purepkg", "torch/nn"):
        for path in case.path(name).rglob("*.py"):
            case.write(str(path.relative_to(case.site)), path.read_bytes())
            path.chmod(0o664)
        case.path(name).chmod(0o775)


@harmless(needs=("root",))
def files_of_another_owner(case: Case) -> None:
    for path in case.path("purepkg").rglob("*.py"):
        case.write(str(path.relative_to(case.site)), path.read_bytes())
        os.chown(path, 12345, 12345)


@harmless()
def hard_links_broken_with_the_same_content(case: Case) -> None:
    for path in [*case.path("purepkg").rglob("*.py"), *case.path("nvidia").rglob("*.so*")]:
        case.write(str(path.relative_to(case.site)), path.read_bytes())


@harmless()
def folders_written_in_another_order(case: Case) -> None:
    aside = case.root / "aside"
    for folder in (case.path("purepkg"), case.path("torch/lib")):
        shutil.move(folder, aside)
        folder.mkdir()
        for path in sorted(aside.iterdir(), reverse=True):
            shutil.move(path, folder / path.name)
        aside.rmdir()


@harmless()
def backups_of_an_editor(case: Case) -> None:
    for name in ("core.py~", ".core.py.swp", "#core.py#", "core.py.orig", "core.py.rej"):
        case.write(f"purepkg/{name}", "LIMIT = 7\n")


@harmless()
def texts_in_site_packages(case: Case) -> None:
    for name in ("README.txt", "LICENSE", "notes.md", "data.json", "purepkg/todo.txt"):
        case.write(name, "text\n")


@harmless()
def file_added_to_bin(case: Case) -> None:
    case.write("/bin/my-tool", "#!/bin/sh\n")


@harmless()
def unrelated_files_in_the_prefix(case: Case) -> None:
    for name in ("/share/doc/x.txt", "/etc/x.conf", "/var/cache/x", "/share/man/man1/x.1", "/setup.py"):
        case.write(name, "x\n")


@harmless()
def empty_folders(case: Case) -> None:
    for name in ("empty", "purepkg/empty/deeper"):
        case.path(name).mkdir(parents=True)


@harmless()
def activation_scripts_and_prompt(case: Case) -> None:
    case.write("/bin/activate", "# mine\n")
    case.write("/pyvenv.cfg", case.path("/pyvenv.cfg").read_text() + "prompt = mine\n")


# -- installers ---------------------------------------------------------------------------


@harmless()
def installer_named_otherwise(case: Case) -> None:
    case.write("purepkg-1.0.dist-info/INSTALLER", "uv\n")


@harmless()
def requested_added_and_removed(case: Case) -> None:
    case.remove("purepkg-1.0.dist-info/REQUESTED")
    case.write("torch-2.13.0.dist-info/REQUESTED", "")
    case.write("extpkg-2.1.dist-info/uv_cache.json", "{}")


@harmless()
def installed_again_by_pip_from_a_path(case: Case) -> None:
    wheel = str(next(case.world.wheels.glob("purepkg-*.whl")))
    case.world.pip(case.env, "install", "--force-reinstall", "--no-compile", wheel)


@harmless(needs=("uv",))
def installed_again_by_uv(case: Case) -> None:
    names = sorted({wheel.name.split("-")[0] for wheel in case.world.wheels.glob("*.whl")})
    words = ["--no-index", "--no-deps", "--find-links", str(case.world.wheels), "--link-mode", "copy", "--reinstall"]
    argv = [
        str(UV),
        "pip",
        "install",
        "--no-config",
        "--no-cache",
        "--python",
        str(case.env / "bin/python"),
        *words,
        *names,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, env=case.world.environ)
    assert done.returncode == 0, done.stderr


@harmless()
def left_over_of_an_interrupted_pip(case: Case) -> None:
    case.write("~urepkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: purepkg\nVersion: 1.0\n")


@harmless("lockfile", name="header-of-the-lockfile-changed")
def _header(case: Case) -> None:
    case.edit_lockfile(lambda text: "# of our paper\n\n" + text.replace('"hpcenv ', '"hpcenv 9.9 '))


# -- who and where ------------------------------------------------------------------------


@harmless()
def other_user_and_home(case: Case) -> None:
    (case.root / "alice").mkdir()
    case.environ |= {"USER": "alice", "LOGNAME": "alice", "HOME": str(case.root / "alice")}


@harmless()
def packages_in_a_disabled_user_site(case: Case) -> None:
    minor = MINOR.removeprefix("python")
    site = Path(case.environ["HOME"]) / f".local/lib/python{minor}/site-packages"
    case.install("purepkg", "9.9", {"purepkg/__init__.py": b"", "usercustomize.py": b""}, into=site)


@harmless()
def other_working_directory(case: Case) -> None:
    place = case.root / "elsewhere"
    place.mkdir()
    for name in ("json.py", "torch.py", "purepkg.py", "sitecustomize.py"):
        (place / name).write_text("raise SystemExit('imported from the working directory')\n")
    before = os.getcwd()
    case.undo.append(lambda: os.chdir(before))
    os.chdir(place)


@harmless()
def other_language(case: Case) -> None:
    case.environ |= {"LANG": "de_DE.ISO-8859-1", "LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "tr"}


@harmless()
def no_language(case: Case) -> None:
    case.environ |= {"LANG": "C", "LC_ALL": "POSIX"}


@harmless()
def other_time_zone(case: Case) -> None:
    case.environ["TZ"] = "Pacific/Auckland"


@harmless("gate")
def more_variables(case: Case) -> None:
    case.environ |= {
        "EDITOR": "vi",
        "SLURM_JOB_ID": "7",
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
    }


@harmless("gate")
def variables_that_change_python_in_the_callers_shell(case: Case) -> None:
    (case.root / "mine").mkdir()
    case.environ |= {
        "PYTHONPATH": str(case.root / "mine"), "PYTHONHOME": "/nonexistent", "PYTHONSTARTUP": "/x", "PYTHONUSERBASE": "/y",
        "PYTHONHASHSEED": "7", "PYTHONOPTIMIZE": "2", "CONDA_PREFIX": "/opt/conda", "VIRTUAL_ENV": "/other", "LD_PRELOAD": "",
    }  # fmt: skip


@harmless(name="the-same-in-the-shell-of-hpcenv-verify")
def _shell(case: Case) -> None:
    variables_that_change_python_in_the_callers_shell(case)


@harmless("gate")
def pythonhome_that_names_the_same_python(case: Case) -> None:
    case.variable("PYTHONHOME", sys.base_prefix)


@harmless("gate")
def variable_of_the_project_that_was_there_when_it_was_locked(case: Case) -> None:
    case.project_variable("LD_LIBRARY_PATH", "/opt/vendor/lib")
    case.world.lock(case.root)


@harmless("gate")
def tuning_of_nccl_for_the_ranks(case: Case) -> None:
    case.variable("NCCL_ALGO", "Ring")


# -- nodes --------------------------------------------------------------------------------


@harmless("nodes", needs=("gcc",))
def two_equal_nodes(case: Case) -> None:
    pass


@harmless("nodes", needs=("gcc",), profile="bitwise", name="two-equal-nodes-under-the-bitwise-profile")
def _equal_bitwise(case: Case) -> None:
    pass


@harmless("nodes", needs=("gcc",))
def other_host_names(case: Case) -> None:
    case.hosts["n1"].change = _with(host_hostname="gpu-a-17.cluster")
    case.hosts["n2"].change = _with(host_hostname="gpu-b-01")


@harmless("nodes", needs=("gcc",))
def other_kernel_and_tools(case: Case) -> None:
    change = _with(
        host_kernel="4.18.0-553", host_apptainer="1.3.0", host_slurm="23.02.7", host_memlock="64 KiB", host_cpus=3
    )
    case.hosts["n2"].change = change


@harmless("nodes", needs=("gcc",))
def other_network_interfaces(case: Case) -> None:
    def change(facts: Facts) -> Facts:
        cards = (Interface(name="ib0", addresses=("10.9.0.2",)), Interface(name="docker0", addresses=("172.17.0.1",)))
        return replace(facts, network=replace(facts.network, interfaces=cards))

    case.hosts["n2"].change = change


@harmless("nodes", needs=("gcc",))
def other_gpus_of_the_same_model(case: Case) -> None:
    case.hosts["n2"].driver.update(
        FAKE_UUID="GPU-0000000a-1111-2222-3333-444444444444", FAKE_ECC="0", FAKE_MIB="81251", FAKE_COUNT="2"
    )


@harmless("nodes", needs=("gcc",))
def newer_driver_everywhere(case: Case) -> None:
    on_all(case, FAKE_DRIVER="610.43.02", FAKE_CUDA="13030")


@harmless("nodes", needs=("gcc",))
def more_gpus_than_asked_for(case: Case) -> None:
    on_all(case, FAKE_COUNT="4")


@harmless("nodes", needs=("gcc",))
def newer_gpu_of_the_same_major_capability(case: Case) -> None:
    on_all(case, FAKE_NAME="NVIDIA L40S", FAKE_MAJOR="8", FAKE_MINOR="9", FAKE_CORES="18176", FAKE_MIB="46068")


@harmless("nodes", needs=("gcc",))
def nodes_with_their_own_copies_of_the_environment(case: Case) -> None:
    case.hosts["n2"].case = case.world.copy(case.root / "local-disk/of/the/second/node")


@harmless("submit", needs=("gcc",))
def partition_with_gpus_that_torch_has_kernels_for(case: Case) -> None:
    gpus_of_the_partition(case, "h100")


# -- the image ----------------------------------------------------------------------------


@harmless("sif", image=True)
def sif_touched(case: Case) -> None:
    os.utime(case.stored["file"], (1_000_000_000, 1_000_000_000))
    case.stored["file"].chmod(0o644)


@harmless("sif", image=True)
def copy_of_the_sif_at_another_place(case: Case) -> None:
    case.stored["sif"] = case.root / "staged on the node/copy.sif"
    case.stored["sif"].parent.mkdir()
    shutil.copyfile(case.stored["file"], case.stored["sif"])


@harmless("sif", image=True)
def sif_behind_a_link(case: Case) -> None:
    path = case.stored["file"]
    path.rename(path.with_name("real.sif"))
    path.symlink_to("real.sif")


@harmless("sif", image=True)
def shell_of_another_user_around_the_container(case: Case) -> None:
    variables = {
        "PYTHONPATH": "/x",
        "LD_LIBRARY_PATH": "/opt/lib",
        "LD_PRELOAD": "",
        "APPTAINER_BIND": "/data",
        "HOME": "/home/bob",
    }
    case.environ |= variables | {"APPTAINERENV_PYTHONPATH": "/y", "SINGULARITYENV_LD_LIBRARY_PATH": "/z", "USER": "bob"}


@harmless("gate", image=True)
def image_started_as_a_job(case: Case) -> None:
    pass


@harmless("diff", image=True)
def recompressed_layers(case: Case) -> None:
    case.stored["moved"]("zstd", compress=zstandard.compress, media="tar+zstd")


@harmless("diff", image=True)
def tag_pushed_again_without_change(case: Case) -> None:
    case.stored["moved"]("same")


@harmless(needs=("git",))
def editable_source_with_build_leftovers(case: Case) -> None:
    # What .gitignore names is no change of the source.
    assert GIT
    left = case.world.source / "src/editpkg/__pycache__"
    case.undo.append(lambda: shutil.rmtree(left))
    left.mkdir()
    (left / f"x.{sys.implementation.cache_tag}.pyc").write_bytes(b"")
