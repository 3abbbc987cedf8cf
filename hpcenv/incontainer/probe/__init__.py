"""Describe the environment of this Python exactly, in one line of JSON.

Runs on: inside the image (or in a host environment), alone: standard library only, Python 3.8 to 3.14.

    python3 -B - --level record < TEXT            # how hpcenv starts it: nothing needs to be mounted
    python3 -B .../incontainer/probe --level full

`container/probe_source.py` makes TEXT: all chapters as data, and `__main__.py`, which imports them from there. Each
chapter ends with a table of probes, `PROBES`. To add a fact, write a function and a row in the chapter's table.
Modules of the standard library that not every Python has, or that are slow to import, are imported where they are
used: the other probes work without them.

Below level deep the probe never imports torch or any other installed package. It drops its own first ``sys.path``
entry ('' or its folder), so it reports the path that a training process has before the script's own folder is put in
front. It imports from the standard library only, whatever PYTHONPATH contains.

Each probe works alone. If one fails, its fields get the reason in ``unknown``, and the others continue. A field of
the level is always in ``values`` or in ``unknown``.

Code that runs at every start of Python (.pth files, sitecustomize) may print first: read the last line.

Levels
    record  reads every RECORD and lists the site directories. It opens only the files that no RECORD lists, and reads
            from the libraries under torch what the dynamic loader reads. Child processes ask these libraries for
            their versions.
    full    also reads and hashes every file that a RECORD lists or conda installed, the interpreter, the standard
            library, the libraries under torch wherever they are, and every library that an extension module needs;
            also asks cublas, which takes 150 MiB to load.
    deep    also imports torch in a child process and reports which libraries are then mapped.

Digest ``hpcenv-env-v1`` (anyone can compute it again; text is UTF-8, bytes that cannot be decoded stay unchanged)
    A *dist* is a ``*.dist-info`` or ``*.egg-info`` on sys.path. Of several with the same normal name (PEP 503) the
    first one counts, in one folder the first by folder name; the others are ``shadowed``. pip's ``~*`` leftovers are
    not dists; their files are unlisted files.
    1. Take the rows of its RECORD (csv: path, hash, size). Drop the rows below ``__pycache__``, those of a ``.pyc``
       whose ``.py`` is listed beside it (Python imports only one without a source), and in the dist-info folder INSTALLER, REQUESTED, RECORD, RECORD.jws, RECORD.p7s,
       direct_url.json, provenance_url.json, uv_cache.json, uv_build.json: these depend on the installer.
    2. A path inside the site directory stays unchanged, without ``.`` and ``..``. From a path that leaves it the
       leading ``../`` are removed (an absolute path inside the environment becomes relative to its prefix). Of the
       rest, ``bin/...`` is dropped (scripts contain an absolute shebang), ``include/[site/]pythonX.Y/...``
       becomes ``{headers}/...``, and anything else ``{data}/...``. A path outside of the environment becomes
       ``{outside}/`` + the path as listed; such a file is never opened, and its listed hash counts as its content.
    3. ``record-sha256`` = sha256 of the distinct lines ``path NUL hash NUL size``, as listed, sorted by bytes,
       joined with LF. The RECORD inside the wheel gives the same value, with ``X.data/{purelib,platlib}/`` removed,
       ``X.data/data/`` as ``{data}/``, ``X.data/headers/`` as ``{headers}/NAME/`` and ``X.data/scripts/`` dropped.
    4. ``content-sha256`` is the same, but with the real hash of each file (in the algorithm of the row) in place of
       the listed one. A row without a hash stays so, a missing file has the hash ``missing``, and a folder, device
       or pipe ``not-a-file``. So it equals ``record-sha256`` if and only if no listed file was modified, except
       programs in bin/.
    5. ``packages.env-digest`` = "sha256:" + sha256 of ``hpcenv-env-v1`` LF and the sorted lines
       ``name NUL version NUL record-sha256`` joined with LF. The version is in the normal form of PEP 440; a dist
       without a digest has the word ``unknown``. ``packages.content-digest`` is the same over the content digests,
       so the two are equal if and only if nothing was modified.
    A dist has a ``reason`` instead of a digest if it has no RECORD or one that cannot be parsed, no readable name, or
    is an editable install (its RECORD lists a .pth file, not its code). For an editable install, ``git`` names the
    commit of its tree and, as ``diff-sha256``, the difference from it (bare hex, ``none`` for no difference): tag
    ``hpcenv-diff-v1``, lines ``path NUL sha256`` (and ``NUL target`` for a link). They cover the tracked files that
    git reports as changed or was configured not to check, and the importable files that git does not track, including
    ignored ones. hpcenv's ``*.lock.toml`` files do not count: they contain this number. If git cannot answer,
    ``files`` has the same over all importable files, tag ``hpcenv-files-v1``. Importable files of a tree: those with
    the endings below, in folders from which Python could import (named by an identifier, or on sys.path) below the
    folder of direct_url.json, without environments and run folders; links to folders are not followed.
    A dist without RECORD whose files another list names (dpkg's, or installed-files.txt) has the ``digest-kind``
    walk: tag ``hpcenv-walk-v1``, lines ``path NUL sha256``, over these files below the site directory except
    ``*.pyc`` and the files that step 1 drops. It is both its record digest and its content digest.
    ``packages.unlisted-digest`` = "sha256:" + the same construction with the tag ``hpcenv-unlisted-v1`` and
    lines ``path NUL sha256``. It covers the importable files (``.py .pth .so .so.* .pyd``, and a ``.pyc`` outside
    of ``__pycache__`` without its source) below the site directories that are in no RECORD that counts in the
    env-digest. So every importable file is covered by one of the two digests. Two files are left out, known by their
    content: those that virtualenv and uv put into each environment (LAUNCHERS). Since revision 2 of the lockfile
    (rules.py) it also covers device code, entry_points.txt, files that a RECORD lists without a hash, and modules
    behind links that leave the environment; leftovers that no import can name are left out.
    ``programs`` of a dist (bare hex, ``none`` without one): tag ``hpcenv-programs-v1``, lines ``name NUL sha256``
    over the dropped ``bin/...`` rows, each file without the line that names the environment's Python. The launcher
    of an entry point is left out while it is what an installer writes for the dist's own entry_points.txt; that of
    another function has the word ``entry-point MODULE:FUNCTION``.
    ``python.stdlib-sha256`` (bare hex): tag ``hpcenv-stdlib-v1``, lines ``path NUL sha256``, over the ``*.py``, the
    ``*.so`` and the lone ``*.pyc`` of the standard library and of lib-dynload, and pythonXY.zip (a file, or a folder
    with such files), without site-packages, tests and config-*. Linked folders are followed.
    ``system.packages-digest``: "sha256:" + tag ``hpcenv-system-packages-v1``, lines ``name TAB version TAB arch``.
    ``packages.conda-digest``: the same with the tag ``hpcenv-conda-v1`` and lines
    ``name NUL version NUL build NUL algorithm=hash NUL channel``, over the records in conda-meta.
    ``packages.conda-content-digest``: "sha256:" + tag ``hpcenv-conda-content-v1``, lines ``path NUL sha256`` over the
    files in the ``paths_data`` of conda-meta that no RECORD lists, without ``*.pyc``; for a link ``link TARGET``.
    Where conda wrote the prefix into a file, the placeholder of the package takes its place before it is hashed.
    ``torch.config-digest`` (bare hex): sha256 of torch.__config__.show() without its line on the CPU in use.

What it does not read
    Folders on sys.path that are neither in the prefix nor named site-packages or dist-packages (PYTHONPATH,
    .pth lines, editable sources) contain the user's code. ``python.sys-path`` names them and their dists are listed,
    but their files are not read, except those of an editable install (see above). Behind a link that leaves the
    environment only what a RECORD lists and what Python would import is read, and no further link to a folder. Then ``linked-outside`` counts
    such files of a dist, and ``link`` names the target of an unlisted file. Of compiled files in ``__pycache__`` (or
    below PYTHONPYCACHEPREFIX, if that is set) only the headers are read, at level full: a .pyc that was forged to fit the time and size of its source is not noticed.

Paths are relative to the prefix, or start with ``{base-prefix}/`` or ``{user-base}/``, or are absolute.
"""
