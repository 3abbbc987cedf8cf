"""Code that Python runs at the start of every rank, before the script: determinism switches, and training records.

Runs on: every rank and the processes that it starts, inside the image. Standard library only: this code does not import
torch, and uses torch only after the script has imported it. Python 3.8 to 3.14, torch 2.0 and newer.

This folder is copied into the run folder as the package `_hpcenv_start_hook`, beside `sitecustomize.py`. Python imports
`sitecustomize.py` itself if the folder of this file is on PYTHONPATH (library/site.html). `hpcenv.training` uses the
same modules.
"""
