"""Changes of what is mounted over an image: by hpcenv.toml, by an administrator, on one node."""

from __future__ import annotations

import json
from pathlib import Path

from corpus_harmless import harmless
from corpus_mutations import mutation
from corpus_world import Case, environment_variable

PACKAGE = "/usr/lib/python3/dist-packages/purepkg/core.py"


def in_image(case: Case, path: str, text: str = "X = 1\n") -> str:
    """Give the image a file."""
    place = case.stored["root"] / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return path


def bind(case: Case, target: str, source: str = "mine", *, read_only: bool = False) -> Path:
    """Add a bind to hpcenv.toml."""
    place = case.root / source
    if not place.exists():
        place.write_text("X = 2\n")
    mode = "read-only = true\n" if read_only else ""
    case.spec(f'[[bind]]\nsource = "{place}"\ntarget = "{target}"\n{mode}')
    return place


def relock(case: Case) -> None:
    with environment_variable("PATH", case.environ["PATH"]):
        case.world.lock(case.root, environ=case.environ)


def mounted(case: Case, target: str, *, fs_type: str = "ext4", root: str = "/s/x") -> None:
    """Let the fake Apptainer mount something that hpcenv did not ask for, as `bind path` in apptainer.conf does."""
    conf = case.root / "bin/apptainer.json"
    data = json.loads(conf.read_text())
    conf.unlink()
    data["mounts"] = [*data.get("mounts", []), f"9 9 8:1 {root} {target} rw - {fs_type} x rw\n"]
    conf.write_text(json.dumps(data))


@mutation("lockfile", "stale.bind-changed", image=True)
def bind_added_after_the_lock(case: Case) -> None:
    bind(case, "/data")


@mutation("gate", "stale.bind-changed", image=True)
def bind_over_a_package_before_a_submission(case: Case) -> None:
    bind(case, in_image(case, PACKAGE))


@mutation("lockfile", "stale.bind-changed", image=True)
def bind_with_another_mode(case: Case) -> None:
    bind(case, "/data", read_only=True)
    relock(case)
    text = (case.root / "hpcenv.toml").read_text()
    (case.root / "hpcenv.toml").write_text(text.replace("read-only = true\n", ""))


@mutation("lockfile", "stale.bind-changed", image=True)
def bind_with_another_target(case: Case) -> None:
    bind(case, "/data")
    relock(case)
    text = (case.root / "hpcenv.toml").read_text()
    (case.root / "hpcenv.toml").write_text(text.replace('"/data"', '"/data2"'))


@mutation("gate", "container.mounts", image=True)
def bind_over_a_package_and_frozen(case: Case) -> None:
    bind(case, in_image(case, PACKAGE))
    case.options["frozen"] = True


def _content(case: Case) -> None:
    place = bind(case, in_image(case, PACKAGE))
    relock(case)
    place.write_text("X = 3\n")


mutation("gate", "container.bind-content", image=True, name="content-of-a-bind-over-a-package")(_content)
mutation("record", "container.bind-content", image=True, name="content-of-a-bind-seen-by-verify")(_content)


@mutation("gate", "container.bind-content", image=True)
def file_added_to_a_bound_folder_over_the_image(case: Case) -> None:
    in_image(case, PACKAGE)
    (case.root / "fork").mkdir()
    (case.root / "fork/core.py").write_text("X = 2\n")
    bind(case, "/usr/lib/python3/dist-packages/purepkg", "fork")
    relock(case)
    (case.root / "fork/util.py").write_text("")


@mutation("gate", "container.bind-content", image=True)
def link_retargeted_in_a_bound_folder_over_the_image(case: Case) -> None:
    in_image(case, PACKAGE)
    (case.root / "fork").mkdir()
    (case.root / "fork/core.py").symlink_to("a.py")
    bind(case, "/usr/lib/python3/dist-packages/purepkg", "fork")
    relock(case)
    (case.root / "fork/core.py").unlink()
    (case.root / "fork/core.py").symlink_to("b.py")


@mutation("gate", "container.bind-content", image=True)
def bound_file_that_cannot_be_read(case: Case) -> None:
    place = bind(case, in_image(case, PACKAGE))
    relock(case)
    place.unlink()
    place.mkdir()


