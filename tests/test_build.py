"""The builder and what it makes: build.toml, the variant folder, and every way of loading it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from builder.compile import Toolchain, Unit, ninja_file
from builder.config import BACKENDS, load
from builder.costs import (
    MOST_BYTES,
    MOST_SECONDS,
    MOST_T4_BYTES,
    TIMES_SUFFIX,
    YARDSTICK_SECONDS,
)
from builder.errors import BuildError
from builder.fatbin import code_bytes
from builder.includes import included_headers
from builder.sources import check_sources
from builder.toolchain import Compiler, Cuda, Torch
from builds import BUILD_VARIANT, copy_sources, run
from check_abi import has_symbol_table, shared_state, violations
from conftest import REPO_DIR, REPO_ID, VERSION
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, DigestValidationError, Metadata

TIMED = REPO_DIR / "tools/builder/timed.py"
LOCKED_KERNELS = "8ac69fc542a4306eade0759ef7c45b4f2ae57df0"


def build(*options: object, **environment: str) -> str:
    """Builds the CPU variant and returns what the builder prints."""
    result = run([sys.executable, BUILD_VARIANT, "--backend", "cpu", *options], **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def python(code: str, **environment: str) -> str:
    """Runs `code` in a Python of its own and returns what it prints."""
    result = run([sys.executable, "-c", code], **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="session")
def variant() -> Path:
    """The CPU variant of this checkout, built if need be."""
    build()
    (folder,) = (REPO_DIR / "build").glob("torch-stable-abi*-cpu-*")
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the builder reads, to be broken."""
    return copy_sources(tmp_path / "checkout")


# build.toml


def test_build_toml_is_valid_and_targets_the_stable_abi():
    backends = Build.open(REPO_DIR).general.backends
    assert backends == [Backend.CPU, Backend.CUDA]
    config = load(REPO_DIR)
    assert config.stable_abi == {"cpu": "2.10", "cuda": "2.10", "rocm": "2.10"}
    assert re.search(r"^edition = 5$", (REPO_DIR / "build.toml").read_text(), re.MULTILINE)


def test_build_toml_lists_every_source():
    check_sources(load(REPO_DIR))


def test_an_unlisted_file_is_named(checkout: Path):
    (checkout / "kernel_src/common/stray.h").write_text("#pragma once\n")
    with pytest.raises(BuildError, match=r"kernel_src/common/stray\.h: not listed; .*kernel\.\*"):
        check_sources(load(checkout))


def test_a_listed_file_that_is_missing_is_named(checkout: Path):
    (checkout / "kernel_src/norm/rms_norm_cpu.h").unlink()
    message = r"kernel_src/norm/rms_norm_cpu\.h: listed in \[kernel\.cpu\]"
    with pytest.raises(BuildError, match=message):
        check_sources(load(checkout))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_include_of_a_file_another_backend_lists_is_named(checkout: Path, backend: str):
    text = (checkout / "build.toml").read_text()
    sections = text.split("\n[")
    other = next(name for name in BACKENDS if name != backend)
    index = {
        name: next(i for i, part in enumerate(sections) if f'backend = "{name}"' in part)
        for name in (backend, other)
    }
    path = f"kernel_src/norm/only_{other}.h"
    (checkout / path).write_text("#pragma once\n")
    sections[index[other]] = sections[index[other]].replace("src = [", f'src = [\n  "{path}",', 1)
    (checkout / "build.toml").write_text("\n[".join(sections))
    header = checkout / "kernel_src/norm/rms_norm_cpu.h"
    header.write_text(f'#include "norm/only_{other}.h"\n' + header.read_text())
    with pytest.raises(
        BuildError, match=rf"rms_norm_cpu\.h: includes {path}.* for {backend}.*\[kernel"
    ):
        check_sources(load(checkout), (backend,))


def test_includes_point_down():
    # Into the file's own folder, or into common/: no family knows another, and common/ knows none.
    for path in (REPO_DIR / "kernel_src").rglob("*.*"):
        included = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        folders = {Path(header).parent.as_posix() for header in included}
        assert folders <= {path.parent.name, "common"}, path


