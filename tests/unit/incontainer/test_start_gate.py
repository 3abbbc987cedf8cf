"""The inner side of the start gate: what it says when the launch step has ended before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from hpcenv.incontainer import start_gate


def test_a_launch_step_that_refused_the_start_leaves_no_traceback(tmp_path: Path) -> None:
    # A torch that needs a while to load: the launch step ends meanwhile.
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "run.py").write_text("import time\ntime.sleep(1)\n")
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "load.json").write_text(json.dumps({"torch": "2.13.0"}))
    os.mkfifo(gate / "reports")
    os.mkfifo(gate / "answers")
    threading.Thread(target=lambda: os.close(os.open(gate / "reports", os.O_RDONLY)), daemon=True).start()
    code = f"import start_gate; print(start_gate.may_start({str(gate)!r}))"
    path = os.pathsep.join([str(tmp_path), str(Path(start_gate.__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
