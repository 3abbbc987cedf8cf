"""What other tools pinned, and how it compares with what is installed. For `hpcenv lock --from FILE`.

One file per format, one row per format in the table of `formats.py`.
"""
