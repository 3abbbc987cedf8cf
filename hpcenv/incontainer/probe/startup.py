"""Code that Python runs before the training starts.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.hashing import SCAN_SECONDS, hash_file
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

# The files that virtualenv and uv put into the site directory of each new environment, in all versions from 2020-03 to
# 2026-08. These files only prevent distutils' configuration files from moving an installation. Whether these files
# exist depends on the tool. A file with such a name and other content counts as unlisted.
LAUNCHERS = {
    "_virtualenv.pth": frozenset(
        (
            "69ac3d8f27e679c81b94ab30b3b56e9cd138219b1ba94a1fa3606d5a76a1433d",
            "a18ec686bd69842888e68e43eade6c26cac183a1e4c98c40ae8992349f0a1a1c",
        )
    ),
    "_virtualenv.py": frozenset(
        (
            "095a1099733d28c837bca584f5fb3eb3724e357f8846c015083dc6e9a7b985f3",
            "65de6a7145016299fba5fc2f113d278b53db54fa9a4f32ff4b837d5ee2a4608a",
            "96245d9e9c0b16fdcd99b470abe101863858120c9bf57752278ec4d7f9b09a94",
            "82944bb74841efbcfdc3539e7d60df63f43cc023041eb183abbd56f44e071b45",
            "e3db5fe06ab41ca9b95dd6463b83836787028a1b55562cc383803bb83001a45c",
            "bd9633de3d8122488d66fcfa0c7f0c9cd0b58e9147938ddf1f8fa76ca12b6ad5",
            "684b8c07932ba4a84ac2e5ae9afe49ef04e92bac3d8d4191d455cf09d093e5fc",
            "ce57d5e0d9b5d7356cb42da7450ba8f9359bdf693e335f4c921626943c77e64d",
            "c9199315871b11b12df226f890a38e66e63191e1adbfb11a66e6861151b33fca",
            "f4dfaeb9efc1614890cfa94ed15bbe9b2ee15fbe76d569ef5e435e93e4987dc7",
            "119e4eb9c1a39e6ffd220840844bd326fa1bd3acf2f1c9fa0612949aedc228a5",
            "0aeb86546345c1d0fada097536e35525714d5cdbcc2d8eb3f9912a955044fcff",
            "956a757e912269c3a2537374d07e70b8faa04ace69b54df88a21f749c5fd4233",
            "0f20351ea7e90039c46d3fabdef991f28b1e3ff33eb13ee6f0d5cd21ea0e8b14",
            "7169dab6537491cb9c573ff83ea0112955fd5180d8535cac70d4c987398dbeef",
            "bec6155ff7bfc88f8e79e481f27fd7ee0a3b40eeca9bfeb41f4c4b997b2f8100",
            "02943e192823d75212f206e1f2991ac572119882683a95dfbb7a1b913d7b14b5",
            "e8c426ce260f866254ff35cefedc8b3efbd6d1446d99d7a4cdeb0095f98a8b8f",
            "460589e83387d4dfe5fd84d41c5f6979599f5cd080983d73c832549161c80435",
            "d1ea23a2be4bcbac5e75c69bc03926397bf53ae16e35c58d7c3b73306cb1a81e",
            "0278334cdcfab4c746b4416fbd5c2b6e7da937c81e132397d62c361d404ebe0e",
            "cfb3db86aaa53bb62b5ff764970bec2d71c9228590a0ebec57f6ec926cc0bf1a",
            "6cf30c56faf2a55228914dbbd17f8088ed371ebb08f5e7fa6fd931f913fcaf1d",
            "e3e10c8a19a62a49928c139b8e6824eac92dcdda7639953bcd10921011cbbdff",
            "ee52b2e2e720a40885a6b4b90c40e28e5c70e550af74d5efd169eaa5db2a6f6f",
        )
    ),
}


def probe_startup(env: ProbedEnvironment) -> Facts:
    """Return the files whose code Python runs at every start: .pth files, sitecustomize, usercustomize."""
    import site

    folders = [os.path.normpath(p) for p in getattr(site, "getsitepackages", list)()]
    folders += [s.path for s in env.sites if s.scanned]
    files = []
    for folder in dict.fromkeys(f for f in folders if f in env.path):
        files += [folder + "/" + n for n in env.names(folder) if n.endswith(".pth")]
    for folder in dict.fromkeys(env.path):
        for name in env.names(folder):
            if name.split(".")[0] in ("sitecustomize", "usercustomize"):
                files += _module_files(folder + "/" + name)
    startup_files = []
    for path in dict.fromkeys(files):
        result = hash_file(env, path, "sha256", bytearray(1 << 16), time.monotonic() + SCAN_SECONDS)
        if result.digest is None:
            return {"python.startup-files": Unknown(f"{printable(env.shown(path))}: {result.problem}")}
        if result.word() not in LAUNCHERS.get(os.path.basename(path), ()):
            startup_files.append(printable(env.shown(path)) + " " + result.word()[:16])
    return {"python.startup-files": sorted(startup_files)}


def _module_files(path: str) -> list[str]:
    if os.path.isdir(path):
        return [path + "/__init__.py"] if os.path.isfile(path + "/__init__.py") else []
    return [path] if path.endswith((".py", ".pyc", ".so")) else []


PROBES: tuple[Probe, ...] = (Probe("startup", ("python.startup-files",), probe_startup),)
