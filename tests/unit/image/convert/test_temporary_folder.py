"""temporary: which folder is taken, on the real file systems of this machine."""

import os
from pathlib import Path

import pytest

from hpcenv.errors import FileUnusable
from hpcenv.image.convert.temporary_folder import candidates, choose_temporary, free_memory

PLENTY = 1 << 60
SHM = Path("/dev/shm")


def test_the_order_of_candidates():
    assert candidates({"SLURM_TMPDIR": "/s", "TMPDIR": "/t"}) == tuple(
        map(Path, ("/s", "/t", "/var/tmp", "/tmp", "/dev/shm"))
    )
    assert candidates({"TMPDIR": "/tmp", "SLURM_TMPDIR": "relative"}) == tuple(
        map(Path, ("/tmp", "/var/tmp", "/dev/shm"))
    )


def test_the_first_that_fits_is_taken(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert choose_temporary([tmp_path / "none", two, one], 1000, memory=PLENTY) == two


def test_an_error_names_every_candidate(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileUnusable, match=r"no temporary folder has the required .* GB") as error:
        choose_temporary([tmp_path, tmp_path / "none", tmp_path / "file", Path("/proc")], 1 << 60, memory=PLENTY)
    lines = error.value.why.splitlines()
    assert "free: too small" in lines[0]
    assert lines[1] == f"{tmp_path / 'none'}: No such file or directory"
    assert "not a folder that you can write to" in lines[2]
    assert lines[3].startswith("/proc: ")
    assert error.value.hint
    with pytest.raises(FileUnusable, match="0 MB"):
        choose_temporary([], 1)


@pytest.mark.ordinary_user
def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(FileUnusable, match="not a folder that you can write to"):
        choose_temporary([tmp_path], 1, memory=PLENTY)


def _flags(path):
    return os.statvfs(path).f_flag if path.is_dir() else os.ST_NOEXEC


@pytest.mark.skipif(bool(_flags(SHM) & (os.ST_NOEXEC | os.ST_RDONLY)), reason="no executable /dev/shm here")
def test_a_tmpfs_is_preferred_only_with_memory_to_spare(tmp_path):
    if _kind(tmp_path) == _kind(SHM):
        pytest.skip("the temporary folder of the tests is a tmpfs, too")
    assert choose_temporary([tmp_path, SHM], 1000, memory=PLENTY) == SHM
    assert choose_temporary([tmp_path, SHM], 1000, memory=1 << 30) == tmp_path
    with pytest.raises(FileUnusable, match="needed") as error:
        choose_temporary([SHM], 1000, memory=1 << 30)
    assert "of memory are free" in error.value.why


@pytest.mark.skipif(bool(_flags(SHM) & (os.ST_NOEXEC | os.ST_RDONLY)), reason="no executable /dev/shm here")
def test_where_the_size_is_unknown_the_first_folder_with_what_is_likely_enough_is_taken(tmp_path):
    if _kind(tmp_path) == _kind(SHM):
        pytest.skip("the temporary folder of the tests is a tmpfs, too")
    assert choose_temporary([tmp_path, SHM], 1000, likely_bytes=2000, memory=PLENTY) == tmp_path
    assert choose_temporary([SHM, tmp_path], 1000, likely_bytes=2000, memory=PLENTY) == SHM
    assert choose_temporary([SHM, tmp_path], 1000, likely_bytes=2 << 30, memory=3 << 30) == tmp_path


@pytest.mark.skipif(bool(_flags(SHM) & (os.ST_NOEXEC | os.ST_RDONLY)), reason="no executable /dev/shm here")
def test_where_none_is_likely_enough_the_disk_with_the_most_space_is_taken(tmp_path):
    if _kind(tmp_path) == _kind(SHM):
        pytest.skip("the temporary folder of the tests is a tmpfs, too")
    assert choose_temporary([SHM, tmp_path], 1000, likely_bytes=1 << 60, memory=PLENTY) == tmp_path
    assert choose_temporary([SHM], 1000, likely_bytes=1 << 60, memory=PLENTY) == SHM
    with pytest.raises(FileUnusable, match="too small"):
        choose_temporary([tmp_path], 1 << 60, likely_bytes=1 << 61, memory=PLENTY)


def _kind(path):
    return os.stat(path).st_dev


def test_memory_of_version_2_groups(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    (groups / "job" / "step").mkdir(parents=True)
    assert free_memory(proc=proc, cgroups=groups) == 8000 * 1024
    (groups / "job" / "step" / "memory.max").write_text("max\n")
    (groups / "job" / "step" / "memory.current").write_text("5\n")
    (groups / "job" / "memory.max").write_text("1000000\n")
    (groups / "job" / "memory.current").write_text("400000\n")
    assert free_memory(proc=proc, cgroups=groups) == 600000
    (groups / "job" / "memory.current").write_text("1400000\n")
    assert free_memory(proc=proc, cgroups=groups) == 0


def test_memory_of_version_1_groups(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable: 8000 kB\n")
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/slurm/job\n3:freezer:/x\n")
    (groups / "memory" / "slurm" / "job").mkdir(parents=True)
    (groups / "memory" / "slurm" / "job" / "memory.limit_in_bytes").write_text("3000000")
    (groups / "memory" / "slurm" / "job" / "memory.usage_in_bytes").write_text("1000000")
    assert free_memory(proc=proc, cgroups=groups) == 2000000


def test_unknown_memory_is_none(tmp_path):
    assert free_memory(proc=tmp_path, cgroups=tmp_path) == 0
    assert free_memory() > 0
