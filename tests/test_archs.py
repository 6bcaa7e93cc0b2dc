"""GPU architectures: of build.toml, of each toolkit, and of the code in a library."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from builder.archs import (
    MachineCode,
    disagreements,
    find_cuobjdump,
    machine_code,
    release_archs,
    without_ptx,
)
from builder.compile import CODE_CHANGES_AT, Unit, gencode_flags, nvcc_threads, select_archs
from builder.config import load
from builder.errors import BuildError
from builds import BUILD_VARIANT, copy_sources, run
from conftest import REPO_DIR


@pytest.mark.parametrize(
    ("archs", "jobs", "threads"), [(["9.0"], 2, 1), (["8.0", "9.0"], 2, 2), (["8.0", "9.0"], 1, 1)]
)
def test_a_compiler_has_no_more_threads_than_gpus(archs, jobs, threads):
    """`make build-cuda ARCHS=9.0` left one of two cores idle."""
    flags = tuple(gencode_flags(archs))
    units = [Unit(f"{name}.cu", f"{name}.o", "cuda", flags, name) for name in "abc"]
    assert nvcc_threads(units, jobs) == threads


def test_capabilities_share_the_code_they_are_given():
    """Machine code is made of PTX of another capability: no source may tell the two apart."""
    shared = gencode_flags(["7.5", "8.0", "8.6", "9.0+PTX", "9.0a", "10.0", "12.0+PTX"])
    assert shared[1::2] == [
        "arch=compute_75,code=[sm_75]",
        "arch=compute_80,code=[sm_80,sm_86]",
        "arch=compute_90,code=[sm_90,compute_90,sm_100]",
        "arch=compute_90a,code=[sm_90a]",
        "arch=compute_120,code=[sm_120,compute_120]",
    ]
    folder = REPO_DIR / "kernel_src"
    sources = [path for path in folder.rglob("*") if path.suffix in (".h", ".cu")]
    asked = {
        condition
        for path in sources
        for condition in re.findall(r"__CUDA_ARCH__ *[<>=!]+ *\w+", path.read_text("utf-8"))
    }
    assert asked == {f"__CUDA_ARCH__ >= {capability}0" for capability in CODE_CHANGES_AT}


def test_code_for_one_gpu_alone_goes_by_that_gpus_number():
    """It is compiled for other GPUs, too: their code asks it whether it serves them."""
    sections = load(REPO_DIR).for_backend("cuda")
    hopper = next(section for section in sections if section.archs == ("9.0a",))
    assert [select_archs(hopper, wanted) for wanted in (None, ["9.0"], ["8.0"])] == [["9.0a"]] * 3
    others = next(section for section in sections if section.name == "kernel.norm_cuda")
    assert select_archs(others, ["9.0"]) == ["9.0+PTX"]


RELEASED = ("7.5", "8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0+PTX")
# Without float8, GPUs of 8.9 run the code of 8.6.
WITHOUT_FLOAT8 = tuple(arch for arch in RELEASED if arch != "8.9")


def test_every_gpu_section_states_its_architectures():
    """A section that does not is taken for one that has all, and `kernels` trusts the list."""
    sections = [section for section in load(REPO_DIR).sections if section.backend]
    stated = {section.name: section.archs for section in sections if section.backend == "cuda"}
    assert "kernel.cpu_in_cuda" in stated
    hopper = stated.pop("kernel.sample_sm90_cuda")
    assert hopper == ("9.0a",)
    plain = ("kernel.norm_cuda", "kernel.rope_cuda")
    assert stated == dict.fromkeys(stated, RELEASED) | dict.fromkeys(plain, WITHOUT_FLOAT8)
    rocm = {section.name: section.archs for section in sections if section.backend == "rocm"}
    assert rocm == dict.fromkeys(rocm, ("gfx90a", "gfx942"))


def test_a_release_lists_these_architectures():
    config = load(REPO_DIR)
    newest = "7.5;8.0;8.6;8.9;9.0+PTX;9.0a;10.0;12.0+PTX"
    assert ";".join(release_archs(config, (13, 0))) == newest
    assert ";".join(release_archs(config, (13, 2))) == newest
    # Whose GPUs of 10.0 and later take the PTX.
    assert ";".join(release_archs(config, (12, 6))) == "7.5;8.0;8.6;8.9;9.0+PTX;9.0a"


def test_a_section_without_architectures_adds_all_of_the_builders(tmp_path: Path):
    checkout = copy_sources(tmp_path / "checkout")
    text = (checkout / "build.toml").read_text()
    head, tail = text.split("[kernel.cpu_in_cuda]")
    tail = re.sub(r"cuda-capabilities = .*\n", "", tail, count=1)
    (checkout / "build.toml").write_text(f"{head}[kernel.cpu_in_cuda]{tail}")
    assert {"8.7", "11.0", "12.1"} < set(release_archs(load(checkout), (13, 0)))


def test_a_local_build_has_ptx_where_it_is_asked_for():
    sections = without_ptx(load(REPO_DIR)).for_backend("cuda")
    norm = next(section for section in sections if section.name == "kernel.norm_cuda")
    assert norm.archs == ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")
    assert gencode_flags(list(norm.archs))[1::2] == [
        "arch=compute_75,code=[sm_75]",
        "arch=compute_80,code=[sm_80,sm_86]",
        "arch=compute_90,code=[sm_90,sm_100,sm_120]",
    ]


def test_an_older_toolkit_compiles_what_it_knows():
    norm = next(s for s in load(REPO_DIR).sections if s.name == "kernel.norm_cuda")
    assert select_archs(norm, None, (12, 6)) == ["7.5", "8.0", "8.6", "9.0+PTX"]
    with pytest.raises(BuildError, match=r"12\.0: not among .* with CUDA 12\.6"):
        select_archs(norm, ["12.0"], (12, 6))


def test_listed_architectures_are_compared_with_the_code():
    code = MachineCode(frozenset({"8.0", "9.0", "9.0a"}), frozenset({"9.0"}))
    assert disagreements(["8.0", "9.0+PTX", "9.0a"], code) == []
    assert disagreements(["7.5", "8.0+PTX", "9.0"], code) == [
        "7.5 is listed, but there is no machine code",
        "9.0a has machine code, but is not listed",
        "8.0 is listed, but there is no PTX",
        "9.0 has PTX, but is not listed",
    ]


@pytest.mark.long
def test_the_code_of_a_library_is_read(tmp_path: Path):
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    source, library = tmp_path / "empty.cu", tmp_path / "empty.so"
    source.write_text("__global__ void kernel(int* x) { *x = 1; }\n")
    flags = gencode_flags(["8.0", "8.6", "9.0+PTX", "9.0a"])
    command = ["nvcc", "-shared", "-Xcompiler=-fPIC", *flags, source, "-o", library]
    assert run(command).returncode == 0
    found = machine_code(library, cuobjdump)
    assert found == MachineCode(frozenset({"8.0", "8.6", "9.0", "9.0a"}), frozenset({"9.0"}))


def test_an_unknown_architecture_is_a_message(tmp_path: Path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    options = ["--backend", "cuda", "--archs", "3.5", "--output", tmp_path]
    result = run([sys.executable, BUILD_VARIANT, *options])
    assert result.returncode == 1
    assert "3.5: not among the architectures" in result.stderr
    assert "Traceback" not in result.stderr
