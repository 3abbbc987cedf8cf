"""Export a training for an engine that is not Slurm, as a folder of files. The check also runs first on such an engine.

Runs on: LOGIN NODE. `training.py` decides what runs, a module of `formats/` renders the files for one engine, and
`export.py` writes them. No engine is started.
"""
