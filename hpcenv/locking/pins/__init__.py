"""Read the pins of other tools, and compare them with the installed packages. This is for `hpcenv lock --from FILE`.

Each format has one file in this folder, and one row in the table of `formats.py`.
"""
