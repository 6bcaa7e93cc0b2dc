#!/usr/bin/env python3
"""Measures launch policies on this GPU and writes torch-ext/fuselage/tuning/<gpu>.json.

Tries each value of each parameter of kernel_src/common/tuning.h on a few shapes: with a cold L2,
in turn with the value that is in use, as benchmarks/roofline does. A value is taken if it wins 2%
in the geometric mean, loses 2% on no shape, does both again when it is measured anew, and leaves
every bit of every result the same. docs/tuning.md. Takes two minutes at most.

    python tools/tune.py                             # build the variant first: make build
    python tools/tune.py --only rotary_threads --output /tmp/tuning
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

REPO_DIR = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO_DIR)]

import torch  # noqa: E402

from benchmarks.roofline import results  # noqa: E402
from benchmarks.roofline.contenders import load_fuselage  # noqa: E402
from benchmarks.roofline.measure import Timer, make_set, on_set  # noqa: E402
from benchmarks.roofline.registry import Case, Shape, operators  # noqa: E402
from benchmarks.roofline.timing import in_turn  # noqa: E402

SCHEMA = json.loads((REPO_DIR / "tools/tuning_schema.json").read_text("utf-8"))
TUNABLES = SCHEMA["properties"]["parameters"]["properties"]
FOLDER = REPO_DIR / "torch-ext/fuselage/tuning"
WIN = 0.02  # of the time, that a value must save in the geometric mean
LOSS = 0.02  # that it may cost on no shape
TURNS = 3  # a round, of each contender
METHOD = (
    "cold L2, CUDA graphs replayed in turn, medians (benchmarks/roofline); a value is taken that "
    f"saves {WIN:.0%} in the geometric mean, twice, and costs {LOSS:.0%} on no shape"
)
Parameters = dict[str, int]  # those that are not as built in


@dataclass(frozen=True)
class Family:
    """Parameters of one kernel, and shapes that they are tried on."""

    parameters: tuple[str, ...]
    cases: tuple[tuple, ...]  # operator of benchmarks/roofline, direction, sizes


# Shapes of models, and some on both sides of where a parameter decides.
FAMILIES = {
    "norms": Family(
        ("norm_resident_threads", "norm_wide_waves"),
        (
            ("rms_norm", "fwd", (128, 4096)),
            ("rms_norm", "fwd", (1024, 2048)),
            ("rms_norm", "fwd", (2048, 4096)),
            ("fused_add_rms_norm", "fwd", (1024, 2048)),
            ("layer_norm", "fwd", (1024, 2048)),
            ("ada_layer_norm", "fwd", (2, 77, 2048)),
            ("ada_layer_norm", "fwd", (2, 4992, 2048)),
            ("ada_layer_norm", "fwd", (1, 32760, 1536)),
        ),
    ),
    "activations": Family(
        ("activation_threads", "activation_full_blocks"),
        (
            ("swiglu", "fwd", (128, 4096)),
            ("swiglu", "fwd", (1024, 4096)),
            ("swiglu", "fwd", (4096, 11008)),
            ("swiglu", "bwd", (1024, 4096)),
            ("swiglu", "bwd", (4096, 11008)),
            ("bias_act", "fwd", (16384, 4096)),
            ("silu", "fwd", (65536, 688)),
        ),
    ),
    "apply_rotary": Family(
        ("rotary_threads", "rotary_resident_threads"),
        (
            ("apply_rotary", "fwd", (64, 1, 32, 8, 128)),
            ("apply_rotary", "fwd", (1, 512, 32, 8, 128)),
            ("apply_rotary", "fwd", (4, 4096, 32, 8, 128)),
            ("apply_rotary", "fwd", (2, 4096, 64, 8, 128)),
            ("apply_rotary", "fwd", (8, 4096, 16, 16, 64)),
            ("apply_rotary interleaved", "fwd", (1, 4608, 24, 24, 128)),
        ),
    ),
    "qk_norm_rotary": Family(
        ("qk_norm_turns",),
        (
            ("qk_norm_rotary", "fwd", (1, 512, 32, 8, 128)),
            ("qk_norm_rotary", "fwd", (4, 4096, 32, 8, 128)),
            ("qk_norm_rotary", "fwd", (2, 4096, 64, 8, 128)),
            ("qk_norm_rotary", "fwd", (8, 4096, 16, 16, 64)),
        ),
    ),
    "gumbel_sample": Family(
        ("sample_turns",),
        (
            ("gumbel_sample", "fwd", (1, 151936)),
            ("gumbel_sample", "fwd", (64, 151936)),
            ("gumbel_sample", "fwd", (256, 151936)),
            ("gumbel_sample", "fwd", (64, 50257)),
            ("gumbel_sample", "fwd", (256, 32000)),
        ),
    ),
}


class ChangedBits(Exception):
    """A value changed a result: it must be no parameter."""


def cases_of(family: Family) -> list[Case]:
    """The family's cases, in bfloat16."""
    named = {operator.name: operator for operator in operators()}
    return [
        Case(named[name], direction, Shape(sizes, torch.bfloat16, frozenset()))
        for name, direction, sizes in family.cases
    ]


