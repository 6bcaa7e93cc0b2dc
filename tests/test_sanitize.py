"""`make sanitize` sees mistakes: planted ones, in a source built as the sanitized variant is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO_DIR

sys.path.insert(0, str(REPO_DIR / "tools"))

import sanitize
from builder.compile import SANITIZER_FLAGS

PLANTED = """
#include <cstdint>
extern "C" float past_the_end(int64_t size) {
  float* row = new float[size]();
  const float value = row[size];  // one past the end
  delete[] row;
  return value;
}
extern "C" int overflow(int64_t size) {
  int columns = 0x7fffffff - 4;
  return columns + static_cast<int>(size);
}
extern "C" float in_bounds(int64_t size) {
  float* row = new float[size]();
  const float value = row[size - 1];
  delete[] row;
  return value;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build with")
    try:
        sanitize.sanitized_environment()
    except SystemExit as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.cpp").write_text(PLANTED)
    flags = ["-shared", "-fPIC", *SANITIZER_FLAGS]
    target = folder / "planted.so"
    subprocess.run([compiler, folder / "planted.cpp", "-o", target, *flags], check=True)
    return target


@pytest.mark.parametrize(
    ("function", "report"),
    [
        ("past_the_end", "AddressSanitizer: heap-buffer-overflow"),
        ("overflow", "runtime error: signed integer overflow"),
        ("in_bounds", None),
    ],
)
def test_a_planted_mistake_is_reported(library, function, report):
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).{function}(ctypes.c_int64(7))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=sanitize.sanitized_environment(),
        capture_output=True,
        text=True,
    )
    assert (result.returncode == 0) == (report is None), result.stderr
    assert report is None or report in result.stderr


def test_a_sanitized_variant_is_no_release():
    command = [sys.executable, REPO_DIR / "tools/build_variant.py", "--sanitize"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "needs an --output of its own" in result.stderr


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 12 errors", 12),
        ("========= ERROR SUMMARY: 1 error", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("========= Target application returned an error", -1),
    ],
)
def test_what_compute_sanitizer_counts(output, errors):
    assert sanitize.errors_in("calls: 3 made\n" + output) == errors


RACE = """\
========= Error: Race reported between Write access at void fuselage::gpu::<unnamed>::{}<float>(int)
=========     and Read access at void fuselage::gpu::<unnamed>::{}<float>(int)
=========     and Read access at void fuselage::gpu::<unnamed>::lm_head_kernel<float>(int)
=========
"""


@pytest.mark.parametrize(
    ("kernels", "errors"),
    [
        ((("lm_head_kernel", "lm_head_kernel"),), 0),
        ((("lm_head_kernel", "lm_head_kernel"), ("lm_head_kernel", "rms_norm_kernel")), 1),
        ((("row_forward_kernel", "other_lm_head_kernel"), ("lm_head_kernel", "lm_head_kernel")), 1),
    ],
)
def test_races_of_one_kernel_with_itself_are_not_counted(kernels, errors):
    output = "".join(RACE.format(*names) for names in kernels)
    output += f"========= RACECHECK SUMMARY: {len(kernels)} hazards displayed (1 error, 0 warnings)"
    assert sanitize.errors_in(output) == len(kernels)
    assert sanitize.errors_in(output, "lm_head_kernel") == errors
