"""What runs on compute nodes, outside the container: check, decide, launch.

Runs on: COMPUTE NODE (on this machine with `--cluster local`). Standard library, and pynvml if it
is installed. Nodes read the manifest, never the lockfile.

The batch script starts each step as `python3 -I RUN/code/step.py STEP RUN`, from a copy of this
code in the run folder. So an upgrade of hpcenv does not change a job that waits in the queue, and
the nodes need no installation of hpcenv.
"""
