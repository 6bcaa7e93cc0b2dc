"""For `kernels benchmark`: times each operator as a user calls it, beside PyTorch's own.

    pip install 'kernels[benchmark]'
    kernels benchmark fuselage-kernels/fuselage@v1     # or a checkout that was built: ./

The command times wall-clock and synchronises after each call, so it includes the launch. Device
time against the hardware's limit is the matter of `benchmarks/roofline`.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

EPS = 1e-6
LORA_SCALE = 0.5


class Sizes:
    """Random inputs. The command allows errors of 1e-2; small weights keep bfloat16 within it."""

    seed = 20261121

    def make(self, rows: int, dim: int) -> None:
        options = {"device": self.device, "dtype": torch.bfloat16}
        self.x = torch.randn(rows, dim, **options)
        self.residual = torch.randn(rows, dim, **options)
        self.weight = torch.rand(dim, **options).mul_(0.2)
        # For the gated activations and the epilogues: small enough for the same bound.
        self.gate = torch.rand(rows, dim, **options)
        self.up = torch.rand(rows, dim, **options)
        self.packed = torch.cat([self.gate, self.up], -1)
        self.grad_out = torch.randn(rows, dim, **options)

    def setup_one_row(self) -> None:
        self.make(1, 4096)

    def setup_small(self) -> None:
        self.make(128, 4096)

    def setup_medium(self) -> None:
        self.make(2048, 4096)

    def setup_large(self) -> None:
        self.make(16384, 4096)


class RmsNorm(Sizes, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.rms_norm(self.x, self.weight, EPS)

    def reference(self) -> torch.Tensor:
        return F.rms_norm(self.x, self.weight.shape, self.weight, EPS)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class RmsNormAddRmsNorm(Sizes, Benchmark):
    def fused(self) -> None:
        self.out, self.new_residual = self.kernel.rms_norm_add_rms_norm(
            self.x, self.residual, self.weight, self.weight, EPS
        )

    def reference(self) -> torch.Tensor:
        n = F.rms_norm(self.x, self.weight.shape, self.weight, EPS)
        return F.rms_norm(self.residual + n, self.weight.shape, self.weight, EPS)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class FusedAddRmsNorm(Sizes, Benchmark):
    def fused(self) -> None:
        self.out, self.new_residual = self.kernel.fused_add_rms_norm(
            self.x, self.residual, self.weight, EPS
        )

    def reference(self) -> torch.Tensor:
        new_residual = self.x + self.residual
        return F.rms_norm(new_residual, self.weight.shape, self.weight, EPS)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class RmsNormTraining(Sizes, Benchmark):
    """Forward and backward together; the gradient of x is what is compared."""

    def make(self, rows: int, dim: int) -> None:
        super().make(rows, dim)
        self.x.requires_grad_()
        self.weight.requires_grad_()

    def gradient(self, out: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(out, (self.x, self.weight), self.grad_out)[0]

    def fused(self) -> None:
        self.out = self.gradient(self.kernel.rms_norm(self.x, self.weight, EPS))

    def reference(self) -> torch.Tensor:
        return self.gradient(F.rms_norm(self.x, self.weight.shape, self.weight, EPS))

    benchmark_small = benchmark_medium = benchmark_large = fused
    verify_small = verify_medium = verify_large = reference


class LayerNorm(Sizes, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.layer_norm(self.x, self.weight, self.bias, EPS)

    def reference(self) -> torch.Tensor:
        return F.layer_norm(self.x, self.weight.shape, self.weight, self.bias, EPS)

    def make(self, rows: int, dim: int) -> None:
        super().make(rows, dim)
        self.bias = torch.rand(dim, device=self.device, dtype=torch.bfloat16).mul_(0.2)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class AdaptiveSizes(Sizes):
    """One batch element. Scale and shift leave results as small as those of the other norms."""

    def make(self, rows: int, dim: int) -> None:
        super().make(rows, dim)
        self.x, self.residual = self.x[None], self.residual[None]
        modulation = torch.rand(1, 3, dim, device=self.device, dtype=torch.bfloat16)
        self.gate, self.scale, self.shift = modulation.mul_(0.2).sub_(0.9).unbind(1)

    def formula(self, x: torch.Tensor) -> torch.Tensor:
        n = F.layer_norm(x.float(), x.shape[-1:], None, None, EPS)
        return (n * (1 + self.scale.float()) + self.shift.float()).to(x.dtype)


class AdaLayerNorm(AdaptiveSizes, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.ada_layer_norm(self.x, self.scale, self.shift, eps=EPS)

    def reference(self) -> torch.Tensor:
        return self.formula(self.x)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class GatedRmsNorm(Sizes, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.gated_rms_norm(self.x, self.residual, self.weight, EPS)

    def reference(self) -> torch.Tensor:
        x, weight = self.x.float(), self.weight.float()
        normalised = F.rms_norm(x, weight.shape, weight, EPS)
        return (normalised * F.silu(self.residual.float())).to(self.x.dtype)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class GroupNormSilu(Benchmark):
    """Of a UNet's blocks and of an autoencoder's; with channels last as well."""

    seed = 20261121

    def make(self, *shape: int, last: bool = False) -> None:
        options = {"device": self.device, "dtype": torch.bfloat16}
        self.x = torch.randn(shape, **options)
        if last:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.weight, self.bias = (torch.rand(shape[1], **options).mul_(0.2) for _ in range(2))

    def setup_unet(self) -> None:
        self.make(2, 640, 64, 64)

    def setup_decoder(self) -> None:
        self.make(1, 256, 512, 512)

    def setup_channels_last(self) -> None:
        self.make(2, 640, 64, 64, last=True)

    def fused(self) -> None:
        self.out = self.kernel.group_norm(
            self.x, 32, self.weight, self.bias, EPS, activation="silu"
        )

    def reference(self) -> torch.Tensor:
        parameters = (self.weight.float(), self.bias.float())
        return F.silu(F.group_norm(self.x.float(), 32, *parameters, EPS)).to(self.x.dtype)

    benchmark_unet = benchmark_decoder = benchmark_channels_last = fused
    verify_unet = verify_decoder = verify_channels_last = reference


class GateResidualAdaNorm(AdaptiveSizes, Benchmark):
    def fused(self) -> None:
        self.out, self.new_residual = self.kernel.gate_residual_ada_norm(
            self.x, self.residual, self.gate, self.scale, self.shift, eps=EPS
        )

    def reference(self) -> torch.Tensor:
        new_residual = self.residual.float() + self.gate.float() * self.x.float()
        return self.formula(new_residual.to(self.x.dtype))

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class PolyNormSizes(Sizes):
    def make(self, rows: int, dim: int) -> None:
        super().make(rows, dim)
        self.weight = torch.tensor([0.1, 0.1, 0.1], device=self.device, dtype=torch.bfloat16)
        self.bias = torch.zeros(1, device=self.device, dtype=torch.bfloat16)

    def formula(self) -> torch.Tensor:
        x, weight = self.x.float(), self.weight.float()
        powers = (x**3, x**2, x)
        norms = [u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + EPS) for u in powers]
        return sum(w * norm for w, norm in zip(weight, norms)) + self.bias.float()


class PolyNorm(PolyNormSizes, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.poly_norm(self.x, self.weight, self.bias, EPS)

    def reference(self) -> torch.Tensor:
        return self.formula().to(self.x.dtype)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class FusedMulPolyNorm(PolyNormSizes, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.fused_mul_poly_norm(
            self.x, self.residual, self.weight, self.bias, EPS
        )

    def reference(self) -> torch.Tensor:
        return (self.formula() * self.residual.float()).to(self.x.dtype)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class GroupedPolyNorm(PolyNormSizes, Benchmark):
    """Eight experts of about one size, all with the same weights, and no padding."""

    def make(self, rows: int, dim: int) -> None:
        super().make(rows, dim)
        self.weights, self.biases = self.weight.repeat(8, 1), self.bias.repeat(8, 1)
        ends = torch.arange(1, 9, device=self.device) * rows // 8
        self.offs = ends.to(torch.int32)

    def fused(self) -> None:
        self.out = self.kernel.grouped_poly_norm(
            self.x, self.residual, self.weights, self.biases, self.offs, EPS
        )

    def reference(self) -> torch.Tensor:
        return (self.formula() * self.residual.float()).to(self.x.dtype)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class SiluAndMul(Sizes, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.silu_and_mul(self.packed)

    def reference(self) -> torch.Tensor:
        gate, up = self.packed.chunk(2, dim=-1)
        return F.silu(gate) * up

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class AddMulAct(Sizes, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.add_mul_act(self.gate, self.weight, self.up, LORA_SCALE, "silu")

    def reference(self) -> torch.Tensor:
        return F.silu(self.gate + self.weight + LORA_SCALE * self.up)

    benchmark_one_row = benchmark_small = benchmark_medium = benchmark_large = fused
    verify_one_row = verify_small = verify_medium = verify_large = reference


class ApplyRotary(Benchmark):
    """Queries and keys of Llama 3 8B."""

    seed = 20261121

    def make(self, batch: int, tokens: int) -> None:
        options = {"device": self.device, "dtype": torch.bfloat16}
        # The command allows errors of 1e-2.
        self.q = torch.rand(batch, tokens, 32, 128, **options)
        self.k = torch.rand(batch, tokens, 8, 128, **options)
        angles = torch.rand(tokens, 64, device=self.device)
        self.cos, self.sin = (t.repeat(1, 2).bfloat16() for t in (angles.cos(), angles.sin()))
        self.weight = torch.rand(128, **options)

    def setup_decode(self) -> None:
        self.make(64, 1)

    def setup_prompt(self) -> None:
        self.make(1, 2048)

    def setup_training(self) -> None:
        self.make(4, 4096)

    def fused(self) -> None:
        self.out, self.k_out = self.kernel.apply_rotary(self.q, self.k, self.cos, self.sin)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.float().chunk(2, -1)
        cos, sin = self.cos[:, None].float(), self.sin[:, None].float()
        return (x.float() * cos + torch.cat((-x2, x1), -1) * sin).to(x.dtype)

    def reference(self) -> torch.Tensor:
        self.rotated(self.k)
        return self.rotated(self.q)

    benchmark_decode = benchmark_prompt = benchmark_training = fused
    verify_decode = verify_prompt = verify_training = reference


class QkNormRotary(ApplyRotary):
    """The same after Qwen3's norms of queries and keys."""

    def fused(self) -> None:
        weights = (self.weight, self.weight)
        self.out, self.k_out = self.kernel.qk_norm_rotary(
            self.q, self.k, *weights, self.cos, self.sin, EPS
        )

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        return super().rotated(F.rms_norm(x.float(), (128,), self.weight.float(), EPS)).to(x.dtype)

    def reference(self) -> torch.Tensor:
        self.rotated(self.k)
        return self.rotated(self.q)

    benchmark_decode = benchmark_prompt = benchmark_training = fused
    verify_decode = verify_prompt = verify_training = reference


