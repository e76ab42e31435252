"""Makes `import cute_kernels` mean the Python package where a checkout's root comes first on the module path.

Beside this file lies the C++ library; the package lies in python/cute_kernels. Without this file Python would take the
C++ folder for a package without content. What is imported is the package further down the path, such as an installed
wheel, as it would be from any other folder; where there is none, the checkout's own, which says what to do if it is
not built.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_own = str(Path(__file__).resolve().parents[1] / "python")
_others = [entry for entry in sys.path if not Path(entry, "cute_kernels", "bindings").is_dir()]  # the library's folder
_spec = PathFinder.find_spec(__name__, [*_others, _own])
if _spec is None or _spec.origin is None:
    raise ModuleNotFoundError(f"cute_kernels: there is no Python package in {_own}: the checkout is incomplete")
sys.modules[__name__] = module_from_spec(_spec)  # which is what the import statement gives
_spec.loader.exec_module(sys.modules[__name__])
