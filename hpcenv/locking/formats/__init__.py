"""The export formats, one module each.

Runs on: LOGIN NODE. A module defines `EXPORTER` (see locking/exporter.py). `hpcenv export` searches this folder for
modules, so no list of modules is needed.

If a format cannot express a package, the package is left out. The text and `left_out` give the reason. The same
lockfile always gives the same bytes, so an export contains no time, no path of a machine and no version of hpcenv.

A lockfile is untrusted input, and pip and conda obey the lines of an export. A name, version, hash or URL that does
not have its strict form is therefore written only in a comment, as ASCII on one line (`plain_text`).
"""
