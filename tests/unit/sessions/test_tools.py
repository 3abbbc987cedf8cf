"""Tools of a session: which an environment lacks, what to type, and the script that puts them over an image."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hpcenv.errors import render_hint
from hpcenv.recipes import session_tools
from hpcenv.records.manifest import Overlay
from hpcenv.sessions.tools import how_to_add, lacking


def test_what_an_environment_lacks() -> None:
    kinds = ("jupyter", "tensorboard", "command")
    assert lacking(kinds, {"torch", "jupyterlab", "ipykernel"}) == ("tensorboard",)
    assert lacking(kinds, {"jupyterlab"}) == ("jupyter", "tensorboard")


def test_the_two_lines_to_type() -> None:
    for on_host, words in (
        (False, ("hpcenv image init --tools jupyter", "sh image/add-tools.sh")),
        (True, ("python3 -m pip install jupyterlab ipykernel", "hpcenv lock")),
    ):
        lines = render_hint(tuple(how_to_add("jupyter", on_host=on_host))).splitlines()
        assert lines[1:] == [f"`{word}`" for word in words]


def text(tmp_path: Path, under: Overlay | None) -> str:
    return session_tools.render(
        packages=["jupyterlab", "ipykernel"],
        runtime="/usr/bin/apptainer",
        image="/store/my image.sif",
        under=under,
        folder=tmp_path / "image",
        root=tmp_path,
    )


def test_the_script_is_shell_and_quotes_its_values(tmp_path: Path) -> None:
    venv = Overlay(source="/data/it's.sqsh", use="venv", target="/opt/own")
    packages = Overlay(source="/data/p.sqsh", use="packages", target="/opt/p", python_path="/opt/p")
    found = {name: text(tmp_path, under) for name, under in (("new", None), ("venv", venv), ("packages", packages))}
    for script in found.values():
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)
        assert "image='/store/my image.sif'\n" in script
    # An overlay that is a virtual environment gets the tools; of another one the packages move into a new environment.
    assert "target=/opt/own\n" in found["venv"]
    assert """unsquashfs -q -n -f -d "$work/over" "$under"\n""" in found["venv"]
    assert "-m venv" not in found["venv"]
    assert "target=/opt/tools\n" in found["packages"]
    assert """unsquashfs -q -n -f -d "$folder" "$under"\n""" in found["packages"]
    assert "unsquashfs" not in found["new"]
    assert "hpcenv lock --lock tools\n" in found["new"]
