"""Start a program in the locked environment: Apptainer's command line, the site's settings, and the start gate.

Runs on: COMPUTE NODE, and LOGIN NODE for `run` and `lock`. Standard library only.
"""
