#!/usr/bin/env python3
"""The transformer of LTX-Video (diffusers) with fuselage: checks its output, and times it.

`make build` and `pip install diffusers==0.42.1` first. The weights are random: none are downloaded.
By default the model has a fraction of its size and the video a fraction of its pixels; `--full` is
the size of LTX-Video 0.9 and 49 frames of 512x768 pixels, for a GPU.

    python examples/diffusers_ltx_video.py
    python examples/diffusers_ltx_video.py --full --steps 30
"""

import argparse
import copy
import sys
import time
from itertools import pairwise

import torch
from demo import check, load


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="28 layers, bfloat16, 49x512x768")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of denoising")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def build_transformer(options: argparse.Namespace, device: str) -> torch.nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    small = {"num_layers": options.layers, "num_attention_heads": 4, "cross_attention_dim": 256}
    with torch.device(device):
        model = LTXVideoTransformer3DModel(**({} if options.full else small))
    return model.to(torch.bfloat16 if options.full else torch.float32).eval()


def make_inputs(options: argparse.Namespace, model: torch.nn.Module, device: str) -> dict:
    # The autoencoder makes one token of 8 frames (but for the first one) of 32x32 pixels.
    frames, height, width = (7, 16, 24) if options.full else (3, 6, 8)
    like = {"device": device, "dtype": model.dtype}
    return {
        "hidden_states": torch.randn(1, frames * height * width, 128, **like),
        "encoder_hidden_states": torch.randn(1, 128 if options.full else 16, 4096, **like),
        "encoder_attention_mask": torch.ones(1, 128 if options.full else 16, device=device),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


@torch.no_grad()
def denoise(model: torch.nn.Module, inputs: dict, steps: int) -> torch.Tensor:
    """Euler steps from noise along the velocity that the model predicts."""
    inputs = dict(inputs)
    sigmas = torch.linspace(1.0, 0.0, steps + 1).tolist()
    for sigma, following in pairwise(sigmas):
        time_step = torch.tensor([1000 * sigma], device=inputs["hidden_states"].device)
        velocity = model(**inputs, timestep=time_step, return_dict=False)[0]
        inputs["hidden_states"] = inputs["hidden_states"] + (following - sigma) * velocity
    return inputs["hidden_states"]


def seconds(model: torch.nn.Module, inputs: dict, steps: int) -> float:
    """Of one denoising, the second one: the first compiles."""
    wait = torch.cuda.synchronize if inputs["hidden_states"].is_cuda else bool
    denoise(model, inputs, 2)
    wait()
    start = time.perf_counter()
    denoise(model, inputs, steps)
    wait()
    return time.perf_counter() - start


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    kernel, device = load()
    if options.full and device == "cpu":
        sys.exit("FAILED: --full needs a GPU")
    plain = build_transformer(options, device)
    inputs = make_inputs(options, plain, device)
    fused = plain if options.full else copy.deepcopy(plain)
    expected = denoise(plain, inputs, options.steps)
    times = {"eager": seconds(plain, inputs, options.steps)}
    print(kernel.integrations.diffusers.patch(fused))
    actual = denoise(fused, inputs, options.steps)
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    print(f"after {options.steps} steps the latents differ by {error:.1e} of the largest")
    limit = 0.05 if options.full else 1e-4  # bfloat16 or float32 noise of the whole model
    check(error <= limit, f"that is more than {limit}")
    times["fuselage"] = seconds(fused, inputs, options.steps)
    if not options.no_compile:
        times["fuselage, compiled"] = seconds(torch.compile(fused), inputs, options.steps)
    for name, value in times.items():
        print(f"{name:20} {value:8.3f} s for {options.steps} steps")


if __name__ == "__main__":
    main()
