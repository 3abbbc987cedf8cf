"""Find the wheel that an installed package came from, and its sha256, with the proof.

Runs on: LOGIN NODE. `find.py` is the entrance. What needs pip runs in another process, with the standard library and
pip only: `pip_request.py` starts it, `pip_process.py` is its program.

An installed package does not record the sha256 of its wheel. hpcenv never guesses it, but confirms it in one of these
ways (`proof` in the lockfile):

    direct-url      the very file that direct_url.json names (PEP 610), a path or a URL, is compared as those of an
                    index, and has the hash that is written there
    built           the report of a build in the image says that this wheel was compiled there; no index has it, so
                    there is nothing to compare it with
    record          a wheel in an index has the RECORD digest (hpcenv-env-v1, see incontainer/probe/__init__.py) of
                    the installed package and the same programs for bin/ (compared without the line that names the
                    environment's Python), and its zip directory agrees with its own RECORD
    embedded-lock   a lockfile in the image names exactly one wheel of this version and these tags,
    install-report  or pip's report of the installation does. Used if no index has confirmed or contradicted it
    claimed         direct_url.json says so, and the file is missing: a user who edits a package can edit that, too
    index-only      the index has exactly one wheel with this version, build and tags, and states its hash, but
                    the wheel could not be read (no partial reads, too large, time limit)
    none            none of these, with the reason. So it is, too, if an installed file is not what RECORD lists

pip's own session is asked which files exist. The alternatives were:
  - `pip install --dry-run --report`: public, but it resolves. It names one file only, so
    never an older build of the same version. It fails as a whole if one package of many is unknown, needs half a
    second of CPU per run, downloads whole wheels where an index has no PEP 658 metadata, and needs --platform, --abi
    and --python-version for an environment in a container.
  - `pip config list` and our own HTTP: public, but certificates, proxies, netrc, keyring, trusted hosts and the
    system's trust store would all be implemented a second time, with small differences.
  - pip's session without its resolver. It needs three names inside pip, the same from 22.3 to 26:
    `create_command("install").parse_args`, `_build_session`, and the fields of its options. The lists (PEP 503,
    PEP 691) are read here. So `index-url`, `extra-index-url`, `find-links`, `no-index`, `cert`, `client-cert`,
    `proxy`, `trusted-host`, netrc, keyring and every PIP_* variable have the meaning that they have for pip, files
    are found for any Python and platform, and all packages share one connection pool. This was chosen.
A pip without these names gives `none` with that reason, not an error.

hpcenv's own Python runs pip (or the Python that the caller names), never the Python in the image: that one may have
no pip, no network and no configuration, and it is the object of the examination.

The sha256 is the one that the index states, or it is computed from a file that was read as a whole. That happens for
local files and for wheels of up to WHOLE_BYTES (then every file in them is compared with RECORD too). Of a larger
wheel the zip directory is compared with RECORD by name and size. So one change is not noticed: an index that states
the hash of a changed wheel, if the changed file keeps its size. `pip install` would not notice it either.

The answer to `ask_for_wheels` contains no URL and no host name: an index is called `pypi` (the user's default index),
`extra-1`, `extra-2` (in the order of extra-index-url) or `find-links`.
"""