class LmHeadSample(Benchmark):
    """The head of Qwen3 8B. One token of each row is certain, so that every draw can be checked."""

    seed = 20261121

    def make(self, batch: int) -> None:
        vocab, dim, lead = (151936, 4096, 60.0) if self.device != "cpu" else (32768, 1024, 60.0)
        self.weight = torch.randn(vocab, dim, device=self.device, dtype=torch.bfloat16)
        own = self.weight[torch.randint(vocab, (batch,), device=self.device)].float()
        self.hidden = (own * (lead / own.square().sum(1, keepdim=True))).bfloat16()

    def setup_one_row(self) -> None:
        self.make(1)

    def setup_batch(self) -> None:
        self.make(64)

    def fused(self) -> None:
        self.out = self.kernel.lm_head_sample(self.hidden, self.weight)

    def reference(self) -> torch.Tensor:
        logits = (self.hidden @ self.weight.T).float()
        return torch.multinomial(torch.softmax(logits, -1), 1)

    benchmark_one_row = benchmark_batch = fused
    verify_one_row = verify_batch = reference


class Logits:
    """The logits of Llama 3, and their targets."""

    seed = 20261121

    def make(self, rows: int) -> None:
        vocab = 128256 if self.device != "cpu" else 32000
        self.logits = torch.randn(rows, vocab, device=self.device, dtype=torch.bfloat16)
        self.targets = torch.randint(vocab, (rows,), device=self.device)

    def setup_small(self) -> None:
        self.make(64)

    def setup_large(self) -> None:
        self.make(2048 if self.device != "cpu" else 128)


