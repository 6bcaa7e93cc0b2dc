"""Which variant of a release serves whom, as `kernels` itself resolves it: docs/variants.md."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builder.archs import release_archs
from builder.config import BuildConfig, load

REPO_DIR = Path(__file__).resolve().parent.parent
# What kernel-builder at the revision of flake.lock builds for: CUDA as the newest Torch has it, and
# Linux alone, for which there are sources here.
TAGS = {"cpu": ("cpu",), "cuda": ("cu126", "cu130", "cu132"), "rocm": ("rocm71", "rocm72")}
MACHINES = ("x86_64", "aarch64")
# Users: of these Torch versions, built for these backends, with these GPUs.
TORCH = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
BACKENDS = ("cpu", "cu126", "cu128", "cu129", "cu130", "cu131", "cu132", "cu133", "rocm71")
GPUS = {
    "7.5": "T4, RTX 20",
    "8.0": "A100",
    "8.6": "A10, RTX 30",
    "8.7": "Orin",
    "8.9": "L4, RTX 40",
    "9.0": "H100, H200, GH200",
    "10.0": "B200, GB200",
    "10.3": "B300, GB300",
    "11.0": "Thor",
    "12.0": "RTX 50, RTX PRO 6000",
    "12.1": "GB10",
}
GENERATED = "<!-- `make docs` writes this page. Do not edit it. -->"


@dataclass(frozen=True)
class Resolved:
    """The variant that `kernels` takes, and why it refuses each other one."""

    variant: str | None
    refused: dict[str, str]


def released(config: BuildConfig) -> list[str]:
    """The names of all variants of a release."""
    from kernels._rust import Build

    names = []
    for backend in (str(each).lower() for each in Build.open(config.root).general.backends):
        major, minor = config.abi_version(backend)
        machines = MACHINES if backend != "rocm" else MACHINES[:1]
        names += [
            f"torch-stable-abi{major}{minor}-{tag}-{machine}-linux"
            for tag in TAGS[backend]
            for machine in machines
        ]
    return names


def resolve(names: list[str], torch: str, backend: str, machine: str) -> Resolved:
    """What `kernels` does on a Linux machine with that Torch."""
    from kernels import variants
    from kernels.backends import parse_backend
    from packaging.version import Version

    accepted, trace = variants._resolve_variant_for_system(
        variants=[variants.parse_variant(name) for name in names],
        selected_backend=parse_backend(backend),
        cpu=machine,
        os="linux",
        torch_version=Version(torch),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    taken = accepted[0].variant_str if accepted else None
    refused = {
        decision.variant.variant_str: getattr(decision, "reason", "another one is preferred")
        for decision in trace
        if decision.variant.variant_str != taken
    }
    return Resolved(taken, refused)


def gpu_code(archs: list[str], capability: str) -> str:
    """What a GPU of that compute capability runs of these architectures."""
    from kernels.archs import _cuda_arch_supports

    wanted = tuple(map(int, capability.split(".")))
    plain = [arch.removesuffix("+PTX") for arch in archs]
    if any(_cuda_arch_supports(arch, wanted) for arch in plain):
        return "machine code"
    return "PTX" if any(_cuda_arch_supports(arch, wanted) for arch in archs) else "refused"


def short(variant: str | None) -> str:
    """`cu130`, as the tables name a variant."""
    return f"`{variant.split('-')[3]}`" if variant else "refused"


def span(versions: list[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


def backend_name(tag: str) -> str:
    """`CUDA 12.6` for `cu126`."""
    if tag == "cpu":
        return "CPU"
    kind, digits = ("ROCm", tag[4:]) if tag.startswith("rocm") else ("CUDA", tag[2:])
    return f"{kind} {digits[:-1]}.{digits[-1]}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


PAGE = """\
# Variants

{generated}

A release has one binary for each backend and processor. Each serves PyTorch 2.10 and every later
release: it uses nothing but PyTorch's stable ABI.

{names}

ROCm is not released yet: [platforms.md](platforms.md) says why.

## Which one is loaded

By the backend and version that PyTorch was built for, as `kernels` resolves it on Linux. Of CUDA a
variant of the same major version that is not newer serves.

{taken}

## Which GPUs it has code for

Machine code runs as it is. PTX is compiled by the driver when a kernel is first used, and kept in
its cache. For a GPU that neither serves, `kernels` refuses to load the variant.

{gpus}

## Why others are refused

With PyTorch 2.13 for CUDA 12.8 on x86-64, `kernels` takes `{example}`,
and says of the others:

{refused}
"""


def page() -> str:
    """The text of docs/variants.md."""
    config = load(REPO_DIR)
    names = released(config)
    example = resolve(names, "2.13", "cu128", "x86_64")
    reasons = sorted(example.refused.items())
    return PAGE.format(
        generated=GENERATED,
        names="\n".join(f"- `{name}`" for name in names),
        taken=table(["PyTorch for", "PyTorch", "x86-64", "aarch64"], users_served(names)),
        gpus=gpu_table(config),
        example=example.variant,
        refused=table(["variant", "reason"], [[f"`{name}`", why] for name, why in reasons]),
    )


def users_served(names: list[str]) -> list[list[str]]:
    """A row for each backend and the PyTorch versions that get the same of it."""
    rows = []
    for backend in BACKENDS:
        answers = [
            (torch, [resolve(names, torch, backend, machine).variant for machine in MACHINES])
            for torch in TORCH
        ]
        for answer, group in groupby(answers, key=lambda item: item[1]):
            versions = span([torch for torch, _ in group])
            rows.append([backend_name(backend), versions, *map(short, answer)])
    return rows


def gpu_table(config: BuildConfig) -> str:
    """What each GPU runs of each CUDA variant."""
    archs = {tag: release_archs(config, (int(tag[2:4]), int(tag[4:]))) for tag in TAGS["cuda"]}
    rows = [
        [capability, gpus, *(gpu_code(archs[tag], capability) for tag in archs)]
        for capability, gpus in GPUS.items()
    ]
    return table(["compute capability", "such as", *(f"`{tag}`" for tag in archs)], rows)
