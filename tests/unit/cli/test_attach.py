"""A local run, entered and ended as a user does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def test_a_local_run_is_entered_and_cancelled(hpcenv: Any, project: Path) -> None:
    (project / "sleeper.py").write_text("import time\nprint('sleeps', flush=True)\ntime.sleep(300)\n")
    done = hpcenv("submit", "sleeper.py", "--nproc", "1", "--name", "one", "--env", "MARK=x", cwd=project)
    assert done.status == 0, done.stderr
    for _ in range(200):
        if (project / "runs" / "one" / "job.log").read_text().count("sleeps"):
            break
        time.sleep(0.2)
    inside = hpcenv("attach", "one", "--", "sh", "-c", "echo $MARK -- in $PWD; exit 5", cwd=project)
    assert (inside.status, inside.stdout) == (5, f"x -- in {project}/runs/one/source\n"), inside.stderr
    assert hpcenv("attach", "one", "--json", cwd=project).envelope["data"]["node"] == "local0"
    assert hpcenv("wait", "one", "--timeout", "1s", cwd=project).status == 124
    assert hpcenv("cancel", "one", cwd=project).status == 0
    assert hpcenv("attach", "one", "--", "true", cwd=project).status == 23
