"""Integrations without the packages that they are for."""

from __future__ import annotations

import importlib
import sys

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed")


@pytest.mark.parametrize("package, module", [("kvpress", "kvpress"), ("lm_eval", "lm_eval")])
def test_a_package_that_is_not_installed(package, module, monkeypatch):
    name = f"cute_kernels.integrations.{module}"
    for loaded in [each for each in sys.modules if each.startswith(name)]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{name} needs {package} .*pip install 'cute-kernels\[{module}\]'"):
        importlib.import_module(name)
