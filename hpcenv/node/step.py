"""Entry of the node code: `python3 -I RUN/code/step.py STEP RUN ...`.

Runs on: COMPUTE NODE. Copied to the top of the run folder's code. `-I` keeps the user's
PYTHONPATH and ~/.local out of hpcenv's own steps; the copy beside this file is all that
is added to the path.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from hpcenv.node.main import main

sys.exit(main(sys.argv[1:]))
