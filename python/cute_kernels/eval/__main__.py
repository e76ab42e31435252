from __future__ import annotations

import sys

from cute_kernels.eval.command import main

if __name__ == "__main__":
    sys.exit(main())
