"""An image becomes a SIF, nothing cached: `hpcenv image pull` beside `apptainer build` tuned by hand.

    python -m benchmarks.image_cold_tuned [--json] [--image REF] [--folder DIR] [--rounds N]

Needs Apptainer and the registry. Both fetch from the registry and write below the same folder; the peer
compresses with zstd -3 and unpacks on tmpfs. Must: at most 0.5 of the peer's wall time, at most
768 MiB for all processes.
"""

from __future__ import annotations

import sys

from benchmarks import _image

NEEDS = ("login node",)

if __name__ == "__main__":
    sys.exit(_image.cold("image_cold_tuned", __doc__, tuned=True, must=0.5))
