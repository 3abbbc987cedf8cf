"""Unexpected mounts of a container, told from those that hpcenv and Apptainer make."""

from __future__ import annotations

import pytest

from hpcenv.identity.mounts import MountLine, missing, over_overlay, parse_mountinfo, shows_overlay, unexplained
from hpcenv.records.manifest import Bind, Overlay

# Recorded in a container of Apptainer 1.4.5 on 2026-11-22; options and host paths are shortened.
RECORDED = """\
820 765 0:343 / / rw,nodev,relatime unbindable - overlay overlay ro,lowerdir=/var/lib/apptainer/a:/var/lib/apptainer/b
822 820 0:287 / /dev rw,nosuid,relatime master:146 - tmpfs dev rw,mode=755
823 822 0:294 / /dev/pts rw,relatime master:147 - devpts devpts rw,gid=5,mode=620,ptmxmode=666
824 822 0:295 / /dev/shm rw,nosuid,nodev,relatime master:148 - tmpfs shm rw
825 820 0:262 /usr/share/zoneinfo/Etc/UTC /etc/localtime rw,nosuid,nodev,relatime master:45 - overlay overlay rw
826 820 0:262 /etc/hosts /etc/hosts rw,nosuid,nodev,relatime master:45 - overlay overlay rw
827 820 0:269 / /proc rw,nosuid,nodev,noexec,relatime master:46 - proc proc rw
828 820 0:279 / /sys rw,nosuid,nodev,noexec,relatime master:47 - sysfs sys rw
830 820 254:0 /srv/home/alice/d/runs/r1/home/n1 /hpcenv/home rw,nosuid,nodev,relatime master:149 - ext4 /dev/vda rw
831 820 0:283 / /tmp rw,nosuid,nodev,relatime master:144 - tmpfs tmp rw
832 820 0:262 /var/tmp /var/tmp rw,nosuid,nodev,relatime master:45 - overlay overlay rw
833 820 0:301 /etc/resolv.conf /etc/resolv.conf rw,nosuid,relatime master:156 - tmpfs tmpfs rw,size=65536k
834 820 0:301 /etc/passwd /etc/passwd rw,nosuid,relatime master:156 - tmpfs tmpfs rw,size=65536k
835 820 0:301 /etc/group /etc/group rw,nosuid,relatime master:156 - tmpfs tmpfs rw,size=65536k
838 820 254:0 /srv/home/alice/d /home/alice/d rw,nosuid,nodev,relatime master:149 - ext4 /dev/vda rw
"""
ON_NODE = (
    MountLine(device="0:262", root="/", target="/", fs_type="overlay"),
    MountLine(device="254:0", root="/srv/home", target="/home", fs_type="ext4"),
    MountLine(device="0:50", root="/", target="/home/alice/d/nested", fs_type="nfs4"),
)
WORKDIR = Bind(source="/home/alice/d", target="/home/alice/d")


def mount(target: str, *, device: str = "254:0", root: str = "/s/x", fs_type: str = "ext4") -> MountLine:
    return MountLine(device=device, root=root, target=target, fs_type=fs_type)


def left(*more: MountLine, asked: tuple[Bind, ...] = (WORKDIR,), gpus: bool = False) -> list[str]:
    found = unexplained((*parse_mountinfo(RECORDED), *more), asked, ON_NODE, gpus=gpus)
    return [mount.target for mount in found]


def test_a_container_with_nothing_else_has_no_unexplained_mount() -> None:
    assert left() == []


def test_a_mount_that_nobody_asked_for_is_left() -> None:
    assert left(mount("/usr/lib/python3/x.py")) == ["/usr/lib/python3/x.py"]


def test_an_asked_bind_with_another_source_is_left() -> None:
    assert left(mount("/home/alice/d", root="/srv/home/bob")) == ["/home/alice/d"]


def test_what_is_mounted_below_a_source_on_the_node_is_part_of_its_bind() -> None:
    nested = mount("/home/alice/d/nested", device="0:50", root="/", fs_type="nfs4")
    assert left(nested) == []
    assert left(mount("/home/alice/d/nested", device="0:51", root="/")) == ["/home/alice/d/nested"]


