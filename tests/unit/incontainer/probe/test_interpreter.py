"""The files that run as Python, and the libraries that they need."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from probe_world import Venv, altered, parse, run

FIELDS = ("python.binary-sha256", "python.libpython-sha256", "python.launcher-sha256")


def test_the_running_program_is_hashed(env: Venv) -> None:
    values = env.probe("full")["values"]
    program = Path(os.path.realpath(env.path / "bin/python3"))
    assert values["python.binary-sha256"] == hashlib.sha256(program.read_bytes()).hexdigest()
    assert values["python.launcher-sha256"] == "none"
    [libc] = [line for line in values["libs.system"] if "/libc.so.6 " in line]
    path, _, digest = libc.partition(" ")
    assert hashlib.sha256(Path(path).read_bytes()).hexdigest().startswith(digest)
    assert values["libs.unlisted"] == []
    assert not set(FIELDS) & env.probe("record")["values"].keys()


def test_a_script_in_the_place_of_python_is_seen(env: Venv) -> None:
    script = env.path / "bin/wrapper"
    script.write_text(f'#!/bin/bash\nexec -a {env.path}/bin/python3 {env.path}/bin/python3 "$@"\n')
    script.chmod(0o755)
    found = parse(run(env.path / "bin/python3", ["--level", "full", "--python", str(script)]).stdout)
    assert found["values"]["python.launcher-sha256"] == hashlib.sha256(script.read_bytes()).hexdigest()
    gone = parse(run(env.path / "bin/python3", ["--level", "full", "--python", "/no/such"]).stdout)
    assert gone["unknown"]["python.launcher-sha256"] == "/no/such: No such file or directory"


def test_the_preload_file_is_read(env: Venv, tmp_path: Path) -> None:
    library = tmp_path / "libx.so"
    library.write_bytes(b"any")
    (tmp_path / "preload").write_text(f"# of the site\n{library} /no/such.so\n")
    found = altered(env, {'PRELOAD_FILE = "/etc/ld.so.preload"': f'PRELOAD_FILE = "{tmp_path}/preload"'})
    digest = hashlib.sha256(b"any").hexdigest()[:16]
    assert found["values"]["libs.ld-so-preload"] == [f"{library} {digest}", "/no/such.so missing"]
