"""Find the wheel that an installed package came from, and its sha256, with the proof.

Runs on: LOGIN NODE. `find.py` has the function that other modules call. The code that needs pip runs in another
process, with the standard library and pip only: `pip_request.py` starts this process, `pip_process.py` is its program.

An installed package does not record the sha256 of its wheel. hpcenv never guesses the sha256, but confirms it in one of
these ways (`proof` in the lockfile):

    direct-url      the file that direct_url.json names (PEP 610), a path or a URL, was compared like a wheel in an
                    index, and it has the hash that direct_url.json states
    built           the report of a build in the image says that this wheel was compiled there; no index has the wheel,
                    so it cannot be compared
    record          a wheel in an index has the RECORD digest (hpcenv-env-v1, see incontainer/probe/__init__.py) of
                    the installed package and the same programs for bin/ (compared without the line that names the
                    environment's Python), and the wheel's zip directory agrees with its own RECORD
    embedded-lock   a lockfile in the image names exactly one wheel of this version and these tags,
    install-report  or pip's report of the installation names it. Used if no index has confirmed or contradicted it
    claimed         only direct_url.json states the hash, and the file is missing. A user who edits a package can edit
                    direct_url.json, too
    index-only      the index has exactly one wheel with this version, build and tags, and states its hash, but
                    the wheel could not be read (no partial reads, too large, time limit)
    none            nothing confirms a hash, or an installed file is not what RECORD lists; the reason is recorded

pip's own session is asked which files exist. The alternatives were:
  - `pip install --dry-run --report`: public, but it runs the resolver. So this command names one file only, and
    never an older build of the same version. The command fails as a whole if one package of many is unknown, needs
    half a second of CPU per run, downloads whole wheels if an index has no PEP 658 metadata, and needs --platform,
    --abi and --python-version for an environment in a container.
  - `pip config list` and our own HTTP: public, but certificates, proxies, netrc, keyring, trusted hosts and the
    system's trust store would all be implemented a second time, with small differences.
  - pip's session without its resolver, which needs three names inside pip, the same from 22.3 to 26:
    `create_command("install").parse_args`, `_build_session`, and the fields of its options. The lists (PEP 503,
    PEP 691) are read in this package. So `index-url`, `extra-index-url`, `find-links`, `no-index`, `cert`,
    `client-cert`, `proxy`, `trusted-host`, netrc, keyring and every PIP_* variable have the meaning that they have for
    pip, files are found for any Python and platform, and all packages share one connection pool. hpcenv uses this
    alternative.
If a pip does not have these three names, the proof is `none` with this reason; there is no error.

hpcenv's own Python runs pip (or the Python that the caller names). The Python in the image never runs pip, because it
may have no pip, no network and no configuration, and because it is what hpcenv examines.

The sha256 is stated by the index, or computed from a file that was read as a whole. Local files and wheels of up to
WHOLE_BYTES are read as a whole. Every file in such a wheel is compared with RECORD too (in a local wheel up to
LOCAL_WHOLE_BYTES). For a larger wheel, only names and sizes in the zip directory are compared with RECORD. So one
change is not noticed: the index states the hash of a changed wheel, and the changed file in it has the same size as
before. `pip install` would not notice this change either.

The answer to `ask_for_wheels` contains no URL and no host name: an index is called `pypi` (the user's default index),
`extra-1`, `extra-2` (in the order of extra-index-url) or `find-links`.
"""
