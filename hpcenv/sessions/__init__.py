"""Sessions: a shell, ssh and web pages in the environment of a run, through steps of its job.

Runs on: COMPUTE NODE. `ssh.py`, `folders.py` and `tools.py` also run on the login node. Standard library only.
"""