def test_includes_follow_the_backend_macros():
    text = """
    #include "always.h"
    // #include "comment.h"
    #if defined(CUDA_KERNEL) || defined(ROCM_KERNEL)
    #include "gpu.h"
    #else /* no GPU */
    #include "cpu.h"
    #endif
    #ifdef SOMETHING_ELSE
    #include "maybe.h"
    #elif defined(CPU_KERNEL)
    #include "maybe_cpu.h"
    #endif
    #include <system.h>
    """
    assert list(included_headers(text, "cpu")) == ["always.h", "cpu.h", "maybe.h", "maybe_cpu.h"]
    assert list(included_headers(text, "rocm")) == ["always.h", "gpu.h", "maybe.h"]


def test_no_generated_project_files_and_a_locked_builder():
    for name in ("pyproject.toml", "setup.py", "CMakeLists.txt"):
        assert not (REPO_DIR / name).exists(), f"{name} is generated; it stays out of git"
    nodes = json.loads((REPO_DIR / "flake.lock").read_text())["nodes"]
    locked = [node["locked"] for node in nodes.values() if "locked" in node]
    revisions = [lock["rev"] for lock in locked if lock.get("repo") == "kernels"]
    assert revisions == [LOCKED_KERNELS]


# The variant folder


@pytest.mark.long
def test_metadata_and_digest(variant: Path, tmp_path: Path):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.name) == "fuselage"
    assert metadata.version == VERSION
    assert metadata.license == "apache-2.0"
    assert metadata.backend.backend_type == Backend.CPU
    assert re.fullmatch(r"_fuselage_cpu_[0-9a-f]{7}(_dirty)?", metadata.id)
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    libraries = [path.name for path in variant.glob("*.so")]
    assert libraries == [f"{metadata.id}.abi3.so"]

    copy = tmp_path / variant.name
    shutil.copytree(variant, copy)
    with open(copy / "__init__.py", "a") as file:
        file.write("\n")
    with pytest.raises(DigestValidationError, match="__init__"):
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, copy))


def test_provenance_names_the_commit(variant: Path):
    provenance = Metadata.read_from_file(variant / "metadata.json").provenance
    git = ["git", "-C", REPO_DIR]
    head = run([*git, "rev-parse", "HEAD"])
    if head.returncode != 0:
        assert provenance.kernel is None
    else:
        status = run([*git, "status", "--porcelain", "--untracked-files=no"]).stdout
        assert provenance.kernel.commit == head.stdout.strip()
        assert provenance.kernel.dirty == bool(status.strip())


@pytest.mark.long
def test_kernels_info_accepts_the_build(variant: Path):
    code = "from kernels.cli import main; main()"
    result = run([sys.executable, "-c", code, "info", REPO_DIR, "--json"])
    assert result.returncode == 0, result.stderr
    info = json.loads(result.stdout)
    assert info["name"] == "fuselage" and "cpu" in info["backends"]


@pytest.mark.long
def test_the_library_keeps_to_its_abis(variant: Path, tmp_path: Path):
    (library,) = variant.glob("*.so")
    assert has_symbol_table(library)
    assert violations(library) == []


def test_errors_write_no_numbers_to_streams(variant: Path):
    """Whose locales crash where the library has a newer C++ library than Torch, linked statically.

    Torch's headers do so where one of its functions fails (torch-ext/binding/torch_stable.h).
    """
    (library,) = variant.glob("*.so")
    nm = subprocess.run(["nm", "-u", library], capture_output=True, text=True, check=True)
    assert "_ZNSo9_M_insertIl" not in nm.stdout


