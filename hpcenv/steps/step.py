"""Entry of the node code: `python3 -I RUN/code/step.py STEP RUN ...`.

Runs on: COMPUTE NODE. Copied to the top of the run folder's code. `-I` keeps the user's
PYTHONPATH and ~/.local out of hpcenv's own steps. Only the archive beside this file, or in an exported
folder the package beside it, is added to the path (submission/node_code.py).
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(sys.path[0], "hpcenv.zip"))

from hpcenv.steps.main import main

sys.exit(main(sys.argv[1:]))