class CrossEntropy(Logits, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.cross_entropy(self.logits, self.targets)

    def reference(self) -> torch.Tensor:
        return F.cross_entropy(self.logits.float(), self.targets)

    benchmark_small = benchmark_large = fused
    verify_small = verify_large = reference


class LogProbs(Logits, Benchmark):
    def fused(self) -> None:
        self.out = self.kernel.log_probs(self.logits, self.targets).log_probs

    def reference(self) -> torch.Tensor:
        every = torch.log_softmax(self.logits.float(), -1)
        return every.gather(-1, self.targets[:, None])[:, 0]

    benchmark_small = benchmark_large = fused
    verify_small = verify_large = reference


class QuantFp8(Benchmark):
    """The input of a product of an 8B model."""

    seed = 20261125

    def setup_decode(self) -> None:
        self.make(8)

    def setup_prefill(self) -> None:
        self.make(16384 if self.device != "cpu" else 256)

    def make(self, rows: int) -> None:
        self.x = torch.randn(rows, 4096, device=self.device, dtype=torch.bfloat16)

    def fused(self) -> None:
        _, self.out = self.kernel.quant_fp8(self.x)

    def reference(self) -> torch.Tensor:
        amax = self.x.float().abs().amax(-1, keepdim=True)
        return amax / torch.full_like(amax, 448.0)

    benchmark_decode = benchmark_prefill = fused
    verify_decode = verify_prefill = reference


class TopkSoftmax(Benchmark):
    """The router of Qwen3-MoE."""

    seed = 20261121

    def setup_one_token(self) -> None:
        self.make(1)

    def setup_many_tokens(self) -> None:
        self.make(16384)

    def make(self, rows: int) -> None:
        self.logits = torch.randn(rows, 128, device=self.device, dtype=torch.bfloat16)

    def fused(self) -> None:
        self.out = self.kernel.topk_softmax(self.logits, 8).weights

    def reference(self) -> torch.Tensor:
        weights, _ = torch.topk(torch.softmax(self.logits.float(), -1), 8, -1)
        return weights / weights.sum(-1, keepdim=True)

    benchmark_one_token = benchmark_many_tokens = fused
    verify_one_token = verify_many_tokens = reference
