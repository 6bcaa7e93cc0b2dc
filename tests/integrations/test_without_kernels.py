"""The package where `kernels` is not installed: Python, Torch and itself are all that it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import importlib.util, sys
sys.modules["kernels"] = None  # an import of it raises ImportError

folder = {folder!r}
spec = importlib.util.spec_from_file_location(
    "kernel_under_test", folder + "/__init__.py", submodule_search_locations=[folder]
)
fuselage = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fuselage
spec.loader.exec_module(fuselage)

import torch
assert all(hasattr(fuselage, name) for name in fuselage.__all__)
model = torch.nn.Sequential(torch.nn.RMSNorm(8))
x = torch.randn(2, 8)
expected = model(x)
for integration in (fuselage.integrations.transformers, fuselage.integrations.diffusers):
    assert integration.patch(model).replaced
    torch.testing.assert_close(model(x), expected)
    assert integration.unpatch(model) == 1
try:
    fuselage.integrations.transformers.kernel_mapping()
except ImportError as error:
    print(error)
"""


@pytest.mark.long
def test_all_but_the_mapping_works(fuselage):
    code = CODE.format(folder=str(Path(fuselage.__file__).parent))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    message = "fuselage: kernel_mapping needs the package `kernels`: pip install kernels"
    assert result.stdout.strip() == message
