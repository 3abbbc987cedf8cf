"""Read the pins of other tools, and compare them with the installed packages. For `hpcenv lock --from FILE`.

One file per format, one row per format in the table of `formats.py`.
"""
