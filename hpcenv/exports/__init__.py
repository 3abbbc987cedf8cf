"""The same training outside Slurm: files for another engine, with the check in front of the training.

Runs on: LOGIN NODE. `export.py` decides what runs (`training.py`) and writes it; a module of `formats/` renders it for one
engine. No engine is started.
"""