def test_the_abi_check_can_fail(tmp_path: Path):
    if tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 32):
        pytest.skip("this glibc has no symbol that manylinux_2_28 lacks")
    source, library = tmp_path / "newer.c", tmp_path / "newer.so"
    source.write_text(
        "extern char __libc_single_threaded;\nchar f() { return __libc_single_threaded; }"
    )
    compiler = shutil.which("gcc") or shutil.which("g++")
    assert run([compiler, "-shared", "-fPIC", "-o", library, source]).returncode == 0
    assert any("__libc_single_threaded" in line for line in violations(library))
    assert run(["strip", library]).returncode == 0
    assert violations(library) == ["is stripped, so its symbols cannot be checked"]


SHARED_STATE = """
namespace fuselage {
inline int& of_inline(int i) { static int count[9]; return count[i]; }
template <typename T> int& of_template(int i) { static int count[9]; return count[i]; }
int of_namespace = 3;
namespace {
int of_file;
template <typename T> int& of_file_template(int i) { static int count[9]; return count[i]; }
}
static int& of_static(int i) { static int count[9]; return count[i]; }
int use(int i) {
  return ++of_inline(i) + ++of_template<int>(i) + ++of_file + ++of_file_template<int>(i) +
         ++of_static(i);
}
}
"""


@pytest.mark.parametrize("flags", [(), ("-fvisibility=hidden", "-fno-gnu-unique")])
def test_state_that_versions_share_is_found_with_and_without_the_flags_that_hide_it(
    tmp_path: Path, flags: tuple[str, ...]
):
    source, library = tmp_path / "state.cpp", tmp_path / "state.so"
    source.write_text(SHARED_STATE)
    assert run(["g++", "-shared", "-fPIC", *flags, "-o", library, source]).returncode == 0
    assert sorted(shared_state(library)) == [
        "_ZN8fuselage12of_namespaceE",
        "_ZZN8fuselage11of_templateIiEERiiE5count",
        "_ZZN8fuselage9of_inlineEiE5count",
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["norm/rms_norm", "sample/sample", "gate/activation"])
def test_cpu_sources_export_only_what_the_binding_calls(tmp_path: Path, name: str):
    # Without the flags that hide it, which the release's builder does not give.
    source, target = REPO_DIR / f"kernel_src/{name}_cpu.cpp", tmp_path / "object.o"
    flags = ["-std=c++17", "-O0", "-fPIC", "-DCPU_KERNEL", f"-I{REPO_DIR / 'kernel_src'}"]
    assert run(["g++", *flags, "-c", source, "-o", target]).returncode == 0
    symbols = [line.split() for line in run(["readelf", "-sW", target]).stdout.splitlines()]
    data = [symbol for symbol in symbols if "OBJECT" in symbol and "fuselage" in symbol[-1]]
    assert data and not [symbol for symbol in data if not {"LOCAL", "HIDDEN"} & set(symbol)]
    own = [symbol for symbol in symbols if "FUNC" in symbol and "8baseline" in symbol[-1]]
    own = [symbol for symbol in own if "GLOBAL" in symbol]
    assert own and all("HIDDEN" in symbol for symbol in own)
    assert not shared_state(target)


# Loading


def test_get_kernel_loads_this_build(fuselage, variant: Path):
    from kernels import get_loaded_kernels

    (loaded,) = [item for item in get_loaded_kernels() if item.module is fuselage]
    assert str(loaded.metadata.name) == "fuselage"
    assert Path(fuselage.__file__).parent.parent == REPO_DIR / "build"
    assert all(hasattr(fuselage, name) for name in fuselage.__all__)


