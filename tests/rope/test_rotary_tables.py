"""The tables of video models: against their formulas, and diffusers where it is installed."""

from __future__ import annotations

import math

import pytest
import torch

# Float32 angles of up to 2000 pi: half a unit in the last place of the angle.
ANGLE_ERROR = 5e-4


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dim", [12, 32, 64])
def test_ltx_video(fuselage, device, dim):
    sizes, scale, base = (3, 4, 5), (0.16, 32.0, 32.0), (20, 2048, 2048)
    cos, sin = fuselage.ltx_video_rotary_tables(*sizes, dim, scale=scale, device=device)
    assert cos.shape == sin.shape == (60, dim) and cos.dtype == torch.float32
    count, still = dim // 6, dim % 6
    assert (cos[:, :still] == 1).all() and (sin[:, :still] == 0).all()
    for token in (0, 7, 59):
        place = (token // 20, token // 5 % 4, token % 5)
        for column in range(still, dim):
            frequency, axis = divmod((column - still) // 2, 3)
            f = 10000 ** (frequency / (count - 1)) * math.pi / 2
            angle = f * (2 * place[axis] * scale[axis] / base[axis] - 1)
            assert abs(cos[token, column].item() - math.cos(angle)) <= ANGLE_ERROR * max(1, f / 1e3)
            assert abs(sin[token, column].item() - math.sin(angle)) <= ANGLE_ERROR * max(1, f / 1e3)


@pytest.mark.parametrize("dim", [16, 24, 128])
def test_wan(fuselage, device, dim):
    cos, sin = fuselage.wan_rotary_tables(3, 4, 5, dim, device=device, dtype=torch.float64)
    assert cos.shape == sin.shape == (60, dim)
    part = 2 * (dim // 6)
    starts = ((0, dim - 2 * part), (dim - 2 * part, part), (dim - part, part))
    for token in (0, 7, 59):
        place = (token // 20, token // 5 % 4, token % 5)
        for position, (start, columns) in zip(place, starts, strict=True):
            for column in range(columns):
                angle = position * 10000 ** (-2 * (column // 2) / columns)
                torch.testing.assert_close(cos[token, start + column].item(), math.cos(angle))
                torch.testing.assert_close(sin[token, start + column].item(), math.sin(angle))


def test_wan_heads_are_even(fuselage, device):
    with pytest.raises(RuntimeError, match="`dim` must be even, got 15"):
        fuselage.wan_rotary_tables(3, 4, 5, 15, device=device)


def test_like_diffusers(fuselage, device):
    ltx = pytest.importorskip("diffusers.models.transformers.transformer_ltx")
    wan = pytest.importorskip("diffusers.models.transformers.transformer_wan")
    hidden = torch.empty(1, 60, 64, device=device)
    for scale in (None, (0.16, 32.0, 32.0)):
        for dim in (64, 66):
            theirs = ltx.LTXVideoRotaryPosEmbed(dim)(hidden, 3, 4, 5, scale)
            ours = fuselage.ltx_video_rotary_tables(3, 4, 5, dim, scale=scale, device=device)
            for actual, expected in zip(ours, theirs, strict=True):
                torch.testing.assert_close(actual, expected[0], rtol=0, atol=2 * ANGLE_ERROR)
    video = torch.empty(1, 4, 3, 8, 10, device=device)
    theirs = wan.WanRotaryPosEmbed(128, (1, 2, 2), 64).to(device)(video)
    ours = fuselage.wan_rotary_tables(3, 4, 5, 128, device=device)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected[0, :, 0])


def test_they_are_what_apply_rotary_takes(fuselage, device):
    q = torch.randn(2, 60, 64, device=device)
    cos, sin = fuselage.ltx_video_rotary_tables(3, 4, 5, 64, device=device)
    out = fuselage.apply_rotary(q, None, cos, sin, interleaved=True)
    pairs, rotated = (t.unflatten(-1, (-1, 2)).norm(dim=-1) for t in (q, out))
    torch.testing.assert_close(rotated, pairs)  # a rotation keeps lengths
    heads = q.unflatten(-1, (4, 16))
    cos, sin = fuselage.wan_rotary_tables(3, 4, 5, 16, device=device)
    out = fuselage.apply_rotary(heads, heads, cos[None, :, None], sin[None, :, None])
    assert out[0].shape == heads.shape
    assert torch.equal(out[0][:, 0], heads[:, 0])  # the first token is at the origin
