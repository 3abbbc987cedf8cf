"""Describe the environment of this Python exactly, in one line of JSON.

Runs on: inside the image (or in a host environment). Needs only the standard library, Python 3.8 to 3.14.

    python3 -B - --level record < TEXT            # how hpcenv starts it: nothing needs to be mounted
    python3 -B .../incontainer/probe --level full

`container/probe_source.py` makes TEXT. TEXT has the sources of all modules of the probe as data, and `__main__.py`,
which imports the modules from this data. A module with probes ends with a table of these probes, `PROBES`. To add a
fact, write a function and a row in the module's table. Modules of the standard library that some Pythons lack, or that
are slow to import, are imported where they are used, so that the other probes work without these modules.

Below level deep the probe never imports torch or any other installed package. The probe removes the first entry of its
``sys.path`` ('' or its folder). So the probe reports the path of a training process before Python adds the folder of
the script. The probe imports from the standard library only, whatever PYTHONPATH contains.

Each probe works alone. If a probe fails, its fields get the reason in ``unknown``, and the other probes continue. A
field of the level is always in ``values`` or in ``unknown``.

Read only the last line of the output: code that runs at every start of Python (.pth files, sitecustomize) may print
before it.

Levels
    record  reads every RECORD and lists the site directories. This level opens only the files that no RECORD lists, and
            reads from the libraries under torch what the dynamic loader reads. Child processes ask these libraries for
            their versions.
    full    also reads and hashes every file that a RECORD lists or conda installed, the interpreter, the standard
            library, the libraries under torch wherever they are, and every library that an extension module needs.
            This level also asks cublas for its version, which takes 150 MiB.
    deep    also imports torch in a child process and reports which libraries are then mapped.

Digest ``hpcenv-env-v1`` (anyone can compute it again; text is UTF-8, bytes that cannot be decoded stay unchanged)
    A *dist* is a ``*.dist-info`` or ``*.egg-info`` on sys.path. If several dists have the same normal name (PEP 503),
    only the first dist counts, in one folder the first by folder name. The other dists with this name are
    ``shadowed``. pip's ``~*`` leftovers are not dists; their files are unlisted files.
    1. Take the rows of the dist's RECORD (csv: path, hash, size). Drop the rows below ``__pycache__``, and the rows of
       each ``.pyc`` whose ``.py`` is listed beside it (Python imports only a .pyc without a source). In the dist-info
       folder, drop INSTALLER, REQUESTED, RECORD, RECORD.jws, RECORD.p7s, direct_url.json, provenance_url.json,
       uv_cache.json and uv_build.json, because these files depend on the installer.
    2. A path inside the site directory stays unchanged, without ``.`` and ``..``. From a path that leaves the site
       directory, the leading ``../`` are removed. An absolute path inside the environment becomes relative to the
       prefix. If the resulting path is ``bin/...``, its row is dropped, because scripts contain an absolute shebang.
       ``include/[site/]pythonX.Y/...`` becomes ``{headers}/...``, and any other path becomes ``{data}/...``. A path
       outside of the environment becomes ``{outside}/`` + the path as listed. Such a file is never opened, and its
       listed hash counts as its content.
    3. ``record-sha256`` = sha256 of the distinct lines ``path NUL hash NUL size``, as listed, sorted by bytes,
       joined with LF. The RECORD inside the wheel gives the same value, with ``X.data/{purelib,platlib}/`` removed,
       ``X.data/data/`` as ``{data}/``, ``X.data/headers/`` as ``{headers}/NAME/`` and ``X.data/scripts/`` dropped.
    4. ``content-sha256`` is made in the same way, but with the real hash of each file (in the algorithm of the row)
       instead of the listed hash. A row without a hash stays so, a missing file has the hash ``missing``, and a folder,
       device or pipe ``not-a-file``. So ``content-sha256`` equals ``record-sha256`` if and only if no listed file
       was modified. Programs in bin/ do not count here.
    5. ``packages.env-digest`` = "sha256:" + sha256 of ``hpcenv-env-v1`` LF and the sorted lines
       ``name NUL version NUL record-sha256`` joined with LF. The version is in the normal form of PEP 440. For a dist
       without a digest, the line has the word ``unknown``. ``packages.content-digest`` is made in the same way from the
       content digests, so the two digests are equal if and only if nothing was modified.
    A dist has a ``reason`` instead of a digest if it has no RECORD, a RECORD that cannot be parsed or no readable name,
    or if it is an editable install (whose RECORD lists a .pth file, not the code). For an editable install, ``git``
    names the commit of its tree and, as ``diff-sha256``, a digest of the difference from the commit (bare hex, ``none``
    for no difference): tag ``hpcenv-diff-v1``, lines ``path NUL sha256`` (and ``NUL target`` for a link). The lines
    cover the tracked files that git reports as changed or was configured not to check, and the importable files that
    git does not track, including ignored ones. hpcenv's ``*.lock.toml`` files do not count, because they contain this
    digest. If git cannot answer, ``files`` has such a digest over all importable files, tag ``hpcenv-files-v1``.
    Importable files of a tree have the endings below, and are in folders from which Python could import (named by an
    identifier, or on sys.path) below the folder of direct_url.json. Environments and run folders in the tree are left
    out, and links to folders are not followed.
    A dist without RECORD whose files another list names (dpkg's, or installed-files.txt) has the ``digest-kind``
    walk: tag ``hpcenv-walk-v1``, lines ``path NUL sha256``, over the listed files below the site directory, without
    ``*.pyc`` and the files that step 1 drops. This digest is both its record digest and its content digest.
    ``packages.unlisted-digest`` = "sha256:" + the same construction with the tag ``hpcenv-unlisted-v1`` and
    lines ``path NUL sha256``. This digest covers the importable files (``.py .pth .so .so.* .pyd``, and a ``.pyc``
    outside of ``__pycache__`` without its source) below the site directories that are in no RECORD that counts in the
    env-digest. So the env-digest or the unlisted-digest covers every importable file. Only the two files that
    virtualenv and uv put into each environment (LAUNCHERS) are left out, if they have a known content. Since revision 2
    of the lockfile (rules.py), the unlisted-digest also covers device code, entry_points.txt, files that a RECORD lists
    without a hash, and modules behind links that leave the environment. The unlisted-digest does not cover leftovers
    that no import can name.
    ``programs`` of a dist (bare hex, ``none`` without programs): tag ``hpcenv-programs-v1``, lines ``name NUL sha256``
    over the dropped ``bin/...`` rows, each file without the line that names the environment's Python. The launcher
    of an entry point is left out if it is what an installer writes for the dist's own entry_points.txt. The launcher of
    another function has the word ``entry-point MODULE:FUNCTION`` instead of the hash.
    ``python.stdlib-sha256`` (bare hex): tag ``hpcenv-stdlib-v1``, lines ``path NUL sha256``, over the ``*.py``, the
    ``*.so`` and the lone ``*.pyc`` of the standard library and of lib-dynload, and pythonXY.zip (a file, or a folder
    with such files), without site-packages, tests and config-*. Linked folders are followed.
    ``system.packages-digest``: "sha256:" + tag ``hpcenv-system-packages-v1``, lines ``name TAB version TAB arch``.
    ``packages.conda-digest``: the same with the tag ``hpcenv-conda-v1`` and lines
    ``name NUL version NUL build NUL algorithm=hash NUL channel``, over the records in conda-meta.
    ``packages.conda-content-digest``: "sha256:" + tag ``hpcenv-conda-content-v1``, lines ``path NUL sha256`` over the
    files in the ``paths_data`` of conda-meta that no RECORD lists, without ``*.pyc``. A link has ``link TARGET``
    instead of the hash. If conda wrote the prefix into a file, the placeholder of the package takes the place of the
    prefix before the file is hashed.
    ``torch.config-digest`` (bare hex): sha256 of torch.__config__.show() without its line on the CPU in use.

What the probe does not read
    Folders on sys.path that are neither in the prefix nor named site-packages or dist-packages (PYTHONPATH,
    .pth lines, editable sources) contain the user's code. ``python.sys-path`` names these folders, and their dists are
    listed, but the files in these folders are not read. Only the files of an editable install are read (see above).
    Behind a link that leaves the environment, the probe reads only what a RECORD lists and what Python would import,
    and follows no further link to a folder. ``linked-outside`` counts such files of a dist, and ``link`` names the
    target of an unlisted file. Of compiled files in ``__pycache__`` (or below PYTHONPYCACHEPREFIX, if that is set),
    only the headers are read, at level full. So a .pyc that was forged to fit the time and size of its source is not
    noticed.

Paths are relative to the prefix, or start with ``{base-prefix}/`` or ``{user-base}/``, or are absolute.
"""
