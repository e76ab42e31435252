"""Measurements of cute_kernels: `python -m profiling.sweep`, `profiling.report`, `profiling.compare`, `profiling.ab`,
`profiling.decode_microbench`, `profiling.host_cost`; without a GPU `profiling.tile_model`, `profiling.sass`.

Run from the repository's root. Importing this package puts the checkout's python/ on the module path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_PACKAGE_FOLDER = ROOT / "python"
if (_PACKAGE_FOLDER / "cute_kernels").is_dir() and str(_PACKAGE_FOLDER) not in sys.path:
    sys.path.insert(0, str(_PACKAGE_FOLDER))

# Before torch starts OpenMP: its threads otherwise spin on for milliseconds after every CPU operation, on the cores on
# which the next measured call runs, be it ours or the peer's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
