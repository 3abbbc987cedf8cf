"""What runs on compute nodes, outside the container: check, decide, launch.

Runs on: COMPUTE NODE (and on this machine for `--cluster local`). Standard library plus
pynvml where it is installed; nodes read the manifest, never the lockfile.

The batch script starts each step as `python3 -I RUN/code/step.py STEP RUN` from a
copy of this code in the run folder: an upgrade of hpcenv while a job waits in the queue
changes nothing for it, and the nodes need no installation.
"""
