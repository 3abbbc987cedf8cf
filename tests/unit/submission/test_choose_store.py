"""Where images are kept: flag, variable, project, site profile, default, in this order, each with its origin."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import SpecError
from hpcenv.project.acceptance import asked_paths
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.submission.choose_store import find_store
from tests.conftest import hpcenv

PROFILE = """
name = "{name}"
[match]
cluster = "jura"
[store]
folder = "{folder}"
reason = "homes are small"
"""


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    """The environment of a user on cluster `jura`; the machine's profiles are in `machine`."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=jura\n")
    return {
        "PATH": os.environ["PATH"],
        "SLURM_CONF": str(conf),
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HPCENV_SITES": str(tmp_path / "machine"),
        "FAST": str(tmp_path / "fast"),
    }


def write(folder: Path, name: str = "jura", text: str = PROFILE, *, store: str = "${FAST}/images") -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    path = folder / f"{name}.toml"
    path.write_text(text.format(name=name, folder=store))
    path.chmod(0o600)
    return path


def found(
    environ: Mapping[str, str], cwd: Path, *, root: Path | None = None, site: str | None = None
) -> tuple[Path, str]:
    context = Context(environ=environ, cwd=cwd, now=time.localtime(0), token="", command=())
    return find_store(context, root, site)


def test_the_profile_of_this_cluster_names_the_folder(here: dict[str, str], tmp_path: Path) -> None:
    default = tmp_path / "cache" / "hpcenv" / "store"
    assert found(here, tmp_path) == (default, "the default: SCRATCH is not set")
    path = write(tmp_path / "machine")
    fast = tmp_path / "fast" / "images"
    assert found(here, tmp_path) == (fast, f"[store] of site profile jura ({path})")
    # SCRATCH is only the default; what was kept before is named.
    default.mkdir(parents=True)
    place, origin = found({**here, "SCRATCH": str(tmp_path)}, tmp_path)
    assert (place, origin.endswith(f"; images from before are in {default}")) == (fast, True)
    assert found({**here, "HPCENV_SITE": "none"}, tmp_path) == (default, "the default: it exists already")


def test_a_named_profile_wins_over_the_one_of_the_cluster(here: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "machine")
    write(tmp_path / "machine", "other", store="/other/${user}")
    assert found(here, tmp_path, root=tmp_path, site="other")[0].parts[:2] == ("/", "other")
    assert found({**here, "HPCENV_SITE": "jura"}, tmp_path, root=tmp_path, site="other")[0] == tmp_path / "fast/images"


def test_a_folder_that_this_user_cannot_use_is_told_with_the_reason(here: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "machine")
    del here["FAST"]
    place, origin = found(here, tmp_path)
    assert place == tmp_path / "cache" / "hpcenv" / "store"
    assert origin == (
        "the default: SCRATCH is not set; "
        f"[store] of site profile jura ({path}) names ${{FAST}}/images, which is not used: FAST is not set"
    )


def test_a_cluster_without_a_known_name_is_told(here: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "machine")
    place, origin = found({**here, "SLURM_CONF": "/nonexistent", "PATH": "/nonexistent"}, tmp_path)
    assert place == tmp_path / "cache" / "hpcenv" / "store"
    assert "no site profile is used: this cluster's name is not known" in origin


def test_each_place_wins_over_the_next_and_is_named(here: dict[str, str], tmp_path: Path, project: Path) -> None:
    path = write(tmp_path / "machine")

    def listed(*words: str, **more: str) -> tuple[str, str]:
        environ = {**here, **more}
        data: dict[str, Any] = hpcenv("image", "list", "--json", *words, cwd=project, environ=environ).envelope["data"]
        return data["store"], data["origin"]

    site = (str(tmp_path / "fast" / "images"), f"[store] of site profile jura ({path})")
    assert listed() == site
    text = (project / "hpcenv.toml").read_text()
    (project / "hpcenv.toml").write_text(f'{text}\n[paths]\nstore = "kept"\n')
    assert listed() == (f"{project}/kept", f"`store` under [paths] in {project}/hpcenv.toml")
    assert listed(HPCENV_STORE="/v") == ("/v", "HPCENV_STORE")
    assert listed("--store", "/f", HPCENV_STORE="/v") == ("/f", "--store")
    shown = hpcenv("image", "list", cwd=tmp_path, environ=here)
    assert f"origin: {site[1]}" in shown.stderr


def test_a_broken_profile_stops_what_needs_images_and_nothing_else(here: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "machine", text="name = 1\n")
    with pytest.raises(SpecError, match="is not valid"):
        found(here, tmp_path)
    project = tmp_path / "project"
    project.mkdir()
    (project / "hpcenv.toml").write_text('image = "host"\n')
    assert hpcenv("list", cwd=project, environ=here).status == 0
    assert hpcenv("image", "list", cwd=project, environ=here).status == SpecError.exit_status
    # It is what writes a new profile.
    done = hpcenv("doctor", "--preflight", "off", cwd=project, environ=here)
    assert "what a site profile names is unknown" in " ".join(done.stdout.split())


def test_a_profile_of_somebody_elses_project_names_no_folder_unasked(tmp_path: Path) -> None:
    (tmp_path / "hpcenv.toml").write_text('image = "host"\n')
    write(tmp_path / "sites", store="/elsewhere")
    (asked,) = asked_paths(open_workspace(tmp_path))
    assert (asked.key, asked.value) == ("[store] of sites/jura.toml", "/elsewhere")
