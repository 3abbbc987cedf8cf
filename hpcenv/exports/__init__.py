"""The same training outside Slurm: files for another engine. The check runs before the training.

Runs on: LOGIN NODE. `training.py` decides what runs, a module of `formats/` renders it for one engine, and `export.py`
writes it. No engine is started.
"""
