"""Find the wheel from which an installed package came, and the sha256 of this wheel, with a proof.

Runs on: LOGIN NODE. `find.py` has the function that other modules call. The code that needs pip runs in another
process, with the standard library and pip only: `pip_request.py` starts this process, `pip_process.py` is its program.

An installed package does not record the sha256 of its wheel. hpcenv never guesses the sha256, but confirms it in one of
these ways (`proof` in the lockfile):

    direct-url      direct_url.json (PEP 610) names a file by path or URL. The file was compared like a wheel in an
                    index, and it has the hash that direct_url.json states
    built           the report of a build in the image says that this wheel was compiled there; no index has the wheel,
                    so it cannot be compared
    record          a wheel in an index has the RECORD digest (hpcenv-env-v1, see incontainer/probe/__init__.py) of
                    the installed package, and the same programs for bin/ (compared without the line that names the
                    environment's Python); and the wheel's zip directory agrees with its own RECORD
    embedded-lock   a lockfile in the image names exactly one wheel with this version and these tags; and no index has
                    confirmed or contradicted this wheel
    install-report  the same, but pip's report of the installation names the wheel
    claimed         only direct_url.json states the hash, and the file is missing. This is weak, because a user who
                    edits a package can edit direct_url.json, too
    index-only      the index has exactly one wheel with this version, build and tags, and states its hash, but
                    the wheel could not be read (no partial reads, too large, time limit)
    none            nothing confirms a hash, or an installed file differs from RECORD; the reason is recorded

hpcenv asks pip's own session which files exist. The alternatives were:
  - `pip install --dry-run --report`: this is public, but it runs the resolver. So this command names one file only, and
    never an older build of the same version. The whole command fails if one package of many is unknown. It needs
    half a second of CPU per run, and downloads whole wheels if an index has no PEP 658 metadata. For an environment in
    a container, it needs --platform, --abi and --python-version.
  - `pip config list` and our own HTTP: this is public, but certificates, proxies, netrc, keyring, trusted hosts and the
    system's trust store would all be implemented a second time, with small differences.
  - pip's session without its resolver: this needs three names inside pip, which are the same from 22.3 to 26:
    `create_command("install").parse_args`, `_build_session`, and the fields of its options. The lists (PEP 503,
    PEP 691) are read in this package. So `index-url`, `extra-index-url`, `find-links`, `no-index`, `cert`,
    `client-cert`, `proxy`, `trusted-host`, netrc, keyring and every PIP_* variable have the same meaning as for
    pip. Files are found for any Python and platform, and all packages share one connection pool. hpcenv uses this
    alternative.
If a pip does not have these three names, the proof is `none` with this reason; there is no error.

hpcenv's own Python runs pip (or the Python that the caller names). The Python in the image never runs pip, because it
may have no pip, no network and no configuration. It is also the Python that hpcenv examines.

The sha256 is stated by the index, or computed from a file that was read as a whole. Local files and wheels of up to
WHOLE_BYTES are read as a whole. Every file in such a wheel is compared with RECORD too (in a local wheel up to
LOCAL_WHOLE_BYTES). For a larger wheel, only names and sizes in the zip directory are compared with RECORD. So one kind
of change is not noticed: a file in the wheel was changed without a change of its size, and the index states the hash of
the changed wheel. `pip install` would not notice this change either.

The answer to `ask_for_wheels` contains no URL and no host name: an index is called `pypi` (the user's default index),
`extra-1`, `extra-2` (in the order of extra-index-url) or `find-links`.
"""
