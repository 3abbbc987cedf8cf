"""Code that Python runs at the start of every rank, before the script: determinism switches, and training records.

Runs on: every rank and the processes that it starts, inside the image. Standard library only; torch is never imported
here, only used after the script has imported it. Python 3.8 to 3.14, torch 2.0 and newer.

This folder travels with the run as the package `_hpcenv_start_hook`, beside `sitecustomize.py`, which Python imports by
itself when its folder is on PYTHONPATH (library/site.html). `hpcenv.training` uses the same modules.
"""