class Gpu:
    """Times cases under several policies, in turn, in this process."""

    def __init__(self, fuselage: ModuleType, folder: Path, timer: Timer, device: str = "cuda"):
        self.fuselage, self.timer, self.device = fuselage, timer, device
        self.file = folder / f"{results.slug(device)}.json"
        os.environ["FUSELAGE_TUNING_DIR"] = str(folder)

    def use(self, parameters: Parameters) -> None:
        """Lets the library read these, as it would a user's file."""
        document = {"schema": 1, "gpu": results.device_name(self.device), "measured": {}}
        self.file.write_text(json.dumps({**document, "parameters": parameters}))
        ops = sys.modules[f"{self.fuselage.__name__}._ops"].ops
        line = ops.read_tuning(torch.empty(0, device=self.device))
        missing = [f"{k}={v}" for k, v in parameters.items() if v != TUNABLES[k]["default"]]
        if str(self.file) not in line or not all(text in line for text in missing):
            raise RuntimeError(f"the library did not take {parameters}: {line}")

    def times(self, case: Case, choices: Sequence[Parameters]) -> list[float]:
        """Microseconds of the case under each; raises ChangedBits."""
        self.timer.prepare(case)
        torch.manual_seed(20261121)
        sets = [make_set(case, self.device) for _ in range(self.timer.sets(case))]
        first, ready = None, {}
        for number, choice in enumerate(choices):
            self.use(choice)
            # Made anew, for one that counts its steps.
            call = on_set(case, case.operator.contenders(self.fuselage)["fuselage"](), sets, False)
            bits = [t.contiguous().view(torch.uint8).clone() for t in call(0)]
            first = first or bits
            if not all(map(torch.equal, bits, first)):
                raise ChangedBits(f"{case.key}: other bits with {choice} than with {choices[0]}")
            ready[str(number)] = self.timer.contender(case, call, checked=False)
        times = in_turn(ready, TURNS)
        ready.clear()
        self.timer.release()
        return [times[str(number)]["us"] for number in range(len(choices))]


Measure = Callable[[Case, Sequence[Parameters]], list[float]]


@dataclass
class Outcome:
    """What was chosen, and what was measured of it."""

    parameters: Parameters = field(default_factory=dict)
    tried: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    shapes: dict[str, dict[str, float]] = field(default_factory=dict)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def wins(ratios: Sequence[float]) -> bool:
    """Whether times, over those of the value in use, are less by more than noise."""
    return geometric_mean(ratios) <= 1 - WIN and max(ratios) <= 1 + LOSS


def ratios_of(measure: Measure, cases: Sequence[Case], choices: Sequence[Parameters]):
    """For each choice its times over those of the first, a case each."""
    times = [measure(case, choices) for case in cases]
    return [[of_case[i] / of_case[0] for of_case in times] for i in range(len(choices))]


