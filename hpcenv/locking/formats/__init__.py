"""The export formats, one module each.

Runs on: LOGIN NODE. A module defines `EXPORTER` (see locking/exporter.py). `hpcenv export` finds it by itself.

What a format cannot hold is left out, with the reason in the text and in `left_out`. The same lockfile gives the same
bytes: an export contains no time, no path of a machine and no version of hpcenv.

A lockfile is untrusted input, and pip and conda obey the lines that are made of it. So a name, version, hash or URL
without the strict form of one is written only in a comment, as ASCII on one line (`plain_text`).
"""
