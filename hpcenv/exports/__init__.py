"""Export a training for an engine that is not Slurm, as a folder of files. On the engine, the check also runs first.

Runs on: LOGIN NODE. `training.py` decides what runs, a module of `formats/` renders the files for one engine, and
`export.py` writes them. No engine is started.
"""
