"""tools/check_compliance.py: what it finds in a variant, and that it finds it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import check_compliance
import pytest
from builder.archs import MachineCode
from check_compliance import Skipped, Variant, check_architectures, check_imports, check_release


def planted(folder: Path, **metadata: object) -> Variant:
    """A variant folder of a library without content and that metadata.json."""
    folder.mkdir()
    (folder / "_fuselage.abi3.so").write_bytes(b"")
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return Variant(folder)


def test_the_listed_architectures_are_those_with_code(tmp_path: Path, monkeypatch):
    code = MachineCode(frozenset({"8.0", "9.0"}), frozenset({"9.0"}))
    monkeypatch.setattr(check_compliance, "machine_code", lambda *_: code)
    monkeypatch.setattr(check_compliance, "find_cuobjdump", lambda: "cuobjdump")
    claims = {"right": ["8.0", "9.0+PTX"], "wrong": ["8.0", "9.0+PTX", "12.1+PTX"]}
    right, wrong = (
        planted(tmp_path / name, backend={"type": "cuda", "archs": archs})
        for name, archs in claims.items()
    )
    assert check_architectures(right) == []
    assert check_architectures(wrong) == [
        "12.1 is listed, but there is no machine code",
        "12.1 is listed, but there is no PTX",
    ]
    monkeypatch.setattr(check_compliance, "find_cuobjdump", lambda: None)
    with pytest.raises(Skipped, match="pip install nvidia-cuda-cuobjdump"):
        check_architectures(right)


def test_a_cpu_variant_lists_no_gpu(tmp_path: Path):
    assert check_architectures(planted(tmp_path / "cpu", backend={"type": "cpu"})) == []
    wrong = planted(tmp_path / "wrong", backend={"type": "cpu", "archs": ["9.0"]})
    assert check_architectures(wrong) == ["a CPU variant lists 9.0"]


def test_what_is_skipped_and_what_is_wrong_is_printed(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(check_compliance, "CHECKS", {"architectures": check_architectures})
    folder = planted(tmp_path / "wrong", backend={"type": "cpu", "archs": ["9.0"]}).folder
    assert check_compliance.main([str(folder)]) == 1
    assert "FAILED  wrong" in capsys.readouterr().out
    skipped = planted(tmp_path / "torch-rocm", backend={"type": "rocm", "archs": ["gfx90a"]}).folder
    assert check_compliance.main([str(skipped)]) == 0
    assert "skipped architectures: nothing here reads" in capsys.readouterr().out


def test_imports_of_others_are_found(tmp_path: Path):
    variant = planted(tmp_path / "variant")
    (variant.folder / "integrations").mkdir()
    lazy = variant.folder / "integrations/transformers.py"
    lazy.write_text(
        "import os.path, torch.nn\nfrom . import x\ndef _kernels():\n  import kernels\n"
    )
    assert check_imports(variant) == []
    lazy.write_text("import kernels\nclass A:\n  def f(self):\n    from kernels import Mode\n")
    (variant.folder / "norm.py").write_text("from fuselage.gate import silu\nimport numpy as np\n")
    assert check_imports(variant) == [
        "integrations/transformers.py imports kernels",
        "integrations/transformers.py, in f() imports kernels",
        "norm.py imports fuselage.gate",
        "norm.py imports numpy",
    ]


@pytest.fixture
def release(fuselage, tmp_path: Path) -> Path:
    """A copy of the variant that is loaded, to be broken."""
    folder = Path(fuselage.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(folder, tmp_path / folder.name, ignore=ignore)


def edit_metadata(folder: Path, **values: object) -> None:
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.long
def test_what_is_built_here_complies(release: Path, capsys):
    variant = Variant(release)
    for name, check in check_compliance.CHECKS.items():
        if name != "architectures":  # tested above: it may be skipped
            assert check(variant) == [], name
    assert check_compliance.main([str(release)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in check_compliance.CHECKS)


def break_layout(folder: Path) -> None:
    (folder / "_ops.py").unlink()
    (folder / "notes.txt").write_text("")
    (folder / "fuselage").mkdir()


def break_library(folder: Path) -> None:
    """One that links another library, and looks for it where it was built."""
    (library,) = folder.glob("*.so")
    other = folder.parent / "libother.so"
    for target, options in ((other, []), (library, [other, f"-Wl,-rpath,{folder.parent}"])):
        command = ["g++", "-shared", "-Wl,--no-as-needed", "-o", target, *options]
        subprocess.run([str(word) for word in command], check=True)


def break_api(folder: Path) -> None:
    path = folder / "__init__.py"
    text = path.read_text().replace('    "rms_norm",\n', "")
    path.write_text(text.replace('    "relu2",\n', '    "relu2",\n    "relu3",\n'))
    layers = folder / "layers.py"
    layers.write_text(layers.read_text().replace("class GeluTanh", "class _GeluTanh"))


BROKEN = {
    "layout": (
        break_layout,
        ["_ops.py is missing", "notes.txt does not belong", "the folder fuselage lets users"],
    ),
    "metadata": (
        lambda folder: edit_metadata(folder, backend={"type": "cuda"}, surprise=1),
        ["unknown key 'surprise'", "a GPU variant must list its architectures"],
    ),
    "namespace": (
        lambda folder: edit_metadata(folder, id="_fuselage_cpu_other"),
        ["_ops.py uses _fuselage", "has no PyInit__fuselage_cpu_other", "has no _fuselage_cpu_oth"],
    ),
    "libraries": (break_library, ["links .*libother.so", "does not link Torch", "has R(UN)?PATH"]),
    "digest": (lambda folder: (folder / "norm.py").write_text(""), ["norm.py"]),
    "provenance": (
        lambda folder: edit_metadata(folder, provenance={"kernel": {"commit": "1", "dirty": True}}),
        ["no version of the builder", "1 is not a commit"],
    ),
    "API": (
        break_api,
        [
            "rms_norm is public, and not in __all__",
            "relu3 is in __all__, and not there",
            "layers.GeluTanh is gone: that takes a new version",
            "rms_norm is gone: that takes a new version",
        ],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_comply_is_named(release: Path, name: str):
    break_it, messages = BROKEN[name]
    break_it(release)
    found = check_compliance.CHECKS[name](Variant(release))
    found = [line for line in found if "sources, and the id" not in line]
    assert len(found) == len(messages), found
    for line, message in zip(found, messages, strict=True):
        assert re.search(message, line), (message, line)


def test_names_of_operators_without_the_namespace_are_found(release: Path):
    """kernel-builder refuses them by the names of the decorators."""
    code = '@register_fake("rms_norm")\ndef _(x): ...\n'
    good = "@torch.library.register_fake(add_op_namespace_prefix('rms_norm'))\ndef _(x): ...\n"
    (release / "norm.py").write_text(good + code)
    assert check_compliance.check_namespace(Variant(release)) == [
        "norm.py:3 registers without add_op_namespace_prefix"
    ]


def test_a_release_is_of_a_commit_and_for_every_gpu(release: Path):
    edit_metadata(release, provenance={"kernel": {"commit": "0" * 40, "dirty": False}})
    assert check_release(Variant(release)) == []
    edit_metadata(release, provenance={"kernel": {"commit": "0" * 40, "dirty": True}})
    assert check_release(Variant(release)) == ["made of uncommitted sources, or of no commit"]
    folder = release.with_name("torch-stable-abi210-cu126-x86_64-linux")
    release.rename(folder)
    archs = ["7.5", "8.0", "8.6", "8.9", "9.0+PTX", "12.0"]
    edit_metadata(
        folder,
        backend={"type": "cuda", "archs": archs},
        provenance={"kernel": {"commit": "0" * 40, "dirty": False}},
    )
    assert check_release(Variant(folder)) == ["9.0a is missing", "12.0 is not in build.toml"]


def test_the_recorded_api_is_that_of_the_package(release: Path):
    """Of version 1, which is not out; from then on it only grows within a version."""
    recorded = check_compliance.PUBLIC_API.read_text().split()
    assert recorded == sorted(check_compliance.public_api(release))
    assert {"rms_norm", "layers.RMSNorm", "integrations.transformers.patch"} < {*recorded}
