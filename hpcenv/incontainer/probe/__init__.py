"""Describe the environment of this Python exactly, in one line of JSON.

Runs on: inside the image (or in a host environment). Needs only the standard library, Python 3.8 to 3.14.

    python3 -B - --level record < TEXT            # how hpcenv starts the probe; it needs no mount
    python3 -B .../incontainer/probe --level full

`container/probe_source.py` makes TEXT. TEXT contains the sources of all modules of the probe as data, followed by
`__main__.py`, which imports the modules from this data. A module with probes ends with `PROBES`, a table of these
probes. To add a fact, write a function and a row in the module's table. Some Pythons lack some modules of the standard
library, and some modules are slow to import. Such modules are imported where they are used, so that the other probes
work without these modules.

Below level deep the probe never imports torch or any other installed package. The probe removes the first entry of its
``sys.path`` ('' or its folder). So the probe reports the path of a training process before Python adds the folder of
the script. The probe imports from the standard library only, whatever PYTHONPATH contains.

Each probe works alone. If a probe fails, ``unknown`` has the reason for each of its fields, and the other probes
continue. Each field of the level is always in ``values`` or in ``unknown``.

Read only the last line of the output: code that runs at every start of Python (.pth files, sitecustomize) may print
before it.

Levels
    record  reads every RECORD and lists the site directories. This level opens only the files that no RECORD lists. Of
            the libraries under torch, it reads only the parts that the dynamic loader reads. Child processes ask these
            libraries for their versions.
    full    also reads and hashes every file that a RECORD lists or conda installed, the interpreter, the standard
            library, the libraries under torch in all places, and every library that an extension module needs. This
            level also asks cublas for its version. This question takes 150 MiB.
    deep    also imports torch in a child process and reports which libraries are then mapped.

Digest ``hpcenv-env-v1`` (can be computed again from these steps; text is UTF-8, undecodable bytes stay unchanged)
    A *dist* is a ``*.dist-info`` or ``*.egg-info`` on sys.path. If several dists have the same normal name (PEP 503),
    only the first dist counts. Within one folder of sys.path, the first dist is the first by name. The other dists with this name are
    ``shadowed``. pip's ``~*`` leftovers are not dists; their files are unlisted files.
    1. Take the rows of the dist's RECORD (csv: path, hash, size). Drop the rows below ``__pycache__``. Drop the row of
       each ``.pyc`` whose ``.py`` is listed beside it, because Python imports a .pyc only without a source. In the
       dist-info folder, drop INSTALLER, REQUESTED, RECORD, RECORD.jws, RECORD.p7s, direct_url.json,
       provenance_url.json, uv_cache.json and uv_build.json, because these files depend on the installer.
    2. A path inside the site directory stays unchanged, without ``.`` and ``..``. If a path leads out of the site
       directory, the leading ``../`` are removed. An absolute path inside the environment becomes relative to the
       prefix. If the resulting path is ``bin/...``, its row is dropped, because scripts contain an absolute shebang.
       ``include/[site/]pythonX.Y/...`` becomes ``{headers}/...``, and any other path becomes ``{data}/...``. A path
       outside of the environment becomes ``{outside}/`` + the path as listed. Such a file is never opened, and its
       listed hash counts as its content.
    3. ``record-sha256`` = sha256 of the distinct lines ``path NUL hash NUL size``, as listed, sorted by bytes,
       joined with LF. The RECORD inside the wheel gives the same value after these changes:
       ``X.data/{purelib,platlib}/`` is removed, ``X.data/data/`` becomes ``{data}/``, ``X.data/headers/`` becomes
       ``{headers}/NAME/``, and the rows below ``X.data/scripts/`` are dropped.
    4. ``content-sha256`` is made in the same way, but with the real hash of each file (in the algorithm of the row)
       instead of the listed hash. A row without a hash stays without a hash. The hash of a missing file is ``missing``,
       and the hash of a folder, device or pipe is ``not-a-file``. So ``content-sha256`` equals ``record-sha256`` if and
       only if no listed file was modified. Programs in bin/ do not count here.
    5. ``packages.env-digest`` = "sha256:" + sha256 of ``hpcenv-env-v1`` LF and the sorted lines
       ``name NUL version NUL record-sha256`` joined with LF. The version is in the normal form of PEP 440. For a dist
       without a digest, the line has the word ``unknown``. ``packages.content-digest`` is made in the same way from the
       content digests, so the two digests are equal if and only if nothing was modified.
    A dist has a ``reason`` instead of a digest if it has no RECORD, a RECORD that cannot be parsed or no readable name.
    An editable install also has a ``reason``, because its RECORD lists a .pth file, not the code. For an editable
    install, ``git`` names the commit of its tree, and its ``diff-sha256`` is a digest of the difference from the commit
    (bare hex, ``none`` for no difference): tag ``hpcenv-diff-v1``, lines ``path NUL sha256`` (and ``NUL target`` for a
    link). The lines cover two kinds of files: tracked files that git reports as changed or was configured not to check,
    and importable files that git does not track, including ignored ones. hpcenv's ``*.lock.toml`` files do not count,
    because they contain this digest. If git cannot answer, ``files`` has a digest of the same form over all importable
    files, tag ``hpcenv-files-v1``. Importable files of a tree have the endings that are listed below. They are below
    the folder of direct_url.json, in folders from which Python could import: the folder's name is an identifier, or the
    folder is on sys.path. Environments and run folders in the tree are left out, and links to folders are not followed.
    If a dist has no RECORD, but another list names its files (dpkg's list, or installed-files.txt), its ``digest-kind``
    is walk: tag ``hpcenv-walk-v1``, lines ``path NUL sha256``, over the listed files below the site directory, without
    ``*.pyc`` and the files that step 1 drops. This digest is both its record digest and its content digest.
    ``packages.unlisted-digest`` = "sha256:" + the same construction with the tag ``hpcenv-unlisted-v1`` and lines
    ``path NUL sha256``. This digest covers the importable files below the site directories, if no RECORD that counts in
    the env-digest lists them. Importable files are ``.py .pth .so .so.* .pyd``, and each ``.pyc`` outside of
    ``__pycache__`` without its source. So the env-digest or the unlisted-digest covers every importable file. The only
    exception is the two files that virtualenv and uv put into each environment (LAUNCHERS), if their content is known.
    Since revision 2 of the lockfile (rules.py), the unlisted-digest also covers device code, entry_points.txt, files
    that a RECORD lists without a hash, and modules behind links that lead out of the environment. Since then, the
    unlisted-digest does not cover leftovers of editors and archive programs, because Python cannot import them.
    ``programs`` of a dist (bare hex, ``none`` without programs): tag ``hpcenv-programs-v1``, lines ``name NUL sha256``
    over the files of the dropped ``bin/...`` rows. Each file is hashed without the line that names the environment's
    Python. The launcher of an entry point is left out if an installer writes this launcher for the dist's own
    entry_points.txt. For the launcher of another function, the line has ``entry-point MODULE:FUNCTION`` instead of the
    hash.
    ``python.stdlib-sha256`` (bare hex): tag ``hpcenv-stdlib-v1``, lines ``path NUL sha256``. It covers the ``*.py``,
    the ``*.so`` and each ``*.pyc`` without a source, in the standard library and in lib-dynload. It also covers
    pythonXY.zip (a file, or a folder with such files). It does not cover site-packages, tests and config-*. Linked
    folders are followed.
    ``system.packages-digest``: "sha256:" + tag ``hpcenv-system-packages-v1``, lines ``name TAB version TAB arch``.
    ``packages.conda-digest``: the same with the tag ``hpcenv-conda-v1`` and lines
    ``name NUL version NUL build NUL algorithm=hash NUL channel``, over the records in conda-meta.
    ``packages.conda-content-digest``: "sha256:" + tag ``hpcenv-conda-content-v1``, lines ``path NUL sha256`` over the
    files in the ``paths_data`` of conda-meta that no RECORD lists, without ``*.pyc``. A link has ``link TARGET``
    instead of the hash. If conda wrote the prefix into a file, the prefix is replaced by the placeholder of the package
    before the file is hashed.
    ``torch.config-digest`` (bare hex): sha256 of torch.__config__.show() without the line that names the CPU in use.

What the probe does not read
    Some folders on sys.path are outside of the prefix, and are not named site-packages or dist-packages. They come from
    PYTHONPATH, .pth lines or editable sources, and contain the user's code. ``python.sys-path`` names these folders,
    and their dists are listed, but the files in these folders are not read. Only the files of an editable install are
    read (see above).
    Behind a link that leads out of the environment, the probe reads only the files that a RECORD lists or that Python
    would import. There it follows no further link to a folder. ``linked-outside`` counts such files of a dist, and
    ``link`` names the target of an unlisted file. Compiled files are in ``__pycache__``, or below PYTHONPYCACHEPREFIX
    if this variable is set. Of these files, only the headers are read, at level full. So a .pyc that was forged to fit
    the time and size of its source is not noticed.

Paths are relative to the prefix, or start with ``{base-prefix}/`` or ``{user-base}/``, or are absolute.
"""
