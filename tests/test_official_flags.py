"""The local builder's flags against those of kernel-builder's CMake: what differs, and why.

What kernel-builder gives is recorded here as `ninja -t commands` prints it for a project generated
from build.toml at the revision of flake.lock, with Torch 2.13, in a Release build; without paths,
and without what names the target's own files.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from builder.compile import (
    Toolchain,
    flags_for_cuda,
    gencode_flags,
    link_flags,
    ninja_file,
    plan,
)
from builder.config import load
from builder.errors import BuildError
from builder.toolchain import Compiler, Cuda, Torch
from conftest import REPO_DIR

OPS = "_fuselage_cpu_0123456"
DEFINES = (
    f"-DPy_LIMITED_API=3 -DTORCH_EXTENSION_NAME={OPS} -DTORCH_TARGET_VERSION=0x20a000000000000 "
    f"-DUSE_C10D_GLOO -DUSE_DISTRIBUTED -DUSE_RPC -DUSE_TENSORPIPE -D{OPS}_EXPORTS"
)
OFFICIAL = {
    ("cpu", "cxx"): f"-DCPU_KERNEL {DEFINES} -O3 -DNDEBUG -std=gnu++20 -fPIC -fno-gnu-unique",
    ("cuda", "cxx"): (
        f"-DCUDA_KERNEL -DUSE_CUDA=1 {DEFINES} -O3 -DNDEBUG -std=gnu++20 -fPIC -fno-gnu-unique"
    ),
    ("cuda", "cuda"): (
        f"-DCUDA_KERNEL -DUSE_CUDA=1 {DEFINES} -O3 -DNDEBUG -std=c++20 -Xcompiler=-fPIC "
        "--expt-relaxed-constexpr -DENABLE_FP8 -forward-unknown-to-host-compiler -x cu"
    ),
}
OFFICIAL_LINK = {
    "cpu": "-fPIC -O3 -DNDEBUG -shared libtorch.so libc10.so libtorch_cpu.so",
    "cuda": (
        "-fPIC -O3 -DNDEBUG -shared libtorch.so libc10.so libtorch_cpu.so "
        "libcudart.so -lcudadevrt -lcudart_static -lrt -lpthread -ldl"
    ),
}

# None changes a result, a symbol that is exported, or a library that is linked.
NOT_GIVEN = {
    f"-DTORCH_EXTENSION_NAME={OPS}": "given to files that use it alone: fewer are rebuilt",
    f"-D{OPS}_EXPORTS": "CMake gives it for every library, and nothing reads it",
    "-DUSE_C10D_GLOO": "how Torch itself was built; no header of the stable ABI reads it",
    "-DUSE_DISTRIBUTED": "as -DUSE_C10D_GLOO",
    "-DUSE_RPC": "as -DUSE_C10D_GLOO",
    "-DUSE_TENSORPIPE": "as -DUSE_C10D_GLOO",
    "-forward-unknown-to-host-compiler": "no flag of ours is unknown to nvcc",
    "-x cu": "the suffix says it",
}
LINK_DIFFERENCES = {
    "-Wl,--no-as-needed": "there it is around each library of Torch",
    "-Wl,--discard-all": "names of local functions, which nothing reads: 1.4 of 41 MB",
}


def tools(folder: Path, torch: str = "2.13.0") -> Toolchain:
    (folder / "libcudart_static.a").touch()
    return Toolchain(
        Compiler("g++", ""),
        Torch(Path("/torch"), torch, None, None),
        Path("/python"),
        cuda=Cuda(Compiler("nvcc", ""), (13, 0), folder, "libcudart.so"),
    )


def options(text: str) -> set[str]:
    """The words of a command but paths to look in, with `-x cu` and its like as one word."""
    joined = re.sub(r"-(x|gencode|isystem) ", r"-\1=", text)
    words = {word.replace("-x=", "-x ") for word in shlex.split(joined)}
    return {word for word in words if not word.startswith(("-I", "-isystem", "-L", "-gencode"))}


@pytest.mark.parametrize(("backend", "rule"), OFFICIAL)
def test_what_compiles_differs_in_what_is_listed(backend: str, rule: str, tmp_path: Path):
    config = load(REPO_DIR)
    sections = config.for_backend(backend)
    own = {flag for section in sections for flag in section.cxx_flags}
    own |= {flag for s in sections for flag in flags_for_cuda(s.gpu_flags, (13, 0))}
    units = [u for u in plan(config, backend, tools(tmp_path), None, OPS) if u.rule == rule]
    assert units
    for unit in units:
        if unit.source == "glibc_shim.cpp":  # ours alone: for a glibc that is newer than 2.28
            continue
        local = options(shlex.join(unit.flags)) - own
        official = options(OFFICIAL[backend, rule]) - own
        assert local - official == set(), unit.source
        assert official - local <= {*NOT_GIVEN}, unit.source


def test_each_difference_is_one(tmp_path: Path):
    """None is listed that is gone."""
    differences = set()
    for backend, rule in OFFICIAL:
        for unit in plan(load(REPO_DIR), backend, tools(tmp_path), None, OPS):
            if unit.rule == rule and "norm" in unit.source:
                differences |= options(OFFICIAL[backend, rule]) - options(shlex.join(unit.flags))
    assert differences == {*NOT_GIVEN}


def test_sources_of_gpus_are_compiled_for_amds():
    """With flags of their own: those of nvcc are not even asked for."""
    hip = Toolchain(
        Compiler("g++", ""),
        Torch(Path("/torch"), "2.13.0", None, "7.1"),
        Path("/python"),
        hip=Compiler("hipcc", ""),
    )
    units = [u for u in plan(load(REPO_DIR), "rocm", hip, None, OPS) if u.source.endswith(".cu")]
    assert units
    for unit in units:
        archs = [flag for flag in unit.flags if flag.startswith("--offload-arch")]
        assert unit.rule == "hip" and archs == ["--offload-arch=gfx90a", "--offload-arch=gfx942"]
        assert "-x hip" in " ".join(unit.flags) and "-gencode" not in unit.flags


@pytest.mark.parametrize("backend", OFFICIAL_LINK)
def test_what_links_is_the_same_in_the_same_order(backend: str, tmp_path: Path):
    units = plan(load(REPO_DIR), backend, tools(tmp_path), None, OPS)
    ninja = ninja_file(units, tools(tmp_path), backend, "library.so", 1)
    (command,) = re.findall(r"g\+\+ (.*-shared) \$in -o \$out \$flags", ninja)
    words = [*command.split(), *link_flags(tools(tmp_path), backend)]
    assert {word for word in words if word.startswith("-Wl")} == {*LINK_DIFFERENCES}
    libraries = {"-ltorch": "libtorch.so", "-lc10": "libc10.so", "-ltorch_cpu": "libtorch_cpu.so"}
    libraries["-l:libcudart.so"] = "libcudart.so"
    ours_alone = {word for word in words if word.startswith("-L")} | {*LINK_DIFFERENCES}
    named = [libraries.get(word, word) for word in words if word not in ours_alone]
    assert named == OFFICIAL_LINK[backend].split()


def test_gpu_code_is_that_of_a_release_where_it_is_asked_for(tmp_path: Path):
    """Otherwise PTX is shared, which halves the time, and is not kept: docs/design-decisions.md."""
    archs = ["7.5", "8.0", "8.6", "9.0+PTX", "10.0", "12.0+PTX"]
    (unit,) = [
        unit
        for unit in plan(load(REPO_DIR), "cuda", tools(tmp_path), None, OPS, shared_ptx=False)
        if unit.source.endswith("norm/rms_norm.cu")
    ]
    flags = gencode_flags(archs, shared_ptx=False)
    assert set(flags) <= set(unit.flags)
    assert flags[1::2] == [
        "arch=compute_75,code=[sm_75]",
        "arch=compute_80,code=[sm_80]",
        "arch=compute_86,code=[sm_86]",
        "arch=compute_90,code=[sm_90,compute_90]",
        "arch=compute_100,code=[sm_100]",
        "arch=compute_120,code=[sm_120,compute_120]",
    ]


@pytest.mark.parametrize(("torch", "standard"), [("2.11.0", 17), ("2.12.0+cu130", 20)])
def test_the_standard_goes_by_torch(torch: str, standard: int, tmp_path: Path):
    units = plan(load(REPO_DIR), "cuda", tools(tmp_path, torch), None, OPS)
    assert f"-std=gnu++{standard}" in units[0].flags
    assert f"-std=c++{standard}" in next(unit for unit in units if unit.rule == "cuda").flags


def test_every_section_hides_its_symbols():
    """By a flag of build.toml, which kernel-builder gives, too."""
    hides = {"cuda": "-Xcompiler=-fvisibility=hidden", "rocm": "-fvisibility=hidden"}
    for section in load(REPO_DIR).sections:
        suffixes = {Path(path).suffix for path in section.sources}
        if ".cpp" in suffixes:
            assert "-fvisibility=hidden" in section.cxx_flags, section.name
        if ".cu" in suffixes:
            assert hides[section.backend] in section.gpu_flags, section.name


@pytest.mark.parametrize(("version", "given"), [((12, 6), False), ((13, 0), True)])
def test_a_flag_may_be_for_newer_versions_of_cuda(version: tuple[int, int], given: bool):
    for section in load(REPO_DIR).for_backend("cuda"):
        flags = flags_for_cuda(section.gpu_flags, version)
        assert not any("$" in flag for flag in flags)
        if section.gpu_flags:
            assert ("--compress-mode=size" in flags) is given


def test_another_generator_expression_is_refused():
    with pytest.raises(BuildError, match="not a generator expression that is known here"):
        flags_for_cuda(("$<CONFIG:Debug>",), (13, 0))


def test_cmake_reads_the_flag_as_the_builder_does(tmp_path: Path):
    """In the place where kernel-builder's CMake puts the flags of a section."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    (flags,) = {s.gpu_flags for s in load(REPO_DIR).for_backend("cuda") if s.gpu_flags}
    for version in ((12, 6), (13, 0)):
        # NOTE: the compiler's version, as no compiler is needed to write a file.
        text = ";".join(flags).replace("$<CUDA_COMPILER_VERSION>", "{}.{}".format(*version))
        (tmp_path / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.18)\nproject(flags NONE)\n"
            f'set(_CUDA_FLAGS "{text}")\n'
            'file(GENERATE OUTPUT flags.txt CONTENT "$<1:${_CUDA_FLAGS}>")\n'
        )
        subprocess.run([cmake, "-S", tmp_path, "-B", tmp_path], check=True, capture_output=True)
        words = (tmp_path / "flags.txt").read_text().split(";")
        assert [word for word in words if word] == flags_for_cuda(flags, version)