@pytest.mark.long
def test_get_kernel_offline_from_a_hub_cache(variant: Path, tmp_path: Path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / f"kernels--{REPO_ID.replace('/', '--')}"
    shutil.copytree(variant, repository / "snapshots" / revision / "build" / variant.name)
    (repository / "refs").mkdir()
    (repository / "refs" / f"v{VERSION}").write_text(revision)
    code = f"""
from kernels import get_kernel
kernel = get_kernel({REPO_ID!r}, version={VERSION}, backend="cpu")
print(kernel.__file__)
"""
    printed = python(
        code, HF_HUB_CACHE=str(tmp_path), KERNELS_CACHE=None, LOCAL_KERNELS=None, HF_HUB_OFFLINE="1"
    )
    assert printed.splitlines()[-1].startswith(str(repository))


def test_no_package_of_the_plain_name(variant: Path):
    """Releases have none, so nobody may get used to `import fuselage`."""
    assert not [path for path in variant.rglob("*") if path.name.startswith("fuselage")]
    code = "import importlib.util\nprint(importlib.util.find_spec('fuselage'))"
    assert python(code, PYTHONPATH=str(variant)) == "None"


@pytest.mark.slow
def test_two_builds_live_in_one_process(variant: Path, tmp_path: Path):
    # With the objects of this checkout's build: compiling all of them once more takes minutes.
    shutil.copytree(REPO_DIR / "build/.work" / variant.name, tmp_path / "work" / variant.name)
    for unique_id in ("aaaaaaa", "bbbbbbb"):
        folders = ["--output", tmp_path / unique_id, "--work", tmp_path / "work"]
        output = build("--unique-id", unique_id, *folders)
    # The second id compiles the binding and the link, and none of the kernels.
    compiled = re.findall(r"^\[\d+/\d+\] (\S+)", output, re.MULTILINE)
    assert compiled == ["torch-ext/torch_binding.cpp", "link"]

    code = f"""
from pathlib import Path
import torch
from kernels import get_local_kernel
folders = [Path({str(tmp_path)!r}) / name for name in ("aaaaaaa", "bbbbbbb")]
first, second = (get_local_kernel(folder, backend="cpu") for folder in folders)
assert first is not second
x = torch.randn(3, 5)
assert torch.equal(first.rms_norm(x), second.rms_norm(x))
print(first.__name__, second.__name__)
print(len(dir(torch.ops._fuselage_cpu_aaaaaaa)) > 0, first.rms_norm is second.rms_norm)
"""
    printed = python(code, LOCAL_KERNELS=None).splitlines()
    assert printed[-2:] == ["_fuselage_cpu_aaaaaaa _fuselage_cpu_bbbbbbb", "True False"]


# Rebuilding


@pytest.mark.long
def test_a_second_build_compiles_nothing(variant: Path):
    build()
    assert "up to date, nothing compiled" in build()


@pytest.mark.long
def test_touching_a_file_compiles_nothing(variant: Path):
    build()
    for path in ("kernel_src/norm/rms_norm.h", "torch-ext/torch_binding.cpp"):
        os.utime(REPO_DIR / path)
    assert "up to date, nothing compiled" in build()


@pytest.mark.long
def test_what_an_earlier_build_left_is_removed(variant: Path, tmp_path: Path):
    output, work = tmp_path / "out", REPO_DIR / "build/.work"
    folder = output / variant.name
    folder.mkdir(parents=True)
    (folder / "_fuselage_cpu_0000000.abi3.so").write_bytes(b"")
    (folder / "old_module.py").write_text("")
    (folder / "fuselage/__pycache__").mkdir(parents=True)
    (folder / "fuselage/__init__.py").write_text("")
    (folder / "fuselage/__pycache__/__init__.cpython-311.pyc").write_bytes(b"")
    (folder / "__pycache__").mkdir()
    bytecode = folder / "__pycache__/norm.cpython-311.pyc"
    bytecode.write_bytes(b"")
    build("--output", output, "--work", work)
    assert bytecode.exists()
    assert {path.name for path in folder.iterdir()} == {
        *(path.name for path in variant.iterdir()),
        "__pycache__",
    }


# Messages


@pytest.mark.long
@pytest.mark.parametrize(
    "environment", [{"CXX": "/nonexistent/g++"}, {"CXX": None, "PATH": "/nonexistent"}]
)
def test_a_missing_compiler_is_a_message(environment: dict, tmp_path: Path):
    command = [sys.executable, BUILD_VARIANT, "--backend", "cpu", "--output", tmp_path]
    result = run(command, **environment)
    assert result.returncode == 1
    assert re.fullmatch(r"error: no C\+\+ compiler \(.*\): apt-get install g\+\+\n", result.stderr)


@pytest.mark.long
def test_a_compile_error_is_the_compilers_message(checkout: Path, tmp_path: Path):
    binding = checkout / "torch-ext/torch_binding.cpp"
    binding.write_text('#error "broken on purpose"\n' + binding.read_text())
    for path in (checkout / "kernel_src").rglob("*.cpp"):
        path.write_text("")  # nothing but the binding takes time
    command = [sys.executable, BUILD_VARIANT, "--backend", "cpu", "--source", checkout]
    result = run([*command, "--output", tmp_path / "out"])
    assert result.returncode == 1
    assert "torch-ext/torch_binding.cpp:1:2: error: #error" in result.stdout
    assert "error: compilation failed" in result.stderr and "Traceback" not in result.stderr


# Size and compile time


def fat_binary(*entries: tuple[int, int, int]) -> bytes:
    """The headers of one with those entries: kind (PTX 1, machine code 2), architecture, bytes."""
    parts = [
        struct.pack("<HHIQ12xI32x", kind, 257, 64, size - 64, arch) + bytes(size - 64)
        for kind, arch, size in entries
    ]
    body = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def planted_build(
    folder: Path,
    library_bytes: int,
    seconds: dict[str, float],
    t4_bytes: int = 0,
    slower: float = 1.0,
) -> Path:
    """The output folder of a CUDA build of those files, as far as check_size.py looks at it.

    It was made on cores that take `slower` times as long, for all they do.
    """
    name = "torch-stable-abi210-cu130-x86_64-linux"
    work = folder / ".work" / name
    (folder / name).mkdir(parents=True)
    with open(folder / name / "_fuselage.abi3.so", "wb") as library:
        if t4_bytes:
            library.write(fat_binary((2, 75, t4_bytes), (2, 80, 1000)))
        library.truncate(library_bytes)
    lines = []
    for source, taken in seconds.items():
        path = work / "obj" / f"{source}.o"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"object")
        path.with_name(path.name + TIMES_SUFFIX).write_text(
            f"{slower * taken} {slower * YARDSTICK_SECONDS}\n"
        )
        lines.append(f"build ../obj/{source}.o: cuda {source} | toolchain.txt\n  flags = -O3")
    lines.append("build ../lib/_fuselage.abi3.so: link ../obj/norm/a.cu.o ../obj/gate/b.cu.o")
    (work / "build.ninja").write_text("\n".join(lines) + "\n")
    # Of a source that is gone: not part of the library.
    (work / "obj/gone.cu.o").write_bytes(b"object")
    return folder