def tune_parameter(
    name: str, measure: Measure, cases: Sequence[Case], outcome: Outcome, log: Callable
) -> None:
    """Puts the best value into the outcome, if it wins twice."""
    default, used = TUNABLES[name]["default"], outcome.parameters
    others = [value for value in TUNABLES[name]["enum"] if value != default]
    choices = [{**used, name: value} for value in (default, *others)]
    ratios = dict(zip(others, ratios_of(measure, cases, choices)[1:], strict=True))
    outcome.tried[name] = {
        str(value): {"mean": round(geometric_mean(its), 4), "worst": round(max(its), 4)}
        for value, its in ratios.items()
    }
    best = min(others, key=lambda value: (not wins(ratios[value]), geometric_mean(ratios[value])))
    taken = wins(ratios[best]) and wins(
        ratios_of(measure, cases, [choices[0], {**used, name: best}])[1]
    )
    if taken:
        used[name] = best
    for value in others:
        its = outcome.tried[name][str(value)]
        mark = "taken" if taken and value == best else ""
        label = f"{name}={value}, not {default}:"
        log(f"{label:<40} {its['mean']:.3f} of the time, worst {its['worst']:.3f}  {mark}".rstrip())


def tune(families: dict[str, Family], only: Sequence[str], measure: Measure, log=print) -> Outcome:
    """Tunes one parameter after the other; later ones with those before them."""
    outcome = Outcome()
    for family in families.values():
        wanted = [name for name in family.parameters if name in only]
        cases = cases_of(family) if wanted else []
        for name in wanted:
            tune_parameter(name, measure, cases, outcome, log)
        own = {k: v for k, v in outcome.parameters.items() if k in wanted}
        if not own:
            continue
        shapes = {}
        for case in cases:
            built_in, tuned = measure(case, [{}, own])
            shapes[case.key] = {"built_in_us": round(built_in, 3), "tuned_us": round(tuned, 3)}
            log(f"  {case.key:<50} {built_in:8.2f} us, tuned {tuned:8.2f}")
        if not wins([us["tuned_us"] / us["built_in_us"] for us in shapes.values()]):
            log(f"  together they do not win: {', '.join(own)} as built in")
            for name in own:
                del outcome.parameters[name]
            continue
        outcome.shapes.update(shapes)
    return outcome


def document_of(outcome: Outcome, gpu: str, versions: dict, origin: dict) -> dict:
    """The file."""
    return {
        "schema": SCHEMA["properties"]["schema"]["const"],
        "gpu": gpu,
        "parameters": outcome.parameters,
        "measured": {
            "by": "tools/tune.py",
            **{key: origin[key] for key in ("date", "commit", "kernel")},
            "versions": {key: versions[key] for key in ("torch", "cuda") if versions[key]},
            "method": METHOD,
            "parameters": outcome.tried,
            "shapes": outcome.shapes,
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Tunes this GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder of the file")
    parser.add_argument("--only", nargs="+", choices=[*TUNABLES], default=[*TUNABLES])
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: PyTorch sees no GPU", file=sys.stderr)
        return 1
    from benchmarks.roofline.cuda_timing import CudaTimer

    started = time.monotonic()
    fuselage = load_fuselage("cuda")
    origin = results.provenance(fuselage)
    with tempfile.TemporaryDirectory() as folder:
        gpu = Gpu(fuselage, Path(folder), CudaTimer(quick=False))
        outcome = tune(FAMILIES, options.only, gpu.times)
    name = results.device_name("cuda")
    document = document_of(outcome, name, results.environment("cuda"), origin)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{results.slug('cuda')}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    chosen = ", ".join(f"{k}={v}" for k, v in outcome.parameters.items()) or "as built in"
    print(f"{name}: {chosen}; {path} written in {time.monotonic() - started:.0f} s")
    if origin["dirty"]:
        print("warning: of a build of uncommitted sources: `make lint` refuses to ship it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
