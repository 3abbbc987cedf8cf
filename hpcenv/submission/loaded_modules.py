"""Load the environment modules of a site profile without a batch script, for `hpcenv run`.

Runs on: LOGIN NODE, or the node of an allocation on which the user types. The batch script uses the same shell code,
steps/modules.sh. So `hpcenv run` and a job do these things in the same way: they load the modules, find out which
variables the modules set, and report errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcenv import process
from hpcenv.errors import NodesUnknown
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission import batch_script
from hpcenv.submission.plan import module_words

# The script sets the names that modules.sh uses. At the end, the script writes only the environment to standard output.
# The environment may have credentials, so it is never written to a file.
_SCRIPT = """\
set -u
run=@{run_folder}
python=@{python}
exec 3>&1 >&2
end() { exit "$1"; }
. "$run/code/modules.sh" @{modules}
exec env -0 >&3
"""


def load_modules(run: RunFolder, manifest: Manifest, environ: Mapping[str, str], *, python: str) -> dict[str, str]:
    """Load the modules of a run, and return the new environment.

    Also write the variables that the modules set to `modules.json`, for the ranks.

    Args:
        environ: the environment of the user. Modules that are already loaded are loaded again, to see their effect.
        python: the interpreter for the step that writes `modules.json`.

    Raises:
        ToolMissing: bash is missing.
        NodesUnknown: there is no command `module`, or a module cannot be loaded. The run's log has the reason.
    """
    bash = process.find_tool("bash", needed_for="load the modules of the site profile", path=environ.get("PATH"))
    reading, writing = os.pipe()
    with open(reading, "rb") as answer, open(run.log, "ab") as log:
        with open(writing, "wb") as output:
            argv = [bash, "-c", _script(run, manifest, python)]
            loading = process.start(argv, env=environ, cwd=run.path, stdout=output, stderr=log)
        told = answer.read()
        status = loading.wait()
    if status != 0:
        raise NodesUnknown("the modules of the site profile cannot be loaded", why=f"see {run.log}")
    entries = (entry.partition("=") for entry in told.decode("utf-8", "surrogateescape").split("\0"))
    return {name: value for name, equals, value in entries if equals}


def _script(run: RunFolder, manifest: Manifest, python: str) -> str:
    values = {"run_folder": str(run.path), "python": python, "modules": batch_script.options(module_words(manifest))}
    return batch_script.render(_SCRIPT, values)
