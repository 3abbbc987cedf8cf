"""Look at an image without any bind, to see the content of the image at a path that a mount hides.

Runs on: COMPUTE NODE, and on the login node while locking. Standard library only.

The function starts one more container, which takes a tenth of a second. So call the function only if a mount hides a
path that must be known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hpcenv import process
from hpcenv.container import apptainer
from hpcenv.container.start_command import StartCommand, opened
from hpcenv.records.manifest import Environment

# This program runs in the image, with the image's Python. A path counts if it has content. A path also counts if Python
# or the loader look for code there, because there a new file matters as much as a changed file.
_PROGRAM = """
import json, os, sys
loader = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.conf.d"]
code = [os.path.realpath(p) for p in sys.path + loader if p] + ["/etc/ld.so.preload", "/etc/ld.so.cache"]
def counts(path):
    real = os.path.realpath(path)
    if any(real == folder or real.startswith(folder.rstrip("/") + "/") for folder in code):
        return True
    try:
        return bool(os.listdir(real)) if os.path.isdir(real) else os.stat(real).st_size > 0
    except FileNotFoundError:
        return False
    except OSError:
        return True
print(json.dumps([path for path in json.loads(sys.argv[1]) if counts(path)]))
"""

_SECONDS = 120.0


def paths_with_code(
    environment: Environment,
    paths: Sequence[str],
    environ: Mapping[str, str],
    *,
    image: str | None = None,
    pass_fds: tuple[int, ...] = (),
) -> tuple[str, ...]:
    """Return the paths that have content in the image, or where Python or the loader look for code.

    Args:
        environment: the environment of a SIF.
        paths: paths in the container.
        environ: environment of this process.
        image: path of the SIF, if this is not the environment's SIF. For the path of an open file, `pass_fds` is
            needed.

    Raises:
        HpcenvError: the container could not be started.
        ValueError: the output of the container is not a list of paths.
    """
    if not paths:
        return ()
    argv = apptainer.exec_argv(
        apptainer=environment.apptainer,
        image=image or environment.sif,
        command=[_python(environment), "-I", "-B", "-c", _PROGRAM, json.dumps(list(paths))],
        workdir="/",
        no_binds=True,
    )
    start = StartCommand(
        argv=tuple(argv), env=apptainer.start_environment(environ), cwd=None, variables=apptainer.env_file({})
    )
    with opened(start) as (words, files):
        done = process.run(words, timeout=_SECONDS, env=start.env, pass_fds=(*pass_fds, *files))
    lines = done.stdout.strip().splitlines()
    try:
        answer = frozenset(json.loads(lines[-1]))
    except (IndexError, TypeError) as error:
        raise ValueError(f"the program that looked at the image printed {done.stdout[:200]!r}") from error
    return tuple(path for path in paths if path in answer)


def _python(environment: Environment) -> str:
    """Return the image's own interpreter, because a virtual environment in an overlay does not exist without mounts."""
    overlay = environment.overlay
    return "python3" if overlay is not None and overlay.use == "venv" else environment.python
