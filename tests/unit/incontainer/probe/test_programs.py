"""Programs in bin/: content without the line that names the environment's Python."""

from __future__ import annotations

import pytest
from probe_world import Venv, package

from hpcenv.incontainer.probe.programs import launched_by, without_shebang

PIP = b"# -*- coding: utf-8 -*-\nimport re\nimport sys\nfrom m.n import f\nif __name__ == '__main__':\n"
PIP += b"    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])\n    sys.exit(f())\n"
PIP_25 = (
    b"import sys\nfrom m.n import f\nif __name__ == '__main__':\n    sys.argv[0] = sys.argv[0].removesuffix('.exe')\n"
)
PIP_25 += b"    sys.exit(f())\n"
UV = b'# -*- coding: utf-8 -*-\nimport sys\nfrom m.n import f\nif __name__ == "__main__":\n'
UV += b'    if sys.argv[0].endswith("-script.pyw"):\n        sys.argv[0] = sys.argv[0][:-11]\n'
UV += b'    elif sys.argv[0].endswith(".exe"):\n        sys.argv[0] = sys.argv[0][:-4]\n    sys.exit(f())\n'


@pytest.mark.parametrize("script", [PIP, PIP_25, UV])
def test_every_installers_launcher_is_recognised(script: bytes) -> None:
    assert launched_by(script) == "m.n:f"
    assert launched_by(script.replace(b"f())", b"g())")) == ""
    assert launched_by(script.replace(b"    sys.exit", b"    evil()\n    sys.exit")) == ""
    assert launched_by(b"evil()\n" + script) == ""


@pytest.mark.parametrize(
    ("head", "left"),
    [
        (b"#!/a/bin/python\n", b""),
        (b"#!/a b/bin/python3.11 -I\n", b""),
        (b"#!/usr/bin/env python\r\n", b""),
        (b"#!/bin/sh\n'''exec' \"/a b/python3\" \"$0\" \"$@\"\n' '''\n", b""),
        (b"#!/bin/sh\n", b"#!/bin/sh\n"),
        (b"#!/python/bin/bash\n", b"#!/python/bin/bash\n"),
        (b"\x7fELF", b"\x7fELF"),
    ],
)
def test_only_the_line_that_names_python_is_left_out(head: bytes, left: bytes) -> None:
    assert without_shebang(head + b"run()\n") == left + b"run()\n"


def test_a_launcher_counts_only_if_it_is_not_what_an_installer_writes(env: Venv) -> None:
    points = {"tool-1.0.dist-info/entry_points.txt": b"[console_scripts]\ntool = m.n:f\n"}
    env.install("tool", {"../../../bin/tool": b"#!/x/python\n" + PIP, **points})
    program = env.path / "bin/tool"
    assert package(env.probe("full"), "tool")["programs"]["sha256"] == "none"
    program.write_bytes(b"#!/y/python\n" + UV)
    assert package(env.probe("full"), "tool")["programs"]["sha256"] == "none"
    program.write_bytes(b"#!/y/python\n" + UV.replace(b"m.n", b"m.o"))
    assert package(env.probe("full"), "tool")["programs"]["files"] == {"tool": "entry-point m.o:f"}
    program.unlink()
    assert package(env.probe("full"), "tool")["programs"]["files"] == {"tool": "missing"}
