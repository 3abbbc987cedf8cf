"""Measurements of hpcenv beside its peers: `python -m benchmarks` runs all and brings up what they need.

Runs on: any machine, outside the test command. Each module measures ours and the peer alternately in one run and runs
alone as `python -m benchmarks.NAME [--json]`. With `--json` its last line is one object with the keys `name`, `ours_s`,
`peer_s`, `ratio`, `must`, `met`.
"""

import compileall
from pathlib import Path

# As pip does when it installs a package: a checkout on a machine that sets PYTHONDONTWRITEBYTECODE is compiled anew by
# every process, which is not what is to be measured. Where there is no checkout nothing happens.
compileall.compile_dir(Path(__file__).resolve().parents[1] / "hpcenv", quiet=2)
