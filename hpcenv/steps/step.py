"""Entry of the node code: `python3 -I RUN/code/step.py STEP RUN ...`.

Runs on: COMPUTE NODE. Copied to the top of the run folder's code. `-I` keeps the user's PYTHONPATH and ~/.local out of
hpcenv's own steps. In a run folder, only the archive beside this file is added to the path. In an exported folder, only
the package beside this file is added (submission/node_code.py).
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(sys.path[0], "hpcenv.zip"))

from hpcenv.steps.main import main

sys.exit(main(sys.argv[1:]))
