"""Start hpcenv's hook in the ranks of a run, then run the image's own sitecustomize.

Runs on: every Python process that a rank starts, inside the image. Python imports the first `sitecustomize` on its
path, and continues if this import fails. So if the determinism profile requires that an error ends the process, this
code itself ends the process.
"""

import os
import sys


def _start() -> None:
    if "HPCENV_START_HOOK" not in os.environ:
        return
    try:
        from _hpcenv_start_hook import session  # type: ignore[import-not-found,unused-ignore]

        session.begin(os.environ)
    except Exception as error:
        sys.stderr.write("hpcenv: the start hook failed: %s: %s\n" % (type(error).__name__, error))
        text = os.environ["HPCENV_START_HOOK"]
        if '"profile": "off"' in text and '"stop_after_steps": 0' in text:
            sys.stderr.write("hpcenv: this process goes on; nothing is recorded\n")
            return
        sys.stderr.write("hpcenv: this process ends: it could not apply what the run asks for\n")
        sys.stderr.flush()
        os._exit(1)


def _run_next() -> None:
    """Run the `sitecustomize` that Python would find without this file, and put that module into `sys.modules`."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    path = [place for place in sys.path if os.path.abspath(place or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    from importlib._bootstrap import module_from_spec

    own = sys.modules[__name__]
    module = module_from_spec(spec)
    sys.modules[__name__] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # The same happens without hpcenv: Python itself reports the error and continues.
        sys.modules[__name__] = own
        raise


_start()
_run_next()
