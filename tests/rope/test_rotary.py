"""apply_rotary and qk_norm_rotary: every kind of input, and the contracts of all operators."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import eager
import pytest
import torch
from harness import (
    HALVES,
    TIES,
    UNIT,
    assert_close,
    assert_same_bits,
    check_no_worse,
    each_dtype,
    normal,
    on_devices,
    random_grad_outs,
    reference_gradients,
)
from operators import rotary_operator
from rotary_cases import NAMES, Case, check, check_rotary_gradients
from test_contracts import check_batch_invariance, refuses, run_both_ways
from test_gradients import packed_in

each_name = pytest.mark.parametrize("name", NAMES)

KINDS = {
    "llama": Case(dim=128),
    "one_head": Case(q_heads=1, k_heads=1, dim=32),
    "k_has_more": Case(q_heads=1, k_heads=5, dim=16),
    "q_alone": Case(k_heads=None),
    "three_dimensions": Case(q_heads=None, k_heads=None, dim=96, interleaved=True),
    "ltx": Case(batch=1, q_heads=None, k_heads=None, dim=2048, interleaved=True),
    "heads_first": Case(heads_dim=1, dim=64),
    "half": Case(half=True),
    "interleaved": Case(interleaved=True, q_heads=3),
    "interleaved_half": Case(interleaved=True, half=True),
    "partial": Case(dim=128, rotary_dim=32),
    "partial_half": Case(dim=80, rotary_dim=32, half=True),
    "partial_of_half": Case(dim=64, rotary_dim=32, interleaved=True),
    "partial_odd": Case(dim=37, rotary_dim=22),
    "partial_interleaved_odd": Case(dim=43, rotary_dim=26, interleaved=True, half=True),
    "nothing_but_a_pair": Case(dim=2),
    "a_pair_of_nine": Case(dim=9, rotary_dim=2, interleaved=True),
    "dim_6": Case(dim=6),
    "dim_72": Case(dim=72, q_heads=5, k_heads=5),
    "dim_80": Case(dim=80),
    "dim_100": Case(dim=100, interleaved=True),
    "dim_256": Case(dim=256, q_heads=2, k_heads=1),
    "dim_512": Case(dim=512, tokens=3),
    "dim_1000": Case(dim=1000, tokens=3),
    "decode": Case(batch=7, tokens=1, q_heads=8, dim=128, positions="offsets:int64"),
    "table_of_each": Case(table_batch=2),
    "table_of_one": Case(table_batch=1, heads_dim=1),
    "float32_table": Case(table_dtype=torch.float32),
    "float32_half_interleaved": Case(table_dtype=torch.float32, half=True, interleaved=True),
    "ids": Case(positions="ids:int64"),
    "ids_int32": Case(positions="ids:int32", heads_dim=1),
    "shared_ids": Case(positions="shared_ids:int64", table_dtype=torch.float32),
    "one_ids": Case(positions="one_ids:int32"),
    "offset": Case(positions="offset"),
    "offsets": Case(positions="offsets:int32"),
    "one_offset": Case(positions="one_offset:int64"),
    "packed": Case(packed=True, positions="shared_ids:int64"),
    "packed_square": Case(
        tokens=4, k_heads=4, rotary_dim=32, half=True, packed=True, positions="shared_ids:int32"
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@each_name
@each_dtype
def test_every_kind(fuselage, device, name, kind, dtype):
    check(*with_kernel(fuselage, KINDS[kind].make(name, dtype, device)))


def with_kernel(kernel, made):
    return made[0], kernel, made[1]


@pytest.mark.kernels_ci
@each_name
@pytest.mark.parametrize("kind", ["llama", "interleaved_half", "partial_odd", "ids"])
def test_some_kinds(fuselage, device, name, kind):
    check(*with_kernel(fuselage, KINDS[kind].make(name, torch.bfloat16, device)))


@pytest.mark.gpu
@each_name
@pytest.mark.parametrize("tokens", [33, 1025])
@pytest.mark.parametrize("dim", [64, 72, 96, 128, 130, 256, 320, 576, 1024, 2046])
def test_many_tokens(fuselage, name, tokens, dim):
    """Where the policies change strategy: few threads and many, whole warps and parts."""
    for interleaved, heads in product((False, True), ((1, None), (2, 1), (11, 3), (32, 8))):
        case = Case(3, tokens, *heads, dim=dim, interleaved=interleaved)
        check(*with_kernel(fuselage, case.make(name, torch.bfloat16, "cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [4096, 16384, 262144, 262142])
def test_long_heads(fuselage, dim):
    for interleaved in (False, True):
        case = Case(1, 3, 2, 3, dim=dim, interleaved=interleaved)
        check(*with_kernel(fuselage, case.make("apply_rotary", torch.bfloat16, "cuda")))


def test_long_heads_of_the_cpu(fuselage):
    for name, interleaved in product(NAMES, (False, True)):
        case = Case(1, 2, 1, 2, dim=10002, interleaved=interleaved)
        check(*with_kernel(fuselage, case.make(name, torch.bfloat16, "cpu")))


# Layouts: [batch, tokens, heads, dim] out of a contiguous tensor that `make` returns.

LAYOUTS = {
    "heads_around_tokens": lambda make, b, s, h, d: make(b, h, s, d).transpose(1, 2),
    "packed": lambda make, b, s, h, d: make(b, s, (h + 3) * d)[:, :, d : (h + 1) * d].unflatten(
        2, (h, d)
    ),
    "wider_heads": lambda make, b, s, h, d: make(b, s, h, d + 32)[..., :d],
    "wider_by_an_odd_number": lambda make, b, s, h, d: make(b, s, h, d + 3)[..., :d],
    "misaligned": lambda make, b, s, h, d: make(b * s * h * d + 1)[1:].view(b, s, h, d),
    "every_second_token": lambda make, b, s, h, d: make(b, 2 * s, h, d)[:, ::2],
    "one_token_of_many": lambda make, b, s, h, d: make(b, s, h, d + 1)[:, -1:, :, 1:].expand(
        b, s, h, d
    ),
    "expanded_batch": lambda make, b, s, h, d: make(1, s, h, d).expand(b, s, h, d),
    "expanded_heads": lambda make, b, s, h, d: make(b, s, 1, d).expand(b, s, h, d),
    "every_second_element": lambda make, b, s, h, d: make(b, s, h, 2 * d)[..., ::2],
    "expanded_element": lambda make, b, s, h, d: make(b, s, h, 1).expand(b, s, h, d),
    "batch_inside": lambda make, b, s, h, d: make(s, b, h, d).transpose(0, 1),
}


def in_layout(layout: str, shape, dtype, device, heads_dim: int = 2) -> torch.Tensor:
    b, s, h, d = shape if heads_dim == 2 else (shape[0], shape[2], shape[1], shape[3])
    x = LAYOUTS[layout](lambda *sizes: normal(sizes, dtype, device), b, s, h, d)
    return x if heads_dim == 2 else x.transpose(1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_layouts(fuselage, device, name, layout, dtype):
    for dim, heads_dim, names in ((64, 2, ("q",)), (64, 1, ("q", "k")), (22, 2, ("k",))):
        op, inputs = Case(3, 4, dim=dim, heads_dim=heads_dim).make(name, dtype, device)
        for x in names:
            inputs[x] = in_layout(layout, inputs[x].shape, dtype, device, heads_dim)
        kept = {x: inputs[x].clone() for x in names}
        check(op, fuselage, inputs)
        assert all(torch.equal(inputs[x], kept[x]) for x in names), "an input was written to"


@pytest.mark.parametrize("layout", LAYOUTS)
@each_name
def test_layouts_of_incoming_gradients(fuselage, device, name, layout):
    for dim in (64, 22):
        op, inputs = Case(3, 4, dim=dim).make(name, torch.bfloat16, device)
        grad_outs = {
            f"{x}_out": in_layout(layout, inputs[x].shape, torch.bfloat16, device) for x in "qk"
        }
        check_rotary_gradients(op, fuselage, inputs, grad_outs=grad_outs)


@each_name
def test_incoming_gradients_of_a_sum(fuselage, device, name):
    op, inputs = KINDS["llama"].make(name, torch.float32, device)
    ones = {f"{x}_out": torch.ones(1, device=device).expand(inputs[x].shape) for x in "qk"}
    check_rotary_gradients(op, fuselage, inputs, grad_outs=ones)


@each_name
@pytest.mark.parametrize("dim", [64, 22])
def test_layouts_of_tables(fuselage, device, name, dim):
    """Rows and columns with gaps, an expanded row, misaligned rows, a dimension for the heads."""
    op, inputs = Case(dim=dim, interleaved=True).make(name, torch.float16, device)
    cos, sin = op.defaults["cos"], op.defaults["sin"]
    expected = op.run(fuselage, inputs, {})

    def same_rows(change):
        outputs = op.run(fuselage, inputs, {"cos": change(cos), "sin": change(sin)})
        for x, output in outputs.items():
            assert_same_bits(output, expected[x], x)

    same_rows(lambda t: torch.cat((t, t), 1)[:, :dim])
    same_rows(lambda t: torch.cat((t[:, :1], t), 1)[:, 1:])
    same_rows(lambda t: t.repeat_interleave(2, 1)[:, ::2])
    same_rows(lambda t: t.t().contiguous().t())
    same_rows(lambda t: t[None].expand(2, -1, -1))
    same_rows(lambda t: t[None, :, None])
    same_rows(lambda t: t[None, :, None].expand(2, -1, -1, -1))
    assert_same_bits(
        op.run(fuselage, inputs, {"cos": cos[:1].expand(5, dim), "sin": sin})["q_out"],
        op.run(fuselage, inputs, {"cos": cos[:1].repeat(5, 1), "sin": sin})["q_out"],
        "expanded row",
    )


@each_name
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_gradients_of_tables_off_a_boundary(fuselage, device, name, interleaved):
    """Rows that begin eight bytes off one of 16, each of them or the first."""
    op, inputs = Case(interleaved=interleaved).make(name, torch.bfloat16, device)
    grad_outs = random_grad_outs(op.run(fuselage, inputs, {}))

    def run(changed):
        leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
        outputs = op.run(fuselage, leaves, changed)
        grads = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), [grad_outs[n] for n in outputs]
        )
        return dict(zip(leaves, grads, strict=True))

    expected = run({})
    for change in (
        lambda t: torch.cat((t[:, :4], t), 1)[:, 4:],
        lambda t: torch.cat((t.new_zeros(4), t.flatten()))[4:].view_as(t),
    ):
        actual = run({n: change(op.defaults[n]) for n in ("cos", "sin")})
        for label, grad in actual.items():
            assert_same_bits(grad, expected[label], label)


@each_name
@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (2, 3, 2, 0)], ids=str)
def test_empty(fuselage, device, name, shape):
    batch, tokens, heads, dim = shape
    case = Case(batch, tokens, heads, heads, dim)
    op, inputs = case.make(name, torch.bfloat16, device)
    check(op, fuselage, inputs)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    sum(out.sum() for out in op.run(fuselage, leaves, {}).values()).backward()
    assert all(not leaf.grad.any() for leaf in leaves.values())


@each_name
def test_no_heads_of_q(fuselage, device, name):
    op, inputs = Case(q_heads=0, k_heads=3).make(name, torch.float32, device)
    check(op, fuselage, inputs)


@pytest.mark.slow
@pytest.mark.gpu
@each_name
@pytest.mark.parametrize("case", [Case(3, 70000, 64, 16, 128), Case(3, 130000, 64, 16, 66)])
def test_more_than_two_to_the_31_elements(fuselage, name, case):
    """q has more, and so a token beyond them must be as it is alone."""
    batch = (1 << 31) // (case.tokens * case.q_heads * case.dim) + 2
    if torch.cuda.mem_get_info()[0] < 40 * (1 << 30):
        pytest.skip("needs 40 GiB of free GPU memory")
    case = replace(case, batch=batch)
    op, inputs = case.make(name, torch.bfloat16, "cuda")
    grads = {f"{x}_out": torch.empty_like(inputs[x]).normal_() for x in "qk"}
    results = run_both_ways(op, fuselage, inputs, grads)
    for first in (0, batch - 1):
        part = slice(first, first + 1)
        some = {n: t[part].clone() if n in op.row_inputs else t for n, t in inputs.items()}
        alone = run_both_ways(op, fuselage, some, {n: g[part].clone() for n, g in grads.items()})
        for label in ("q_out", "k_out", "grad_q", "grad_k"):
            assert_same_bits(results[label][part], alone[label], label)
        tables = {n: op.defaults[n][-64:] for n in ("cos", "sin")}
        last = {n: t[:, -64:] if n in op.row_inputs else t for n, t in some.items()}
        check(replace(op, defaults={**op.defaults, **tables}), fuselage, last)
    torch.cuda.empty_cache()


@pytest.mark.slow
@pytest.mark.gpu
@each_name
def test_heads_more_than_two_to_the_31_elements_apart(fuselage, name):
    stride = (1 << 31) + 16
    buffer = torch.empty(2 * stride + 4096, dtype=torch.bfloat16, device="cuda")
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):  # which of batch, tokens and heads is far
        strides = [(stride, 1024, 128)[i] for i in order]
        sizes = [(3, 2, 4)[i] for i in order]
        far = buffer.as_strided((*sizes, 128), (*strides, 1), 0).normal_()
        op, inputs = Case(*sizes, 2, 128).make(name, torch.bfloat16, "cuda")
        check(op, fuselage, {**inputs, "q": far})


# What it computes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["llama", "interleaved", "heads_first"])
def test_no_less_accurate_than_pytorch(fuselage, device, name, kind):
    for dtype in (torch.float32, *HALVES):
        case = replace(KINDS[kind], tokens=64, batch=3)
        op, inputs = case.make(name, dtype, device)
        options = {n: t for n, t in op.defaults.items() if n != "rotary_dim"}
        ours, reference = op.run(fuselage, inputs, {}), op.run_reference(inputs, {})
        plain = op._named(op.eager(**inputs, **options))
        grad_outs = random_grad_outs(ours)
        for x in ours:
            check_no_worse(ours[x], plain[x], reference[x], x)
        expected = reference_gradients(op, inputs, {}, grad_outs)
        grads = []
        for run in (op.run, None):
            leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
            outs = run(fuselage, leaves, {}) if run else op._named(op.eager(**leaves, **options))
            grads.append(
                torch.autograd.grad(
                    list(outs.values()), list(leaves.values()), list(grad_outs.values())
                )
            )
        for label, actual, theirs in zip(inputs, *grads, strict=True):
            check_no_worse(actual, theirs, expected[label], f"grad_{label}")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_cast_before_weight_is_two_calls(fuselage, device, dtype, weight_offset):
    """The results of rms_norm, rounded, and rotated: which rounding once is not."""
    op, inputs = Case(tokens=64, dim=128, q_heads=8).make("qk_norm_rotary", dtype, device)
    norm = {"weight_offset": weight_offset, "cast_before_weight": True}
    y = [fuselage.rms_norm(inputs[x], inputs[f"{x}_weight"], 1e-6, **norm) for x in "qk"]
    two_calls = fuselage.apply_rotary(*y, op.defaults["cos"], op.defaults["sin"])
    cast = op.run(fuselage, inputs, norm)
    once = op.run(fuselage, inputs, {"weight_offset": weight_offset})
    for x, expected in zip(("q_out", "k_out"), two_calls, strict=True):
        assert (cast[x] != expected).float().mean() <= 4 * TIES[dtype]
        assert (once[x] != expected).float().mean() > 0.05


@each_dtype
def test_options_of_the_norm(fuselage, device, dtype):
    case = Case(tokens=3, dim=48)
    for weight_dtype, offset, eps in product((None, dtype, torch.float32), (0.0, 1.0), (1e-6, 0.1)):
        op, inputs = case.make("qk_norm_rotary", dtype, device)
        for x in ("q_weight", "k_weight"):
            inputs[x] = None if weight_dtype is None else inputs[x].to(weight_dtype)
        op = replace(op, defaults={**op.defaults, "weight_offset": offset, "eps": eps})
        check(op, fuselage, inputs)
    inputs["k_weight"] = None  # one of both
    check(op, fuselage, inputs)


def test_true_tables_keep_lengths_and_angles(fuselage, device):
    """With real cosines q . k depends on the distance of their positions alone."""
    angles = torch.arange(32).outer(10000.0 ** (-torch.arange(32) / 32)).to(device)
    q, k = (normal((1, 1, 1, 64), torch.float32, device) for _ in range(2))
    for interleaved in (False, True):
        products = []
        for at in (0, 5, 20):
            q_out, k_out = (
                fuselage.apply_rotary(
                    x,
                    None,
                    angles.cos(),
                    angles.sin(),
                    rotary_dim=64,
                    offset=position,
                    interleaved=interleaved,
                )
                for x, position in ((q, at), (k, at + 7))
            )
            products.append((q_out * k_out).sum())
        torch.testing.assert_close(products[1], products[0])
        torch.testing.assert_close(products[2], products[0])
        torch.testing.assert_close(q_out.norm(), q.norm())


def test_what_is_passed_through_keeps_its_bits(fuselage, device):
    op, inputs = Case(dim=96, rotary_dim=32).make("apply_rotary", torch.bfloat16, device)
    inputs["q"][..., 40:43] = torch.tensor([float("nan"), float("inf"), -0.0])
    out = op.run(fuselage, inputs, {})["q_out"]
    assert_same_bits(out[..., 32:], inputs["q"][..., 32:], "rest")
    assert not out[..., :32].isnan().any()


@each_name
def test_positions_outside_the_table(fuselage, device, name):
    """They raise on the CPU; a GPU does not read there, and writes NaN."""
    op, inputs = Case(positions="ids:int64").make(name, torch.float32, device)
    rows = op.defaults["cos"].shape[0]
    for bad in (-1, rows, 1 << 40, -(1 << 40)):
        ids = op.defaults["position_ids"].clone()
        ids[1, 2] = bad
        if device == "cpu":
            with pytest.raises(
                RuntimeError, match=r"`position_ids` must be in .*token 2 of seq.* 1"
            ):
                op.run(fuselage, inputs, {"position_ids": ids})
            continue
        for out in op.run(fuselage, inputs, {"position_ids": ids}).values():
            assert out[1, 2].isnan().all()
            out[1, 2] = 0
            assert out.isfinite().all()
    op, inputs = Case(positions="offsets:int64").make(name, torch.float32, device)
    offset = torch.tensor([0, rows - 4], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"`offset` must be in .*token 4 of sequence 1"):
            op.run(fuselage, inputs, {"offset": offset})
    else:
        assert op.run(fuselage, inputs, {"offset": offset})["q_out"][1, 4].isnan().all()


# Determinism and batch invariance


@pytest.mark.kernels_ci
@each_name
@pytest.mark.parametrize("dim", [64, 100])
def test_same_inputs_same_bits(fuselage, device, name, dim):
    op, inputs = Case(9, 33, 4, 2, dim).make(name, torch.bfloat16, device)
    grads = random_grad_outs(op.run(fuselage, inputs, {}))
    first = run_both_ways(op, fuselage, inputs, grads)
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            again = run_both_ways(op, fuselage, inputs, grads)
        finally:
            torch.set_num_threads(threads)
        for label, expected in first.items():
            assert_same_bits(again[label], expected, label)


@each_name
@pytest.mark.parametrize("dim", [16, 64, 100, 256])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tokens_do_not_depend_on_the_batch(fuselage, device, name, dim, interleaved):
    case = Case(37, 3, 4, 2, dim, interleaved=interleaved)
    for dtype in (torch.float32, torch.bfloat16):
        check_batch_invariance(*with_kernel(fuselage, case.make(name, dtype, device)))


@pytest.mark.gpu
@each_name
@pytest.mark.parametrize("dim", [32, 64, 100, 128, 256, 512])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tokens_do_not_depend_on_a_large_batch(fuselage, name, dim, interleaved):
    """Where there are enough tokens for all threads, rows take several heads of them."""
    case = Case(1500, 3, 11, 3, dim, interleaved=interleaved)
    for dtype in (torch.float32, torch.bfloat16):
        made = case.make(name, dtype, "cuda")
        check_batch_invariance(*with_kernel(fuselage, made), sizes=(1, 40))


@each_name
@pytest.mark.parametrize("dim", [64, 100])
@on_devices((2, 3), (2, 3, 500), "tokens")
def test_heads_do_not_depend_on_their_place(fuselage, device, name, tokens, dim):
    """Nor on the number of heads, the layout or the alignment: of vectors, words or elements."""
    op, inputs = Case(2, tokens, 9, 4, dim).make(name, torch.bfloat16, device)
    expected = op.run(fuselage, inputs, {})["q_out"]

    def moved(offset: int) -> torch.Tensor:
        buffer = torch.empty(inputs["q"].numel() + offset, dtype=torch.bfloat16, device=device)
        return buffer[offset:].view(inputs["q"].shape).copy_(inputs["q"])

    for head in (0, 3, 8):
        for q in map(moved, (0, 1, 2)):
            alone = {**inputs, "q": q[:, :, head : head + 1]}
            out = op.run(fuselage, alone, {})["q_out"]
            assert_same_bits(out, expected[:, :, head : head + 1], f"head {head}")
    turned = {n: t.transpose(1, 2) if n in "qk" else t for n, t in inputs.items()}
    out = op.run(fuselage, turned, {"heads_dim": 1})["q_out"]
    assert_same_bits(out.transpose(1, 2), expected, "transposed")


# Gradients


@pytest.mark.kernels_ci
@each_name
def test_gradients_only_where_required(fuselage, device, name):
    op, inputs = Case(dim=24).make(name, torch.bfloat16, device)
    names = op.differentiable(inputs)
    for keep in range(1, 2 ** len(names)):
        requires = [n for i, n in enumerate(names) if keep >> i & 1]
        grad_outs = random_grad_outs(op.run(fuselage, inputs, {}))
        # What depends on nothing that requires a gradient has none either.
        check_rotary_gradients(op, fuselage, inputs, requires=requires, grad_outs=grad_outs)


@each_name
@pytest.mark.parametrize("used", ["q_out", "k_out"])
def test_gradients_of_one_output(fuselage, device, name, used):
    op, inputs = Case(dim=24).make(name, torch.float32, device)
    grad_outs = {used: normal(inputs[used[0]].shape, torch.float32, device)}
    other = "k" if used[0] == "q" else "q"
    grads = check_rotary_gradients(op, fuselage, inputs, grad_outs=grad_outs)
    assert grads[other] is None


@each_name
def test_what_is_saved(fuselage, device, name):
    """Of apply_rotary the tables alone; of qk_norm_rotary the inputs. No results, no statistics."""
    op, inputs = KINDS["ids"].make(name, torch.bfloat16, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    known = {**op.defaults, **(inputs if name == "qk_norm_rotary" else {})}
    saved = packed_in(lambda: op.run(fuselage, leaves, {}))
    for tensor in saved:
        assert any(tensor is t for t in known.values()), tensor.shape
    assert len(saved) == sum(isinstance(t, torch.Tensor) for t in known.values())
    with torch.no_grad():
        assert packed_in(lambda: op.run(fuselage, leaves, {})) == []


@each_name
def test_double_backward_and_forward_mode_are_refused(fuselage, device, name):
    op, inputs = Case().make(name, torch.float32, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    loss = op.run(fuselage, leaves, {})["q_out"].pow(2).sum()
    with pytest.raises(RuntimeError, match=f"fuselage::{name}: the backward is not diff"):
        torch.autograd.grad(loss, leaves["q"], create_graph=True)
    detached = {n: t.detach() for n, t in inputs.items()}
    for x in (*inputs, "cos", "sin"):

        def run(tensor, x=x):
            given = {**detached, x: tensor} if x in inputs else detached
            return op.run(fuselage, given, {} if x in inputs else {x: tensor})["q_out"]

        primal = detached.get(x, op.defaults.get(x))
        with pytest.raises(RuntimeError, match="forward-mode"):
            torch.func.jvp(run, (primal,), (torch.ones_like(primal),))


@pytest.mark.kernels_ci
@each_name
def test_tables_with_a_gradient_are_refused(fuselage, device, name):
    op, inputs = Case().make(name, torch.float32, device)
    for table in ("cos", "sin"):
        wrong = {table: op.defaults[table].clone().requires_grad_()}
        refuses(op, fuselage, inputs, wrong, "`cos` and `sin` must not require a gradient")
        with torch.no_grad():
            op.run(fuselage, inputs, wrong)


# Errors


@pytest.mark.kernels_ci
@each_name
def test_bad_inputs(fuselage, device, name):
    op, inputs = Case(dim=8, q_heads=4, k_heads=2).make(name, torch.bfloat16, device)
    q, k, cos, sin = inputs["q"], inputs["k"], op.defaults["cos"], op.defaults["sin"]
    ids = torch.zeros(2, 5, dtype=torch.int64, device=device)
    for wrong, *words in (
        ({"q": q.double()}, "`q` must be float16, bfloat16 or float32, got Double"),
        ({"q": q[0, 0]}, "`q` must have shape", r"got \[4, 8\]"),
        ({"q": q[None]}, "`q` must have shape", r"got \[1, 2, 5, 4, 8\]"),
        ({"q": q[0, 0, 0, 0]}, "`q` must have shape", r"got \[\]"),
        ({"k": k.float()}, "`k` must be bfloat16 as `q`, got float32"),
        ({"k": k[:1]}, r"`k` must have the shape of `q` \[2, 5, 4, 8\]", r"got \[1, 5, 2, 8\]"),
        ({"k": k[..., :6]}, "`k`", r"got \[2, 5, 2, 6\]"),
        ({"k": k[:, :, 0]}, "`k`", r"got \[2, 5, 8\]"),
    ):
        refuses(op, fuselage, {**inputs, **wrong}, {}, *words)
    for options, *words in (
        ({"heads_dim": 3}, "`heads_dim` must be 1 or 2, got 3"),
        ({"cos": cos.half()}, "`cos` must be bfloat16 as `q`, or float32, got float16"),
        ({"cos": cos.double()}, "`cos` must be float16, bfloat16 or float32"),
        ({"cos": cos.long(), "sin": sin.long()}, "`cos` must be", "got Long"),
        ({"sin": sin.float()}, "`sin` must be bfloat16 as `cos`, got Float"),
        ({"sin": sin[:4]}, r"`sin` must have the shape of `cos` \[5, 8\], got \[4, 8\]"),
        ({"cos": cos[:4], "sin": sin[:4]}, r"`cos` must have shape \[5, columns\]", "offset"),
        ({"cos": cos[0], "sin": sin[0]}, "`cos` must have shape", r"got \[8\]"),
        ({"cos": cos.expand(3, 5, 8), "sin": sin.expand(3, 5, 8)}, "`cos`", r"got \[3, 5, 8\]"),
        ({"cos": cos.repeat(1, 2), "sin": sin.repeat(1, 2)}, "at most 8", r"got \[5, 16\]"),
        ({"cos": cos[:, :3], "sin": sin[:, :3]}, "an even number of columns", r"got \[5, 3\]"),
        ({"cos": cos[:, :4], "sin": sin[:, :4]}, "half the columns", "rotary_dim=8", "_dim=4"),
        ({"rotary_dim": 6}, r"`cos` must have `rotary_dim` columns, 6, or half as many"),
        ({"rotary_dim": 7}, "`rotary_dim` must be even and at most 8", "got 7"),
        ({"rotary_dim": 10}, "`rotary_dim` must be even and at most 8", "got 10"),
        ({"position_ids": ids.float()}, "`position_ids` must be int64 or int32, got Float"),
        ({"position_ids": ids[:, :4]}, "`position_ids` must have shape", r"got \[2, 4\]"),
        ({"position_ids": ids.expand(2, 2, 5)}, "`position_ids`", r"got \[2, 2, 5\]"),
        ({"position_ids": ids, "offset": 1}, "`position_ids` and `offset` must not both"),
        ({"position_ids": ids, "cos": cos[None], "sin": sin[None]}, "`cos`", r"\[positions"),
        (
            {"offset": 1},
            "`cos` must have a row for each token, for an offset of 1",
            r"got \[5, 8\]",
        ),
        ({"offset": 2**63 - 2}, "an offset of 9223372036854775806 and 5 tokens"),
        (
            {"position_ids": ids, "cos": cos[:0], "sin": sin[:0]},
            "`cos` must have rows",
            r"\[0, 8\]",
        ),
        ({"offset": -1}, "an offset of -1"),
        ({"offset": ids[0, :3]}, r"`offset` must be an int, or have shape \[1\] or \[2\]"),
        ({"offset": ids[0, :2].float()}, "`offset` must be int64 or int32, got Float"),
    ):
        refuses(op, fuselage, inputs, options, *words)
    if name == "qk_norm_rotary":
        weight = inputs["q_weight"]
        for wrong, word in (
            (weight[:7], r"must have shape \[8\]"),
            (weight[None], r"got \[1, 8\]"),
            (weight.half(), "must be bfloat16 as `q`, or float32, got float16"),
        ):
            for x in ("q_weight", "k_weight"):
                refuses(op, fuselage, {**inputs, x: wrong}, {}, f"`{x}`", word)


@each_name
def test_other_devices(fuselage, device, name):
    """A tensor on the meta device among real ones, and all of them there."""
    op, inputs = Case(heads_dim=1).make(name, torch.float32, device)
    for x in list(inputs)[1:]:
        refuses(op, fuselage, {**inputs, x: inputs[x].to("meta")}, {}, f"`{x}`", "device")
    for x in ("cos", "sin"):
        refuses(op, fuselage, inputs, {x: op.defaults[x].to("meta")}, f"`{x}`", "device")
    meta = {n: t.transpose(1, 2).to("meta").transpose(1, 2) for n, t in inputs.items() if n in "qk"}
    weights = {n: t.to("meta") for n, t in inputs.items() if n not in meta}
    tables = {n: op.defaults[n].to("meta") for n in ("cos", "sin")}
    for label, out in op.run(fuselage, {**meta, **weights}, tables).items():
        assert out.device.type == "meta" and out.stride() == meta[label[0]].stride()


@pytest.mark.gpu
@each_name
def test_cpu_tensors_among_those_of_a_gpu(fuselage, name):
    op, inputs = Case(positions="ids:int64").make(name, torch.float32, "cuda")
    for x in list(inputs)[1:]:
        refuses(op, fuselage, {**inputs, x: inputs[x].cpu()}, {}, f"`{x}`", "got cpu")
    for x in ("cos", "sin", "position_ids"):
        refuses(op, fuselage, inputs, {x: op.defaults[x].cpu()}, f"`{x}`", "got cpu")


@pytest.mark.gpu
def test_the_longest_head_of_the_norm(fuselage):
    for dtype, rotated, most in (
        (torch.bfloat16, None, 2048),
        (torch.bfloat16, 2, 2048),
        (torch.float32, None, 2048),
        (torch.float32, 2, 1536),
        (torch.float32, 514, 1536),
    ):
        for interleaved in (False, True):
            case = Case(dim=most, rotary_dim=rotated, interleaved=interleaved)
            op, inputs = case.make("qk_norm_rotary", dtype, "cuda")
            check(op, fuselage, inputs)
            op, inputs = replace(case, dim=most + 2).make("qk_norm_rotary", dtype, "cuda")
            refuses(op, fuselage, inputs, {}, f"`q` must be at most {most} on a GPU", "rms_norm")


# Packed: [tokens, heads, dim]


@pytest.mark.kernels_ci
@each_name
@pytest.mark.parametrize("tokens", [1, 3, 4, 70])
def test_packed_has_the_bits_of_one_sequence(fuselage, device, name, tokens):
    """Also where there are as many tokens as heads, and q and k are parts of one projection."""
    case = Case(1, tokens, 4, 4, packed=True, positions="shared_ids:int64")
    op, inputs = case.make(name, torch.bfloat16, device)
    whole = normal((tokens, 12, 64), torch.bfloat16, device)
    inputs |= {"q": whole[:, :4], "k": whole[:, 4:8]}
    unpacked = {n: t[None] if n in "qk" else t for n, t in inputs.items()}
    actual, expected = (op.run(fuselage, i, {}) for i in (inputs, unpacked))
    grad_outs = random_grad_outs(actual)
    grads = check_rotary_gradients(op, fuselage, inputs, grad_outs=grad_outs)
    grad_outs = {n: g[None] for n, g in grad_outs.items()}
    expected_grads = check_rotary_gradients(op, fuselage, unpacked, grad_outs=grad_outs)
    for n, out in actual.items():
        assert_same_bits(out, expected[n][0], n)
    for n, grad in grads.items():
        assert_same_bits(grad, expected_grads[n].view(grad.shape), f"gradient of {n}")
    if name == "apply_rotary":
        before = whole[:, 8:].clone()
        replace(op, name="apply_rotary_").run(fuselage, inputs, {})
        assert_same_bits(whole[:, :4], expected["q_out"][0], "q in place")
        assert_same_bits(whole[:, 4:8], expected["k_out"][0], "k in place")
        assert_same_bits(whole[:, 8:], before, "v")


@pytest.mark.kernels_ci
@each_name
def test_what_may_be_packed_or_not_is_refused(fuselage, device, name):
    op, inputs = Case(4, 4, None, None, 8).make(name, torch.float32, device)
    cos, sin = op.defaults["cos"], op.defaults["sin"]
    ids = torch.arange(4, device=device)
    refuses(op, fuselage, inputs, {}, "`q`", r"\[1, tokens, columns\]", r"position_ids of \[tokens")
    wrong = {"position_ids": ids[:3]}
    refuses(op, fuselage, inputs, wrong, "`position_ids` must have shape", "for a packed `q`")
    if name == "apply_rotary":
        kept = inputs["q"].clone()
        with pytest.raises(RuntimeError, match=r"fuselage::apply_rotary_: `q` .*or packed"):
            replace(op, name="apply_rotary_").run(fuselage, inputs, {})
        assert_same_bits(inputs["q"], kept, "q, which was refused")
    # Either way to be explicit is taken, and they differ.
    batched, indexed, packed = (
        op.run(fuselage, inputs, options)["q_out"]
        for options in (
            {"cos": cos[None], "sin": sin[None]},
            {"position_ids": ids[None]},
            {"position_ids": ids},
        )
    )
    assert_same_bits(batched, indexed, "tables of [1, tokens, columns], ids of [1, tokens]")
    turned = {n: t.transpose(0, 1) if n in "qk" else t for n, t in inputs.items()}
    expected = op.run(fuselage, turned, {"position_ids": ids[None]})["q_out"]
    assert_same_bits(packed.transpose(0, 1), expected, "packed")
    assert not torch.equal(packed, batched)
    # One sequence of one token is the same in both.
    one = {n: t[:1, :1] if n in "qk" else t for n, t in inputs.items()}
    op.run(fuselage, one, {"cos": cos[:1], "sin": sin[:1]})


# In place


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "q_alone", "partial", "partial_odd", "heads_first", "offsets", "interleaved"),
        *("packed", "packed_square"),
    ],
)
def test_in_place(fuselage, device, kind):
    op, inputs = KINDS[kind].make("apply_rotary", torch.bfloat16, device)
    expected = op.run(fuselage, inputs, {})
    versions = [t._version for t in inputs.values() if t is not None]
    results = replace(op, name="apply_rotary_").run(fuselage, inputs, {})
    for label, result in results.items():
        assert result is inputs[label[0]]
        assert_same_bits(result, expected[label], label)
    assert [t._version for t in inputs.values() if t is not None] == [v + 1 for v in versions]


def test_in_place_of_a_packed_projection(fuselage, device):
    """q and k as parts of one tensor: nothing else of it is written."""
    for dim in (64, 22):
        op, _ = Case(3, 5, dim=dim).make("apply_rotary", torch.bfloat16, device)
        packed = normal((3, 5, 8, dim), torch.bfloat16, device)
        for heads_dim, whole in ((2, packed.clone()), (1, packed.transpose(1, 2).contiguous())):
            parts = whole.split((4, 2, 2), dim=heads_dim)
            before = parts[2].clone()
            options = {"heads_dim": heads_dim}
            expected = op.run(fuselage, {"q": parts[0], "k": parts[1]}, options)
            replace(op, name="apply_rotary_").run(fuselage, {"q": parts[0], "k": parts[1]}, options)
            assert_same_bits(parts[0], expected["q_out"], "q")
            assert_same_bits(parts[1], expected["k_out"], "k")
            assert_same_bits(parts[2], before, "v")


def test_in_place_of_heads_packed_together(fuselage, device):
    """As GPT-NeoX has them: q, k and v of a head side by side."""
    op, _ = Case(3, 5, 4, 4, 8).make("apply_rotary", torch.float32, device)
    packed = normal((3, 5, 4, 24), torch.float32, device)
    q, k, v = packed.split(8, dim=-1)
    before = v.clone()
    expected = op.run(fuselage, {"q": q, "k": k}, {})
    replace(op, name="apply_rotary_").run(fuselage, {"q": q, "k": k}, {})
    assert_same_bits(q, expected["q_out"], "q")
    assert_same_bits(k, expected["k_out"], "k")
    assert_same_bits(v, before, "v")


def test_in_place_of_a_lazy_copy(fuselage, device):
    op, inputs = Case().make("apply_rotary", torch.float32, device)
    kept = {n: t.clone() for n, t in inputs.items()}
    copies = {n: torch._lazy_clone(t) for n, t in inputs.items()}
    replace(op, name="apply_rotary_").run(fuselage, copies, {})
    for label, tensor in kept.items():
        assert_same_bits(inputs[label], tensor, label)
        assert not torch.equal(copies[label], tensor)


@pytest.mark.kernels_ci
def test_in_place_refuses(fuselage, device):
    op, inputs = Case(2, 5, 4, 4, 8).make("apply_rotary", torch.float32, device)
    op = replace(op, name="apply_rotary_")
    q = inputs["q"]
    kept = {n: t.clone() for n, t in inputs.items()}
    packed = normal((2, 5, 6, 8), torch.float32, device)
    wide = normal((2, 5, 4, 16), torch.float32, device)
    for wrong, word in (
        ({"q": q[:, :, :1].expand(2, 5, 4, 8)}, "`q` is written in place"),
        ({"k": q[:1].expand(2, 5, 4, 8)}, "`k` is written in place"),
        ({"q": normal((2, 5, 4, 16), torch.float32, device)[..., ::2]}, "`q` is written in place"),
        ({"q": q, "k": q}, "`q` and `k` are both written"),
        ({"q": packed[:, :, :4], "k": packed[:, :, 2:]}, "`q` and `k` are both written"),
        ({"q": wide[..., :8], "k": wide[..., 4:12]}, "`q` and `k` are both written"),
    ):
        with pytest.raises(RuntimeError, match=word):
            op.run(fuselage, {**inputs, **wrong}, {})
    with pytest.raises(RuntimeError, match="has no gradient; use apply_rotary"):
        op.run(fuselage, {**inputs, "q": q.clone().requires_grad_()}, {})
    for name, tensor in kept.items():
        assert_same_bits(inputs[name], tensor, name)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("written", ["q", "k"])
@pytest.mark.parametrize("read", ["cos", "sin", "position_ids", "offset"])
def test_in_place_refuses_a_table_that_it_would_write(fuselage, device, written, read):
    op, inputs = Case(2, 5, 4, 4, 8).make("apply_rotary", torch.float32, device)
    inside = inputs[written].view(-1)[-40:]
    defaults = {
        "cos": {**op.defaults, "cos": inside.view(5, 8)},
        "sin": {**op.defaults, "sin": inside.view(5, 8)},
        "position_ids": {**op.defaults, "position_ids": inside.view(torch.int64)[:5]},
        "offset": {**op.defaults, "offset": inside.view(torch.int32)[:2]},
    }[read]
    if read in ("position_ids", "offset"):
        inside.view(torch.int64).zero_()
    kept = {n: t.clone() for n, t in inputs.items()}
    match = f"apply_rotary_: `{written}` is written in place .* memory with `{read}`"
    with pytest.raises(RuntimeError, match=match):
        replace(op, name="apply_rotary_", defaults=defaults).run(fuselage, inputs, {})
    for name, tensor in kept.items():
        assert_same_bits(inputs[name], tensor, name)
    copied = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in defaults.items()}
    replace(op, name="apply_rotary_", defaults=copied).run(fuselage, inputs, {})


# Streams and CUDA graphs


@pytest.mark.gpu
@each_name
def test_current_stream(fuselage, name):
    """The inputs arrive late on a side stream: a launch on another one would read zeros."""
    op, inputs = Case(4, 512, 16, 4, 128).make(name, torch.bfloat16, "cuda")
    grads = random_grad_outs(op.run(fuselage, inputs, {}))
    expected = run_both_ways(op, fuselage, inputs, grads)
    late = {n: torch.zeros_like(t) for n, t in inputs.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for n, t in inputs.items():
            late[n].copy_(t)
        actual = run_both_ways(op, fuselage, late, grads)
    stream.synchronize()
    for label, value in expected.items():
        assert_same_bits(actual[label], value, label)


@pytest.mark.gpu
@each_name
@pytest.mark.parametrize("dim", [128, 100, 1024])
def test_cuda_graph(fuselage, name, dim):
    """Forward and backward captured once, replayed on new data and new positions."""
    case = Case(8, 3, 8, 2, dim, positions="offsets:int64")
    op, static = case.make(name, torch.bfloat16, "cuda")
    offset = op.defaults["offset"]
    grads = random_grad_outs(op.run(fuselage, static, {}))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_both_ways(op, fuselage, static, grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_both_ways(op, fuselage, static, grads)
    for step in range(3):
        for t in (*static.values(), *grads.values()):
            t.normal_()
        offset.fill_(step)
        graph.replay()
        for label, value in run_both_ways(op, fuselage, static, grads).items():
            assert_same_bits(captured[label], value, label)


def test_the_tolerance_is_of_the_terms(fuselage, device):
    """x1 = x2 and cos = sin cancel: what is left is noise of the size of the terms."""
    x = torch.ones(1, 1, 1, 2, device=device) / 3
    half = torch.full((1, 2), 0.5**0.5, device=device)
    out = fuselage.apply_rotary(x, None, half, half)
    assert abs(out[..., 0].item()) <= UNIT[torch.float32]
    expected = rotary_operator("apply_rotary", cos=half, sin=half)
    reference = expected.reference(x.double(), None, half, half)
    assert_close(out, reference, "out", terms=torch.full_like(reference, 0.25))


def test_like_transformers(fuselage, device):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    op, inputs = Case(heads_dim=1, table_batch=2).make("apply_rotary", torch.float32, device)
    expected = llama.apply_rotary_pos_emb(**inputs, cos=op.defaults["cos"], sin=op.defaults["sin"])
    for theirs, ours in zip(expected, op.run(fuselage, inputs, {}).values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    plain = eager.apply_rotary(**inputs, **op.defaults)
    for theirs, ours in zip(expected, plain, strict=True):
        assert_same_bits(ours, theirs, "tests/eager.py")
