"""Starting a program in the locked environment: Apptainer's command line, what the site adds, and the start gate.

Runs on: COMPUTE NODE, and LOGIN NODE for `run` and `lock`. Standard library only.
"""