def test_a_bind_whose_target_is_a_link_in_the_image_is_known_by_its_source() -> None:
    asked = (WORKDIR, Bind(source="/home/alice/lib", target="/lib/mine"))
    assert left(mount("/usr/lib/mine", root="/srv/home/alice/lib"), asked=asked) == []


@pytest.mark.parametrize("name", ["/usr/bin/nvidia-smi", "/usr/bin/rocminfo", "/.singularity.d/libs/libcuda.so.1"])
def test_mounts_of_the_driver_are_known_only_with_gpus(name: str) -> None:
    driver = mount(name, root="/usr" + name)
    assert left(driver, gpus=True) == []
    assert left(driver) == [name]


def test_a_default_bind_with_another_root_is_left() -> None:
    assert left(mount("/etc/hosts", root="/s/evil")) == ["/etc/hosts"]


def test_an_asked_bind_that_is_not_mounted_is_missing() -> None:
    mounts = parse_mountinfo(RECORDED)
    assert missing(mounts, (WORKDIR,), ON_NODE) == ()
    assert missing(mounts, (WORKDIR, Bind(source="/home/bob", target="/data")), ON_NODE) == ("/data",)


def test_a_source_on_the_first_file_system_of_a_node_is_known() -> None:
    asked = (WORKDIR, Bind(source="/opt/nowhere", target="/data"))
    assert left(mount("/data", device="0:262", root="/opt/nowhere"), asked=asked) == []


def test_a_path_with_a_blank_is_decoded() -> None:
    [found] = parse_mountinfo(r"1 2 8:1 /a\040b /c\011d rw shared:1 - ext4 /dev/x rw")
    assert (found.root, found.target) == ("/a b", "/c\td")


@pytest.mark.parametrize("text", ["", "nonsense\n", "1 2 8:1 / / rw ext4 x rw\n"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mountinfo"):
        parse_mountinfo(text)


# Recorded with Apptainer 1.4.5 on 2026-11-23: `--mount type=bind,source=venv.sqsh,destination=/user-software,image-src=/,ro`.
SQUASHFS = "353 326 0:355 / /user-software ro,nosuid,nodev,relatime master:82 - fuse.squashfuse_ll squashfuse_ll ro,user_id=2001"
VENV = Overlay(source="/home/alice/venv.sqsh", use="venv", target="/user-software")


def with_overlay(*more: MountLine, line: str = SQUASHFS) -> tuple[list[str], bool]:
    found = (*parse_mountinfo(f"{RECORDED}{line}"), *more)
    unknown = unexplained(found, (WORKDIR,), ON_NODE, gpus=False, overlay=VENV)
    return [one.target for one in unknown], shows_overlay(found, VENV)


def test_a_squashfs_at_its_target_is_the_overlay() -> None:
    assert with_overlay() == ([], True)
    # The kernel's own squashfs, of a runtime that was installed with setuid.
    assert with_overlay(line=SQUASHFS.replace("fuse.squashfuse_ll squashfuse_ll", "squashfs /dev/loop3")) == ([], True)


def test_an_overlay_that_the_runtime_left_out_is_missed() -> None:
    assert shows_overlay(parse_mountinfo(RECORDED), VENV) is False


def test_something_else_at_the_target_or_over_it_is_not_the_overlay() -> None:
    assert with_overlay(line=SQUASHFS.replace("fuse.squashfuse_ll squashfuse_ll", "ext4 /dev/vda")) == (
        ["/user-software"],
        False,
    )
    assert with_overlay(mount("/user-software")) == (["/user-software"], False)


def over(*more: MountLine) -> list[str]:
    found = (*parse_mountinfo(f"{RECORDED}{SQUASHFS}"), *more)
    return [one.target for one in over_overlay(found, VENV, gpus=False)]


def test_whatever_is_mounted_at_an_overlay_or_below_it_hides_a_part_of_it() -> None:
    assert over() == []
    assert over(mount("/user-software"), mount("/user-software/lib"), mount("/user-software2")) == [
        "/user-software",
        "/user-software/lib",
    ]
