"""What this machine is: host, GPUs, CPUs, limits, and which step of which job runs here.

Runs on: COMPUTE NODE (with `doctor` also elsewhere). Standard library, and pynvml if it is installed.
"""
