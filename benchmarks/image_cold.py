"""An image becomes a SIF, nothing cached: `hpcenv image pull` beside `apptainer build` as it comes.

    python -m benchmarks.image_cold [--json] [--image REF] [--folder DIR] [--rounds N]

Needs Apptainer and the registry. Both fetch from the registry and write below the same folder; the peer
compresses with gzip -9 and unpacks below the same folder. Must: at most 0.15 of the peer's wall time, at most
768 MiB for all processes.
"""

from __future__ import annotations

import sys

from benchmarks import _image

NEEDS = ("login node",)

if __name__ == "__main__":
    sys.exit(_image.cold("image_cold", __doc__, tuned=False, must=0.15))
