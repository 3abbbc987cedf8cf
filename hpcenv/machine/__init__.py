"""Properties of this machine: host, GPUs, CPUs, limits, and the job step that runs here.

Runs on: COMPUTE NODE (with `doctor` also elsewhere). Standard library, and pynvml if it is installed.
"""
