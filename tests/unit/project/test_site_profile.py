"""What a site profile means for one run."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
import tomlkit

from hpcenv.project import document
from hpcenv.project.site import SiteFile
from hpcenv.project.site_page import page
from hpcenv.project.site_profile import Profile, profile
from hpcenv.project.site_when import RunFacts

HEAD = (
    'name = "jura"\n[source.docs]\npage = "the handbook"\nversion = "ab12"\ndate = 2026-05-01\nchecked = 2026-11-23\n'
)


def read(text: str) -> Profile:
    site, problems = document.parse(SiteFile, tomlkit.parse(HEAD + text).unwrap())
    assert site is not None, problems
    return profile(site, "x.toml")


def values(found: Profile) -> dict[str, Any]:
    return {setting.name: setting.value for setting in found.settings}


def test_variables_act_in_their_order() -> None:
    text = """
[[env.A]]
value = "one"
reason = "r"
[[env.A]]
value = "several"
reason = "r"
when = {nodes = ">=2"}
[[env.LD_LIBRARY_PATH]]
prepend = "/site"
reason = "first"
[[env.LD_LIBRARY_PATH]]
append = "/end"
reason = "last"
[[env.P]]
value = "/a"
reason = "r"
[[env.P]]
prepend = "/b"
reason = "r"
"""
    found = read(text).for_run(RunFacts(nodes=1))
    assert values(found) == {"A": "one", "LD_LIBRARY_PATH": "/site:${value}:/end", "P": "/b:/a"}
    path = next(s for s in found.settings if s.name == "LD_LIBRARY_PATH")
    assert (path.expands, path.reason) == (True, "first; last")
    assert values(read(text).for_run(RunFacts(nodes=2)))["A"] == "several"


def test_a_variable_that_the_ranks_must_not_get() -> None:
    text = '[env.NCCL_NET]\nunset = true\nreason = "r"\n[env.OTHER]\nunset = true\nreason = "r"\n'
    found = read(text).for_run(RunFacts(nodes=1))
    # Without a value hpcenv sets nothing either.
    assert (values(found), found.unset) == ({"NCCL_NET": ""}, ("NCCL_NET", "OTHER"))


def test_each_value_says_reason_source_version_and_dates() -> None:
    text = '[env.A]\nvalue = "1"\nreason = "no hangs"\nsource = "docs"\nevidence = "job 7: 18 of 18 ran"\n'
    found = read(text).for_run(RunFacts(nodes=1))
    assert found.settings[0].reason == "no hangs (the handbook, version ab12, of 2026-05-01, checked 2026-11-23)"
    assert found.used[0].evidence == "job 7: 18 of 18 ran"
    later = read(text.replace('source = "docs"', 'source = "docs"\nversion = "ff00"\nchecked = 2026-12-01'))
    assert "version ff00, of 2026-05-01, checked 2026-12-01" in later.for_run(RunFacts(nodes=1)).settings[0].reason


def test_a_condition_that_cannot_be_judged_and_an_old_value_are_told() -> None:
    text = '[env.A]\nvalue = "1"\nreason = "r"\nwhen = {nccl = ">=2.27"}\n[env.B]\nvalue = "1"\nreason = "r"\nexpires = 2026-01-01\n'
    found = read(text).for_run(RunFacts(nodes=1), today=dt.date(2026, 1, 2))
    assert values(found) == {"B": "1"}
    assert found.left_out == (
        "site profile jura: A is not set: it is for nccl >=2.27, and nccl is not known here",
        "site profile jura: B had to be checked again before 2026-01-01; it is set all the same",
    )
    assert read(text).for_run(RunFacts(nodes=1), today=dt.date(2026, 1, 1)).left_out[1:] == ()
    shown = page(found)
    assert "must be checked again after: 2026-01-01" in shown
    assert "B had to be checked again before 2026-01-01" in shown


def test_modules_options_binds_and_the_host_of_the_rendezvous() -> None:
    text = """
[rendezvous]
host = "{node}i"
reason = "r"
[[module]]
name = "fabric"
use = "/appl/modules"
reason = "r"
when = {nodes = ">=2"}
[[option]]
program = "srun"
name = "network"
value = "disable_rdzv_get"
reason = "r"
[[bind]]
source = "/scratch/${user}"
optional = true
reason = "r"
cites = "docs"
"""
    found = read(text).for_run(RunFacts(nodes=2), user="ann")
    assert (found.modules, found.module_paths, found.rendezvous_host) == (("fabric",), ("/appl/modules",), "{node}i")
    assert [(b.source, b.target, b.optional) for b in found.binds] == [("/scratch/ann", "/scratch/ann", True)]
    assert [(u.kind, u.name, u.value) for u in found.used] == [
        ("module", "fabric", "/appl/modules"),
        ("srun", "--network", "disable_rdzv_get"),
        ("rendezvous", "host", "{node}i"),
        ("bind", "/scratch/${user}", "/scratch/${user}"),
    ]
    assert "the handbook" in found.used[3].source
    assert read(text).for_run(RunFacts(nodes=1)).modules == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[env.A]\nreason = "r"\n', "`env.A` needs one of"),
        ('[env.A]\nvalue = "1"\nunset = true\nreason = "r"\n', "`env.A` needs one of"),
        ('[env.A]\nvalue = "1"\n', "`env.A` has no `reason`"),
        ('[env.A]\nvalue = "1"\nreason = "r"\nwhen = {nodes = "many"}\n', "must be bounds"),
        ('[env.A]\nvalue = "1"\nreason = "r"\nwhen = {node = "1"}\n', "unknown key `env.A[0].when.node`"),
        ('[[option]]\nprogram = "srun"\nname = "output"\nvalue = "x"\nreason = "r"\n', "the log of a run is job.log"),
        ('[[option]]\nprogram = "srun"\nname = "constraint"\nvalue = "x"\nreason = "r"\n', "belongs to the whole job"),
        ('[[option]]\nprogram = "sbatch"\nname = "constraint"\nvalue = "a b"\nreason = "r"\n', "must be one word"),
        ('[rendezvous]\nhost = "head"\nreason = "r"\n', "must be a host name with {node}"),
        ('[store]\nfolder = "images"\nreason = "r"\n', "must be an absolute path"),
        ('[store]\nfolder = "${SCRATCH}images"\nreason = "r"\n', "must be an absolute path"),
        ('[store]\nfolder = "/s/${jobid}"\nreason = "r"\n', "must be an absolute path"),
        ('[store]\nfolder = "/s/$SCRATCH"\nreason = "r"\n', "must be an absolute path"),
        ('[store]\nfolder = "/s"\n', "`store` has no `reason`"),
        ('[store]\nfolder = "/s"\nreason = "r"\nwhen = {nodes = "1"}\n', "`store` has a `when`"),
        ('[[base-image]]\nimage = "docker://a:latest"\nreason = "r"\n', "must name a digest"),
        ('[[module]]\nname = "a; b"\nreason = "r"\n', "is not the name of a module"),
    ],
)
def test_what_is_refused(text: str, why: str) -> None:
    site, problems = document.parse(SiteFile, tomlkit.parse(HEAD + text).unwrap())
    assert site is None
    assert why in "\n".join(problems)
