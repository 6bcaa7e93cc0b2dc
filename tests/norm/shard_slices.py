"""The kernels of norms whose columns are spread over ranks, called for one rank after the other."""

from __future__ import annotations

import importlib
import inspect

import torch
from harness import assert_same_bits
from operators import (
    FUSED_ADD_LAYER_NORM,
    FUSED_ADD_RMS_NORM,
    FUSED_MUL_POLY_NORM,
    LAYER_NORM,
    POLY_NORM,
    RMS_NORM,
)

NORMS = (
    *(RMS_NORM, FUSED_ADD_RMS_NORM, LAYER_NORM, FUSED_ADD_LAYER_NORM),
    *(POLY_NORM, FUSED_MUL_POLY_NORM),
)
BACKWARD = {
    "rms_norm": "rms_norm_bwd",
    "fused_add_rms_norm": "rms_norm_bwd",
    "layer_norm": "layer_norm_bwd",
    "fused_add_layer_norm": "gate_residual_ada_norm_bwd",
    "poly_norm": "poly_norm_bwd",
    "fused_mul_poly_norm": "poly_norm_bwd",
}
LAYER_NORMS = (LAYER_NORM, FUSED_ADD_LAYER_NORM)
POLY_NORMS = (POLY_NORM, FUSED_MUL_POLY_NORM)


def module_of(fuselage):
    """What the rules for DTensors call. It is not loaded before the first DTensor."""
    return importlib.import_module(f"{fuselage.__name__}._shard_norm")


class Slices:
    """An operator on rows that are cut into `ranks` parts, as torch.chunk cuts them."""

    def __init__(self, fuselage, op, inputs: dict, options: dict, ranks: int):
        self.op, self.ranks, self.run = op, ranks, module_of(fuselage).RUN
        self.ops = fuselage.norm.ops
        function = inspect.signature(getattr(fuselage, op.name)).parameters
        defaults = {n: p.default for n, p in function.items() if p.default is not p.empty}
        self.arguments = {"mul": None, "bias": None, **defaults, **options, **inputs}
        self.dim = inputs["x"].shape[-1]
        self.each = -(-self.dim // ranks)

    def cut(self, t, rank: int):
        """The columns of a rank, of what has them: views, which start anywhere."""
        columns = isinstance(t, torch.Tensor) and t.shape[-1] == self.dim
        if columns and not (t.dim() == 1 and self.op in POLY_NORMS):
            return t[..., rank * self.each : (rank + 1) * self.each]
        return t

    def both_steps(self, name: str, arguments: dict) -> list[tuple]:
        """What every rank returns."""
        of_ranks, given = [], []
        for rank in range(self.ranks):
            of_ranks.append({n: self.cut(t, rank) for n, t in arguments.items()})

        def keep(sums):
            given.append(sums)
            return sums.new_zeros((self.ranks, *sums.shape))

        for a in of_ranks:
            self.run[name](a, self.dim, keep)
        gathered = torch.stack(given)
        return [self.run[name](a, self.dim, lambda _: gathered) for a in of_ranks]

    def forward(self) -> tuple[dict, torch.Tensor]:
        """The outputs, and the statistics, which all ranks have alike."""
        found = self.both_steps(f"{self.op.name}_fwd", self.arguments)
        statistics = [t[-1] for t in found if t[0].shape[-1] > 0]
        for other in statistics:
            assert_same_bits(other, statistics[0], "statistics")
        outputs = zip(self.op.outputs, zip(*found, strict=True), strict=False)
        return {n: torch.cat(parts, -1) for n, parts in outputs}, statistics[0]

    def backward(self, outputs: dict, statistics: torch.Tensor, grad_outs: dict) -> dict:
        """The gradients of the inputs."""
        s = outputs.get("new_residual", self.arguments["x"])
        a = dict.fromkeys(("gate", "scale", "shift")) | self.arguments
        a |= {"grad_out": grad_outs["out"], "grad_new_residual": grad_outs.get("new_residual")}
        a |= {"x": s, "new_residual": s, "rstd": statistics, "statistics": statistics}
        a |= {f"needs_grad_{n}": a[n] is not None for n in ("x", "mul", "weight", "bias")}
        a["needs_grad_residual"] = True
        name = BACKWARD[self.op.name]
        schema = getattr(self.ops, name).default._schema
        found = zip(*self.both_steps(name, a), strict=True)
        grads = dict(zip((r.name for r in schema.returns), found, strict=True))
        results = {}
        for n in self.op.differentiable(self.arguments):
            if n in self.op.row_inputs and "new_residual" in outputs:
                key = "grad_x" if "grad_x" in grads and name == "rms_norm_bwd" else "grad_residual"
            else:
                key = f"grad_{n}"
            parts = grads[key]
            own = n not in self.op.row_inputs and self.op in POLY_NORMS
            results[n] = torch.stack(parts).float().sum(0) if own else torch.cat(parts, -1)
            results[n] = results[n].to(self.arguments[n].dtype)
        return results