def check_size(folder: Path) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, REPO_DIR / "tools/check_size.py", folder])


HALF = MOST_SECONDS / 2


def test_a_build_within_the_bars_passes_and_is_listed_by_file(tmp_path: Path):
    folder = planted_build(tmp_path, MOST_BYTES, {"norm/a.cu": HALF - 1, "gate/b.cu": HALF + 1})
    result = check_size(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["gate/b.cu", "norm/a.cu"]  # slowest first
    assert lines[3].split()[:2] == [f"{MOST_SECONDS:.1f}", f"{MOST_BYTES / 1e6:.2f}"]


def test_the_bar_of_time_is_for_cores_of_one_speed(tmp_path: Path):
    """CI once failed with 3247 CPU seconds for what had taken 2219, on cores 0.68 as fast."""
    files = {"norm/a.cu": HALF - 20, "gate/b.cu": HALF - 20}
    result = check_size(planted_build(tmp_path / "slow", 1, files, slower=1.5))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "measured: its cores are 0.67 as fast" in result.stdout
    files["norm/a.cu"] += 60
    result = check_size(planted_build(tmp_path / "fast", 1, files, slower=0.8))
    assert result.returncode == 1 and "compiling took 46.3 CPU minutes" in result.stdout


def test_code_for_a_t4_has_a_bar_of_its_own(tmp_path: Path):
    files = {"norm/a.cu": HALF, "gate/b.cu": HALF}
    result = check_size(planted_build(tmp_path, MOST_BYTES + MOST_T4_BYTES, files, MOST_T4_BYTES))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6.00  code for 7.5 (at most 6 MB)" in result.stdout


@pytest.mark.parametrize(
    ("library_bytes", "t4_bytes", "second_file", "message"),
    [
        (MOST_BYTES + 10**6, 0, HALF, "the library without code for 7.5 has 41.0 MB, more than 40"),
        # The whole has no more than it may: 40 and 6 MB.
        (MOST_BYTES + 6 * 10**6, 5 * 10**6, HALF, "without code for 7.5 has 41.0 MB, more than 40"),
        (MOST_BYTES, 7 * 10**6, HALF, "code for 7.5 has 7.0 MB, more than 6"),
        (MOST_BYTES, 0, HALF + 60, "compiling took 47.0 CPU minutes, more than 46"),
    ],
)
def test_a_build_beyond_a_bar_fails(
    library_bytes: int, t4_bytes: int, second_file: float, message: str, tmp_path: Path
):
    files = {"norm/a.cu": HALF, "gate/b.cu": second_file}
    result = check_size(planted_build(tmp_path, library_bytes, files, t4_bytes))
    assert result.returncode == 1
    assert message in result.stdout and result.stdout.count("more than") == 1


def test_code_is_weighed_by_gpu(tmp_path: Path):
    library = tmp_path / "library.so"
    first = fat_binary((2, 75, 200), (2, 90, 300), (1, 90, 5000), (2, 90, 400))
    library.write_bytes(b"\x7fELF" + first + bytes(100) + fat_binary((2, 75, 80), (2, 120, 100)))
    assert code_bytes(library) == {"7.5": 280, "9.0": 700, "12.0": 100}
    library.write_bytes(first[:-8])
    with pytest.raises(BuildError, match="not a fat binary as nvcc"):
        code_bytes(library)


def test_a_build_without_times_is_not_taken_for_a_fast_one(tmp_path: Path):
    folder = planted_build(tmp_path, 1, {"norm/a.cu": 1.0, "gate/b.cu": 1.0})
    next(folder.rglob(f"a.cu.o{TIMES_SUFFIX}")).unlink()
    result = check_size(folder)
    assert result.returncode == 1 and f"a.cu.o{TIMES_SUFFIX} is missing" in result.stderr
    assert check_size(tmp_path / "nothing").returncode == 1


def test_cuda_builds_time_every_file():
    tools = Toolchain(
        Compiler("g++", ""),
        Torch(Path("/torch"), "2.10", None, None),
        Path("/python"),
        cuda=Cuda(Compiler("nvcc", ""), (13, 0), Path("/cuda"), "libcudart.so"),
    )
    units = [Unit(f"a.{rule}", f"../obj/a.{rule}.o", rule, (), "a") for rule in ("cxx", "cuda")]
    ninja = ninja_file(units, tools, "cuda", "library.so", 2)
    commands = re.findall(r"command = (.*) -c \$in -o \$out", ninja)
    assert len(commands) == 2
    for command, compiler in zip(commands, ("g++", "nvcc"), strict=True):
        assert f"{TIMED} $out{TIMES_SUFFIX} {compiler}" in command


@pytest.mark.long
def test_cpu_time_is_measured(tmp_path: Path):
    """With that of the compiler's own processes, as cicc is nvcc's, and without its waiting."""
    times = tmp_path / "a.o.times"
    work = "import time\nwhile time.process_time() < 0.5: pass"
    child = (
        "import subprocess, sys, time\n"
        f"time.sleep(1.5)\nsubprocess.run([sys.executable, '-c', {work!r}])\nsys.exit(3)"
    )
    result = run([sys.executable, TIMED, times, sys.executable, "-c", child])
    assert result.returncode == 3
    command, yardstick = map(float, times.read_text().split())
    assert 0.5 <= command < 1.5 and yardstick > 0
