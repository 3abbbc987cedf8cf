"""The export formats, one module each.

Runs on: LOGIN NODE. A module defines `EXPORTER` (see locking/exporter.py). `hpcenv export` finds the module without a
list.

If a format cannot express a package, the package is left out, and the text and `left_out` give the reason. The same
lockfile gives the same bytes: an export contains no time, no path of a machine and no version of hpcenv.

A lockfile is untrusted input, and pip and conda obey the lines of an export. So a name, version, hash or URL that does
not have its strict form is written only in a comment, as ASCII on one line (`plain_text`).
"""
