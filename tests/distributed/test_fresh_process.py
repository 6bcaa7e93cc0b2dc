"""What loads the rules for DTensors, and where: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import kernel_backend

LOADS = """
import sys, torch
from kernels import get_kernel
fuselage = get_kernel("fuselage-kernels/fuselage", version=1, backend=BACKEND)
fuselage.rms_norm(torch.ones(2, 8, requires_grad=True)).sum().backward()
for wrong in ("x", [1.0]):
    try:
        fuselage.rms_norm(wrong)
    except TypeError:
        pass
loaded = [name for name in sys.modules if name.endswith("._dtensor")]
assert not loaded, loaded
assert "torch.distributed.tensor.parallel" not in sys.modules
"""


# Where the first DTensor comes in a traced program, of sizes known only when it runs.
COMPILES = """
import torch
from kernels import get_kernel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
fuselage = get_kernel("fuselage-kernels/fuselage", version=1, backend=BACKEND)
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
weight = distribute_tensor(torch.randn(16), mesh, [Replicate()]).requires_grad_()
graph = torch.compile(fuselage.rms_norm, fullgraph=True, dynamic=True, backend="aot_eager")
for batch in (2, 3, 5):
    x = distribute_tensor(torch.randn(batch, 4, 16), mesh, [Shard(1)])
    out = graph(x, weight)
    assert out.placements == (Shard(1),)
    assert out.full_tensor().equal(fuselage.rms_norm(x.full_tensor(), weight.full_tensor()))
    out.sum().backward()
    assert weight.grad.placements == (Partial(),)
torch.distributed.destroy_process_group()
"""


# A copy with another id, as another version of the kernel has one.
VERSIONS = """
import importlib.util, shutil, sys, tempfile, torch
from pathlib import Path
from kernels import get_kernel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
fuselage = get_kernel("fuselage-kernels/fuselage", version=1, backend=BACKEND)
old = fuselage._ops.add_op_namespace_prefix("").removesuffix("::")
new = old[:-1] + ("1" if old[-1] == "0" else "0")
folder = Path(tempfile.mkdtemp()) / "other"
shutil.copytree(Path(fuselage.__file__).parent, folder)
(library,) = folder.glob("*.so")
changed = library.with_name(library.name.replace(old, new))
changed.write_bytes(library.read_bytes().replace(old.encode(), new.encode()))
source = (folder / "_ops.py").read_text().replace(old, new)
load = f"torch.ops.load_library({str(changed)!r})"  # the symbol for `import` is not found any more
(folder / "_ops.py").write_text(source.replace(f"from . import {new}", load))
spec = importlib.util.spec_from_file_location("other", folder / "__init__.py")
sys.modules["other"] = other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.randn(3, 4, 16), mesh, [Shard(1)])
for version in (other, fuselage, other):
    weight = distribute_tensor(torch.ones(16), mesh, [Replicate()]).requires_grad_()
    out = version.rms_norm(x, weight)
    out.sum().backward()
    assert out.placements == (Shard(1),) and weight.grad.placements == (Partial(),)
    assert out.full_tensor().equal(fuselage.rms_norm(x.full_tensor()))
for version, namespace in ((fuselage, old), (other, new)):
    plans = sys.modules[f"{version.__name__}._dtensor_rules"]._plans
    assert {layout[0].namespace for layout in plans} == {namespace}
torch.distributed.destroy_process_group()
shutil.rmtree(folder.parent)
"""


PROGRAMS = {"no_dtensors": LOADS, "compiled_first": COMPILES, "two_versions": VERSIONS}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.slow
def test_a_fresh_process(program):
    """Without DTensors it loads no rules, and each version of the kernel has its own."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    program = program.replace("BACKEND", repr(kernel_backend()))
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