for _name, _target in {
    "package": PACKAGE,
    "standard-library": "/usr/lib/python3.11/statistics.py",
    "libm": "/usr/lib/x86_64-linux-gnu/libm.so.6",
    "ld-so-preload": "/etc/ld.so.preload",
    "torch": "/usr/local/lib/python3.11/dist-packages/torch/nn/functional.py",
    "hosts-file-from-elsewhere": "/etc/nsswitch.conf",
}.items():

    def _by_administrator(case: Case, target: str = _target) -> None:
        mounted(case, in_image(case, target))

    mutation("gate", "container.mounts", image=True, name=f"mount-of-an-administrator-over-{_name}")(_by_administrator)
    mutation("record", "container.mounts", image=True, name=f"mount-over-{_name}-seen-by-verify")(_by_administrator)


@mutation("gate", "container.mounts", image=True)
def second_mount_over_a_locked_bind(case: Case) -> None:
    bind(case, in_image(case, PACKAGE))
    relock(case)
    mounted(case, PACKAGE)


@mutation("gate", "container.mounts", image=True)
def mount_that_looks_like_a_default_one_with_another_root(case: Case) -> None:
    mounted(case, in_image(case, "/etc/hosts"), root="/s/evil")


@mutation("gate", "container.mounts", image=True)
def driver_mount_without_gpus(case: Case) -> None:
    mounted(case, in_image(case, "/usr/bin/nvidia-smi"), root="/usr/bin/nvidia-smi")


@mutation("diff", "container.binds", severity="warn", image=True)
def binds_of_two_lockfiles(case: Case) -> None:
    (case.root / "lockfiles/before.lock.toml").write_bytes(case.lockfile().read_bytes())
    bind(case, "/data")
    relock(case)
    (case.root / "lockfiles/after.lock.toml").write_bytes(case.lockfile().read_bytes())


def _edited_lockfile(case: Case) -> None:
    case.edit_lockfile(lambda text: text.replace("source-date-epoch = ", "source-date-epoch = 1"))
    case.options["frozen"] = True


mutation("gate", "lockfile.edited", severity="warn", image=True, name="edited-lockfile-and-frozen")(_edited_lockfile)


# -- harmless -----------------------------------------------------------------------------


@harmless("gate", image=True)
def bind_locked_and_used_as_it_is(case: Case) -> None:
    bind(case, "/data", read_only=True)
    bind(case, in_image(case, PACKAGE), "core")
    relock(case)


@harmless("gate", image=True)
def source_of_a_bind_moved_with_its_content(case: Case) -> None:
    place = bind(case, in_image(case, PACKAGE))
    relock(case)
    place.rename(case.root / "moved")
    text = (case.root / "hpcenv.toml").read_text()
    (case.root / "hpcenv.toml").write_text(text.replace(str(place), str(case.root / "moved")))


@harmless("gate", image=True)
def data_changed_behind_a_bind_that_hides_nothing(case: Case) -> None:
    place = bind(case, "/data")
    relock(case)
    place.write_text("other data\n")


@harmless("gate", image=True)
def mounts_that_apptainer_makes_itself(case: Case) -> None:
    mounted(case, "/proc", fs_type="proc", root="/")
    mounted(case, "/sys", fs_type="sysfs", root="/")
    mounted(case, "/sys/fs/cgroup", fs_type="cgroup2", root="/")
    mounted(case, "/dev", fs_type="tmpfs", root="/")
    mounted(case, "/dev/shm", fs_type="tmpfs", root="/")
    mounted(case, "/tmp", fs_type="xfs", root="/tmp")
    for name in ("/etc/hosts", "/etc/localtime", "/etc/resolv.conf", "/etc/passwd", "/etc/group"):
        mounted(case, in_image(case, name), root="/usr/share/zoneinfo/UTC" if "localtime" in name else name)


@harmless("gate", image=True)
def mount_of_an_administrator_where_the_image_has_nothing(case: Case) -> None:
    mounted(case, "/scratch", fs_type="lustre", root="/")
    mounted(case, "/opt/site/modules", fs_type="nfs4", root="/export/modules")


@harmless("gate", image=True)
def folders_of_the_image_mounted_one_by_one(case: Case) -> None:
    mounted(case, in_image(case, "/usr/lib/locale"), fs_type="squashfs", root="/usr/lib/locale")
