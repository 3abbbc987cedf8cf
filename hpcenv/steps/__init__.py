"""The steps that the batch script calls, and the entry of the code that travels with a run.

Runs on: COMPUTE NODE (on this machine with `--cluster local`). Nodes read the manifest, never the lockfile. The batch
script starts each step as `python3 -I RUN/code/step.py STEP RUN`, from a copy of this code in the run folder. So an
upgrade of hpcenv does not change a job that waits in the queue, and the nodes need no installation of hpcenv.
"""
