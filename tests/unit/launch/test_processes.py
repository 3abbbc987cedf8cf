"""Finding and ending what runs below a process."""

import os
import signal
import subprocess
import sys
import textwrap
import time


def python(program, **more):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30, **more
    )


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 10 s"
        time.sleep(0.02)


def test_children_of_children_are_below_and_the_ended_are_not():
    done = python(
        """
        import os, subprocess, time
        from hpcenv import process
        from hpcenv.launch import processes
        child = subprocess.Popen(["sh", "-c", "sleep 30 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        grandchild = int(child.stdout.readline())
        assert set(process.below(os.getpid())) == {child.pid, grandchild}
        assert process.below(child.pid) == (grandchild,)
        processes.send([grandchild, child.pid], 9)
        time.sleep(0.3)  # both are zombies or gone; no process has waited for the child
        assert process.below(os.getpid()) == ()
        child.wait()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_to_what_has_ended_is_fine():
    from hpcenv.launch import processes

    child = subprocess.Popen(["true"])
    child.wait()
    processes.send([child.pid], signal.SIGTERM)


def test_orphans_in_sessions_of_their_own_are_found_and_ended():
    done = python(
        """
        import subprocess
        from hpcenv import process
        from hpcenv.launch import processes
        processes.adopt_orphans()
        # The parent ends, its child is in another session: no process group leads to it.
        subprocess.run(["sh", "-c", "setsid sleep 30 & sleep 0.2"])
        print(processes.end_rest((), grace=0.1))
        """
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_what_ends_by_itself_is_not_killed():
    done = python(
        """
        import subprocess
        from hpcenv import process
        from hpcenv.launch import processes
        processes.adopt_orphans()
        subprocess.run(["sh", "-c", "sleep 0.3 & exit"])
        print(processes.end_rest((), grace=5))
        """
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_what_was_there_before_stays():
    done = python(
        """
        import os, subprocess
        from hpcenv import process
        from hpcenv.launch import processes
        child = subprocess.Popen(["sleep", "30"])
        processes.end_rest(process.below(os.getpid()), grace=0)
        print(child.poll())
        child.kill(); child.wait()
        """
    )
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_ranks_are_told_from_torchrun_and_from_their_own_workers(tmp_path):
    from hpcenv import process
    from hpcenv.launch import processes

    torchrun = subprocess.Popen(
        [
            "sh",
            "-c",
            f"LOCAL_RANK=0 sh -c 'echo $$ > {tmp_path}/rank; sleep 30 & echo $! > {tmp_path}/worker; wait' & wait",
        ],
        env={"PATH": os.environ["PATH"]},
        start_new_session=True,
    )
    try:
        wait_for(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text())
        rank, worker = (int((tmp_path / name).read_text()) for name in ("rank", "worker"))
        wait_for(lambda: worker in process.below(torchrun.pid))
        assert processes.ranks_below(torchrun.pid) == (rank,)
    finally:
        os.killpg(torchrun.pid, signal.SIGKILL)
        torchrun.wait()
