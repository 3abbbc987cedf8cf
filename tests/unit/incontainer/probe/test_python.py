"""The interpreter and its path."""

from __future__ import annotations

from pathlib import Path

from probe_world import SITE, Venv, unlisted


def test_a_user_site_that_is_on_the_path_is_seen(tmp_path: Path) -> None:
    env = Venv(tmp_path / "env", system_site_packages=True)
    base = tmp_path / "home/.local"
    assert env.probe(PYTHONUSERBASE=str(base))["values"]["python.user-site"] == "off"
    user_site = base / SITE
    (user_site / "numpy").mkdir(parents=True)
    (user_site / "numpy/__init__.py").write_text("")
    found = env.probe(PYTHONUSERBASE=str(base))
    assert found["values"]["python.user-site"] == f"on: {user_site}"
    assert str(user_site) in found["values"]["python.sys-path"]
    assert f"{{user-base}}/{SITE}/numpy/__init__.py" in unlisted(found)
    switched_off = env.probe(PYTHONUSERBASE=str(base), PYTHONNOUSERSITE="1")
    assert switched_off["values"]["python.user-site"] == "off"


def test_pythonpath_is_seen_and_does_not_decide_what_the_probe_imports(env: Venv, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    for name in ("csv", "hashlib", "ast", "subprocess", "ctypes"):
        (extra / f"{name}.py").write_text("raise RuntimeError('shadowed')")
    found = env.probe(PYTHONPATH=str(extra))
    assert found["values"]["python.path-variable"] == str(extra)
    assert found["values"]["python.sys-path"][0] == str(extra)
    assert found["unknown"] == {} or set(found["unknown"]) <= {"system.glibc"}
    assert env.probe()["values"]["python.path-variable"] == ""
