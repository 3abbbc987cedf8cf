"""What of scripts/testbed can be seen without root and without a cluster."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from ipaddress import IPv4Network
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

cache = importlib.import_module("_testbed.cache")
cli = importlib.import_module("_testbed.cli")
cgroup = importlib.import_module("_testbed.cgroup")
cluster = importlib.import_module("_testbed.cluster")
daemon = importlib.import_module("_testbed.daemon")
errors = importlib.import_module("_testbed.errors")
fault = importlib.import_module("_testbed.fault")
flaky = importlib.import_module("_testbed.flaky")
instance = importlib.import_module("_testbed.instance")
job = importlib.import_module("_testbed.job")
machine = importlib.import_module("_testbed.machine")
process = importlib.import_module("_testbed.process")
progress = importlib.import_module("_testbed.progress")
rootfs = importlib.import_module("_testbed.rootfs")
shell = importlib.import_module("_testbed.shell")
slurm = importlib.import_module("_testbed.slurm")
wheel = importlib.import_module("_testbed.wheel")


def layout(nodes: int = 2, slurm: str = "24.11", **more: object) -> object:
    return instance.Layout(
        nodes=nodes,
        slurm=slurm,
        **more,
        subnet="10.70.1.0/24",
        node_root="/r/node",
        service_root="/r/service",
        store="/r/store",
        hostenv="/r/hostenv",
    )


def run(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPTS / "testbed"), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def run_as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    # The interpreter may lie where nobody cannot read, so it is loaded before root is given up.
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import _testbed.cli, _testbed.host\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "sys.exit(_testbed.cli.main(sys.argv[2:], os.environ))"
    )
    argv = [sys.executable, "-c", code, str(SCRIPTS), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_help_lists_every_exit_status() -> None:
    done = run("--help")
    assert done.returncode == 0
    for status, meaning in errors.MEANING.items():
        assert f"  {status.value:<4} {meaning}" in done.stdout


def test_every_status_has_its_own_number_and_meaning() -> None:
    assert set(errors.MEANING) == set(errors.Status)
    assert len({status.value for status in errors.Status}) == len(errors.Status)


@pytest.mark.parametrize("verb", [["up"], ["down"], ["status"], ["install"], ["fault", "kill", "n1"]])
def test_without_root_it_says_so_with_its_own_status(verb: list[str]) -> None:
    done = run_as_nobody(*verb)
    assert done.returncode == 3
    assert "must run as root" in done.stderr
    assert "next: sudo scripts/testbed" in done.stderr


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["up", "--nodes", "0"], ["up", "--slurm", "19.05"], ["fault", "bite", "n1"]]
)
def test_wrong_arguments_end_with_2(words: list[str]) -> None:
    assert run(*words).returncode == 2


def test_a_command_behind_the_first_dashes_is_untouched() -> None:
    words = ["exec", "--node", "n2", "--", "echo", "--", "$(id)", "a b", ""]
    assert cli.split_command(words) == (["exec", "--node", "n2"], ["echo", "--", "$(id)", "a b", ""])
    assert cli.split_command(["exec"]) == (["exec"], None)


def test_two_checkouts_have_two_instances_with_disjoint_names() -> None:
    one = instance.choose_instance(Path("/a/hpcenv"), {}, None)
    two = instance.choose_instance(Path("/b/hpcenv"), {}, None)
    assert one == instance.choose_instance(Path("/a/hpcenv"), {}, None)
    assert one.name != two.name
    assert one.bridge != two.bridge
    assert one.state != two.state
    assert not one.netns("n1").startswith(two.prefix)


def test_the_option_wins_over_the_environment_over_the_checkout() -> None:
    environ = {instance.ENV_INSTANCE: "ci"}
    assert instance.choose_instance(Path("/a"), environ, None).name == "ci"
    assert instance.choose_instance(Path("/a"), environ, "mine").name == "mine"


def test_state_and_cache_follow_their_variables() -> None:
    environ = {instance.ENV_STATE: "/s", instance.ENV_CACHE: "/c", "HOME": "/h"}
    assert instance.choose_instance(Path("/a"), environ, None).state == Path("/s")
    assert instance.choose_instance(Path("/a"), environ, None).cache == Path("/c")
    assert instance.choose_instance(Path("/a"), {"HOME": "/h"}, None).cache == Path("/h/.cache/hpcenv-testbed")


@pytest.mark.parametrize("name", ["", "UPPER", "a-b", "../x", "12345678901"])
def test_a_name_that_no_interface_can_have_is_refused(name: str) -> None:
    with pytest.raises(errors.TestbedError, match="is not an instance name"):
        instance.choose_instance(Path("/a"), {}, name)


def test_bridge_names_fit_into_an_interface_name() -> None:
    assert len(instance.choose_instance(Path("/a"), {}, "1234567890").bridge) <= 15


def test_the_subnet_avoids_networks_in_use() -> None:
    first = instance.choose_subnet("x", [])
    assert instance.choose_subnet("x", []) == first
    second = instance.choose_subnet("x", [first])
    assert not second.overlaps(first)
    with pytest.raises(errors.TestbedError, match="no free /24"):
        instance.choose_subnet("x", [IPv4Network("10.0.0.0/8")])


def test_only_one_command_at_a_time_holds_an_instance(tmp_path: Path) -> None:
    one = instance.choose_instance(Path("/a"), {instance.ENV_STATE: str(tmp_path / "s")}, None)
    with instance.locked(one), pytest.raises(errors.TestbedError) as caught, instance.locked(one):
        pass
    assert caught.value.status == errors.Status.BUSY
    assert f"pid {os.getpid()}" in caught.value.what


def test_a_layout_survives_its_file(tmp_path: Path) -> None:
    one = instance.choose_instance(Path("/a"), {instance.ENV_STATE: str(tmp_path)}, None)
    assert instance.read_layout(one) is None
    instance.write_layout(one, layout())
    assert instance.read_layout(one) == layout()


def test_a_broken_layout_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    one = instance.choose_instance(Path("/a"), {instance.ENV_STATE: str(tmp_path)}, None)
    (tmp_path / "layout.json").write_text("{")
    with pytest.raises(errors.TestbedError) as caught:
        instance.read_layout(one)
    assert "scripts/testbed down" in caught.value.hint


def test_a_cache_entry_is_made_once_and_never_used_half_made(tmp_path: Path) -> None:
    calls: list[Path] = []

    def fails(target: Path) -> None:
        (target / "half").touch()
        raise errors.TestbedError("disk full")

    def works(target: Path) -> None:
        calls.append(target)
        assert not (target / "half").exists()
        (target / "whole").touch()

    quiet = progress.Progress()
    with pytest.raises(errors.TestbedError):
        cache.entry(tmp_path, "root", "recipe", fails, quiet)
    first = cache.entry(tmp_path, "root", "recipe", works, quiet)
    assert cache.entry(tmp_path, "root", "recipe", works, quiet) == first
    assert cache.entry(tmp_path, "root", "other recipe", works, quiet) != first
    assert (first / "whole").exists()
    assert len(calls) == 2


def test_every_machine_has_its_own_address_and_hosts_names_them_all() -> None:
    everyone = machine.machines(layout(nodes=3))
    assert [one.name for one in everyone] == ["ctl", "registry", "login", "n1", "n2", "n3"]
    assert len({one.address for one in everyone}) == 6
    hosts = slurm.files(layout(nodes=3))["hosts"]
    assert all(f"{one.address} {one.name}\n" in hosts for one in everyone)


def test_slurm_conf_names_the_nodes_and_the_preemptible_pair() -> None:
    conf = slurm.files(layout(nodes=3))["slurm/slurm.conf"]
    assert "NodeName=n[1-3] CPUs=16 RealMemory=8000 Gres=gpu:8,nvme:100 " in conf
    assert "PreemptParameters=send_user_signal" in conf
    assert "PartitionName=low Nodes=n[1-3]" in conf
    assert "NodeName=n1 CPUs" in slurm.files(layout(nodes=1))["slurm/slurm.conf"]


def test_a_target_is_a_machine_or_a_daemon() -> None:
    assert fault.parse_target(layout(), "n2").daemons == ()
    assert fault.parse_target(layout(), "n2").label == "n2"
    assert fault.parse_target(layout(), "slurmd@n2").machine.name == "n2"
    assert fault.parse_target(layout(), "slurmctld").label == "slurmctld"
    assert fault.parse_target(layout(), "registry").label == "registry"


@pytest.mark.parametrize(("word", "status"), [("n3", 5), ("slurmd@n3", 5), ("nonsense", 5), ("slurmd", 2)])
def test_a_target_that_is_none_or_several_is_refused(word: str, status: int) -> None:
    with pytest.raises(errors.TestbedError) as caught:
        fault.parse_target(layout(), word)
    assert caught.value.status == status


def test_an_unprivileged_command_has_its_users_groups_and_no_capabilities() -> None:
    assert machine.as_user("root", ["id"]) == ["id"]
    words = machine.as_user("bob", ["id"])
    assert words[0] == "setpriv"
    assert {"--reuid=bob", "--regid=bob", "--init-groups", "--inh-caps=-all"} <= set(words)


def test_a_login_keeps_nothing_of_the_caller_but_the_terminal() -> None:
    caller = {"TERM": "xterm", "SBATCH_PARTITION": "x", "PYTHONPATH": "/evil", "HOME": "/root"}
    environment = shell.login_environment("alice", "/home/alice", caller)
    assert environment["HOME"] == "/home/alice"
    assert environment["TERM"] == "xterm"
    assert environment["PATH"].startswith("/shared/hpcenv/venv/bin:")
    assert not {"SBATCH_PARTITION", "PYTHONPATH"} & set(environment)


def test_children_get_the_package_configuration_and_the_mark_and_nothing_else() -> None:
    caller = {"PIP_CONFIG_FILE": "/p", "https_proxy": "http://proxy", "LD_PRELOAD": "/evil.so", "HOME": "/root"}
    environment = process.cleaned_environment(caller, "abc")
    assert environment["PIP_CONFIG_FILE"] == "/p"
    assert environment["https_proxy"] == "http://proxy"
    assert environment[process.MARK] == "abc"
    assert "LD_PRELOAD" not in environment


def test_a_failing_program_shows_its_words_status_and_last_lines() -> None:
    runner = process.Runner("abc", process.cleaned_environment({}, "abc"))
    with pytest.raises(errors.TestbedError) as caught:
        runner.run(["sh", "-c", "echo broken pipe fitting >&2; exit 9"])
    assert caught.value.what.startswith("status 9 from: sh -c")
    assert caught.value.why == "broken pipe fitting"


def test_a_layout_of_an_older_testbed_still_means_what_it_meant(tmp_path: Path) -> None:
    one = instance.choose_instance(Path("/a"), {instance.ENV_STATE: str(tmp_path)}, None)
    instance.write_layout(one, layout())
    old = json.loads((tmp_path / "layout.json").read_text())
    for name in ("proctrack", "accounting", "preempt_signal"):
        del old[name]
    (tmp_path / "layout.json").write_text(json.dumps(old))
    assert instance.read_layout(one) == layout(proctrack="linuxproc", accounting=True, preempt_signal=True)


@pytest.mark.parametrize(
    ("asked", "have", "want"),
    [
        ({"slurm": "22.05"}, "--slurm 24.11", "--slurm 22.05"),
        ({"proctrack": "cgroup"}, "--proctrack linuxproc", "--proctrack cgroup"),
        ({"accounting": False}, "--accounting", "--no-accounting"),
        ({"preempt_signal": False}, "--preempt-signal", "--no-preempt-signal"),
    ],
)
def test_a_running_testbed_is_not_turned_into_another(asked: dict[str, object], have: str, want: str) -> None:
    with pytest.raises(errors.TestbedError) as caught:
        cluster._refuse_change(layout(), cluster.Wanted(**asked))
    assert caught.value.what == f"this testbed is up with {have}, not {want}"
    assert caught.value.hint.endswith(f"up {want}")
    cluster._refuse_change(layout(**asked), cluster.Wanted(**asked))


def test_the_switch_for_the_warning_is_where_each_slurm_looks_for_it() -> None:
    def conf(**more: object) -> str:
        return slurm.files(layout(**more))["slurm/slurm.conf"]

    assert "\nPreemptParameters=send_user_signal\n" in conf(slurm="26.05")
    assert "PreemptParameters" not in conf(slurm="22.05"), "22.05 does not read a file with it"
    assert "\nSlurmctldParameters=preempt_send_user_signal\n" in conf(slurm="22.05")
    for version in rootfs.SUITES:
        settings = [line for line in conf(slurm=version, preempt_signal=False).splitlines() if line[:1] != "#"]
        assert not any("send_user_signal" in line for line in settings)


def test_without_accounting_nothing_of_it_is_configured_or_started() -> None:
    bare = layout(accounting=False)
    conf = slurm.files(bare)["slurm/slurm.conf"]
    settings = [line for line in conf.splitlines() if line.startswith("AccountingStorage")]
    assert settings == ["AccountingStorageType=accounting_storage/none"]
    assert {one.kind.name for one in daemon.daemons(bare)} == {"munged", "registry", "slurmctld", "slurmd"}


@pytest.mark.parametrize(
    ("version", "proctrack", "plugin", "words"),
    [
        ("24.11", "linuxproc", "disabled", ["none", "none"]),
        ("22.05", "linuxproc", "cgroup/v1", ["empty", "none"]),
    ],
)
def test_a_slurmd_that_dies_without_control_groups_sees_an_empty_place(
    version: str, proctrack: str, plugin: str, words: list[str]
) -> None:
    here = instance.choose_instance(Path("/a"), {}, "x")
    chosen = layout(slurm=version, proctrack=proctrack)
    assert f"CgroupPlugin={plugin}\n" in slurm.files(chosen)["slurm/cgroup.conf"]
    assert f"ProctrackType=proctrack/{proctrack}\n" in slurm.files(chosen)["slurm/slurm.conf"]
    assert cgroup.words(here, chosen, "n1", "compute") == words
    assert cgroup.words(here, chosen, "ctl", "ctl") == ["none", "none"]


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ("35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n", "v1 here: none"),
        ("35 24 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n", "v1 here: cpu, cpuacct"),
        ("35 24 0:30 /docker/1 /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n", "v1 here: none"),
    ],
)
def test_proctrack_cgroup_is_refused_where_there_is_no_freezer_of_version_1(
    tmp_path: Path, mounts: str, said: str
) -> None:
    (tmp_path / "mountinfo").write_text(mounts)
    with pytest.raises(errors.TestbedError) as caught:
        cgroup.require("cgroup", tmp_path / "mountinfo")
    assert caught.value.status == errors.Status.CANNOT_RUN_HERE
    assert said in caught.value.why
    assert "up --proctrack linuxproc" in caught.value.hint
    cgroup.require("linuxproc", tmp_path / "mountinfo")


@pytest.mark.parametrize(
    ("memory", "controllers"),
    [
        ("36 24 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", ["freezer", "memory"]),
        ("36 24 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory,hugetlb\n", ["freezer"]),
        ("36 24 0:31 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", ["freezer"]),
        ("", ["freezer"]),
    ],
)
def test_jobs_are_held_to_their_memory_where_the_machine_has_that_controller_whole_and_alone(
    tmp_path: Path, memory: str, controllers: list[str]
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"35 24 0:30 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n{memory}")
    assert list(cgroup.hierarchies(mounts)) == controllers
    assert cgroup.limits_memory(layout(proctrack="cgroup"), mounts) == (controllers[-1] == "memory")
    assert not cgroup.limits_memory(layout(proctrack="linuxproc"), mounts)


def test_a_slurm_without_the_plugin_for_version_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.TestbedError) as caught:
        cgroup.require_plugin(tmp_path, "26.05")
    assert caught.value.status == errors.Status.CANNOT_RUN_HERE
    assert "no cgroup_v1.so" in caught.value.why


def test_a_flaky_command_fails_at_every_nth_call_and_says_what_the_real_one_says(tmp_path: Path) -> None:
    here = instance.choose_instance(Path("/a"), {instance.ENV_STATE: str(tmp_path)}, None)
    (here.home / "alice").mkdir(parents=True)
    assert flaky.path_of(here, "alice", "/home/alice") is None
    flaky.start(here, "alice", "squeue", every=3, delay_ms=0)
    assert flaky.in_force(here) == ["squeue for alice"]
    assert flaky.path_of(here, "alice", "/home/alice") == "/home/alice/.testbed-faults"
    assert flaky.path_of(here, "bob", "/home/bob") is None
    wrapper = here.home / "alice" / flaky.FOLDER / "squeue"
    said = [subprocess.run([wrapper, "--version"], capture_output=True, text=True, timeout=30) for _ in range(6)]
    assert [flaky.MESSAGES["squeue"] in one.stderr for one in said] == [False, False, True, False, False, True]
    assert said[2].returncode == 1
    flaky.heal(here, "alice", "squeue")
    assert flaky.in_force(here) == []
    assert list((here.home / "alice").iterdir()) == []


def test_what_is_no_command_cannot_be_flaky_and_a_command_cannot_be_killed() -> None:
    squeue = fault.parse_target(layout(), "squeue")
    fault.check("flaky", squeue)
    fault.check("heal", squeue)
    with pytest.raises(errors.TestbedError, match="kill is not for a command"):
        fault.check("kill", squeue)
    node = fault.Fault(shop=None, layout=layout(), target=fault.parse_target(layout(), "n1"), strength=fault.Strength())
    with pytest.raises(errors.TestbedError, match="n1 cannot be flaky"):
        fault.flaky_command(node)


def test_a_process_of_a_job_cannot_be_healed() -> None:
    with pytest.raises(errors.TestbedError) as caught:
        fault.parse_target(layout(), "rank3@n1")
    assert caught.value.status == errors.Status.USAGE
    assert "fault heal n1" in caught.value.hint


def test_agents_and_ranks_are_told_from_their_children() -> None:
    # As on a node: a step daemon, its task, two ranks, and a data loader that inherited its rank's number.
    loader = "sleep 60"
    rank = f"env RANK=%d LOCAL_RANK=0 sh -c '{loader} & wait' & "
    task = f"{rank % 6}{rank % 7}wait"
    title = ["bash", "-c", 'exec -a "slurmstepd: [41.2]" bash -c "$1; :"', "bash", f'sh -c "{task}" & wait']
    tree = subprocess.Popen(title, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        found = []
        while sum(one.what.startswith("rank") for one in found) < 2 or len(found) < 6:
            assert time.monotonic() < deadline, found
            found = job.classify("n2", [pid for pid in machine.all_pids() if _session(pid) == tree.pid])
        assert sorted(one.what for one in found if one.what) == ["agent", "rank6", "rank7", "slurmstepd"]
        assert {(one.job, one.step, one.machine) for one in found} == {("41", "2", "n2")}
        assert job.classify("n2", [os.getpid()]) == []
    finally:
        os.killpg(tree.pid, signal.SIGKILL)
        tree.wait()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


@pytest.mark.parametrize("word", ["rank3", "rank0@n2", "agent@n1", "slurmstepd@n2"])
def test_words_for_processes_of_jobs(word: str) -> None:
    assert job.is_target(word)


@pytest.mark.parametrize("word", ["n1", "slurmd@n2", "rank", "rank-1", "rank3@", "squeue", "agents"])
def test_words_for_everything_else(word: str) -> None:
    assert not job.is_target(word)


def test_the_oldest_slurm_has_no_apptainer_and_the_names_of_its_debian() -> None:
    old, new = rootfs.node_recipe("22.05"), rootfs.node_recipe("24.11")
    assert old.suites == ("bookworm",)
    assert "apptainer" not in old.packages
    assert {"libssl3", "libreadline8"} <= set(old.packages)
    assert new.suites == ("trixie", "sid")
    assert {"apptainer", "libssl3t64"} <= set(new.packages)
    assert not rootfs.has_apptainer("22.05")
    assert rootfs.has_apptainer("24.11")


def test_only_apptainer_may_come_from_sid() -> None:
    recipe = rootfs.Recipe(kind="node", suites=("trixie", "sid"), packages=("apptainer",))
    argv = rootfs.mmdebstrap_argv(recipe, Path("/t"), "file:/mirror", [])
    assert argv[-2:] == ["deb file:/mirror trixie main", "deb [check-valid-until=no] file:/mirror sid main"]
    assert any("Pin-Priority: 50" in word for word in argv)


def test_no_package_host_is_written_into_the_code() -> None:
    for path in (SCRIPTS / "_testbed").iterdir():
        if path.is_file():
            text = path.read_text().replace("http://registry:5000", "")
            assert "http://" not in text, path
            assert "https://" not in text, path
            assert "debian.org" not in text, path
            assert "pypi.org" not in text, path


def test_an_install_is_there_at_one_moment_and_jobs_keep_the_environment_that_submitted_them(tmp_path: Path) -> None:
    def make(name: str, *, complete: bool = True) -> None:
        (tmp_path / "venvs" / name).mkdir(parents=True)
        (tmp_path / "venvs" / name / "which").write_text(name)
        if complete:
            (tmp_path / "venvs" / name / ".complete").touch()

    old = tmp_path / "venv"
    old.mkdir()
    (old / "which").write_text("in place")
    names = [f"e{number}" for number in range(6)]
    for number, name in enumerate(names):
        make(name)
        assert (tmp_path / "venv" / "which").read_text() == ("in place" if number == 0 else names[number - 1])
        wheel.switch(tmp_path, name)
        os.utime(tmp_path / "venvs" / name / ".complete", (number, number))
        assert (tmp_path / "venv" / "which").read_text() == name
    make("interrupted", complete=False)
    wheel.remove_old(tmp_path)
    assert sorted(path.name for path in (tmp_path / "venvs").iterdir()) == names[-3:]
    # An older one again, as after `git checkout`: it is the newest now, and stays.
    wheel.switch(tmp_path, names[-3])
    make("e6")
    wheel.switch(tmp_path, "e6")
    wheel.remove_old(tmp_path)
    assert sorted(path.name for path in (tmp_path / "venvs").iterdir()) == ["e3", "e5", "e6"]
    # The link leads there from wherever the directory is mounted.
    assert not os.path.isabs(os.readlink(tmp_path / "venv"))
