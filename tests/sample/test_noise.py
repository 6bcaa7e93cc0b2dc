"""The noise: Philox, the Gumbel distribution to its tails, and what a draw depends on."""

from __future__ import annotations

import numpy as np
import pytest
import sample_reference as reference
import torch

# Counter, key and output of Random123's known answers for philox4x32-10.
PI_COUNTER, PI_KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI_COUNTER, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]

# For seed 0, steps and indices where the word of the group's smallest exponential is the largest,
# and so the noise, or the lowest, or near, at its position and at others; and those where the
# logit's own word is.
MAXIMUM, MINIMUM_OF_POSITIONS = (2, 16 * 509349773 + 3), (6, 16 * 388336734 + 12)
EXTREMES_OF_GROUPS = {
    MAXIMUM: 2**32 - 1,
    (2, 16 * 509349773 + 4): 2**32 - 1,
    (12, 16 * 327623008 + 9): 2**32 - 1,
    (12, 16 * 327623008): 2**32 - 1,
    (0, 16 * 410702502 + 4): 2**32 - 2,
    MINIMUM_OF_POSITIONS: 0,
    (6, 16 * 388336734 + 15): 0,
    (1, 16 * 471032754 + 12): 1,
    (0, 16 * 826190408 + 5): 2,
}
EXTREMES_OF_OWN_WORDS = {
    (0, 8796067786): 0,
    (0, 1041258419): 0,
    (0, 1847002804): 0,
    (0, 13530885291): 2**32 - 1,
    (0, 5069805266): 2**32 - 1,
    (0, 2816313953): 2**32 - 1837,  # of a group whose smallest exponential is small, too
    (0, 13532170439): 2**32 - 6864,
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_of_the_reference_is_the_published_one(counter, key, output):
    assert reference.philox(np.array(counter), np.array(key)).tolist() == list(output)


@pytest.mark.kernels_ci
def test_the_noise_is_that_of_the_published_generator(fuselage, device):
    """Of group 0, whose counter and key are zero as those of the first known answer."""
    zero = torch.tensor([0])
    word, second = KNOWN_ANSWERS[0][2][:2]
    position = second >> 28
    own = [reference.philox(np.array([i, 0, 0, 2**31]), np.zeros(2)) for i in range(4)]
    exponentials = reference.exponential(np.concatenate(own))
    exponentials[position] = 0
    expected = -np.log(reference.exponential(np.array(word)) / 16 + exponentials)
    got = [reference.drawn_noise(fuselage, device, index, zero, zero).item() for index in range(16)]
    assert got == pytest.approx(expected, abs=1e-6)
    assert np.argmax(got) == position == 14


def test_the_noise_is_exact_in_both_tails(fuselage, device):
    def noise_at(offset, index):
        seed, offset = torch.tensor([0]), torch.tensor([offset])
        return reference.drawn_noise(fuselage, device, index, seed, offset).item()

    for (offset, index), word in EXTREMES_OF_GROUPS.items():
        assert reference.group(index, 0, offset)[0] == word
    for (offset, index), word in EXTREMES_OF_OWN_WORDS.items():
        assert reference.own_word(index, 0, offset) == word
        assert reference.group(index, 0, offset)[1] != index % 16
    for offset, index in EXTREMES_OF_GROUPS | EXTREMES_OF_OWN_WORDS:
        expected = reference.noise(index, 0, offset).item()
        got = noise_at(offset, index)
        assert got == pytest.approx(expected, rel=3e-7, abs=3e-7), (offset, index)
    maximum, minimum = 33 * np.log(2) + np.log(16), np.log(16) - np.log(33 * np.log(2))
    assert noise_at(*MAXIMUM) == pytest.approx(maximum, rel=3e-7)
    assert noise_at(*MINIMUM_OF_POSITIONS) == pytest.approx(minimum, rel=3e-7)


@pytest.mark.kernels_ci
def test_the_noise_is_the_float64_formula(fuselage, device):
    seed = torch.randint(-(2**63), 2**63 - 1, (4096,))
    offset = torch.randint(0, 2**63 - 1, (4096,))
    for index in (0, 3, 151935, 2**33 + 1):
        got = reference.drawn_noise(fuselage, device, index, seed, offset)[:, 0].double()
        expected = torch.from_numpy(reference.noise(index, seed.numpy(), offset.numpy()))
        assert ((got - expected).abs() <= 3e-7 * expected.abs().clamp(min=1)).all()
        assert abs(got.mean() - np.euler_gamma) < 6 * np.pi / np.sqrt(6 * 4096)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("vocab_offset", [0, 1, 6, 13, 16, 4099])
@pytest.mark.parametrize("vocab", [1, 5, 64, 1003, 9001])
def test_the_draw_is_that_of_the_float64_reference(fuselage, device, vocab, vocab_offset):
    logits = 3 * torch.randn(3, vocab)
    seed, offset = 2**61 + 12345, 2**35 + 7
    got = fuselage.gumbel_sample(
        logits.to(device),
        temperature=0.7,
        seed=torch.tensor([seed], device=device),
        offset=torch.tensor([offset], device=device),
        num_samples=5,
        vocab_offset=vocab_offset,
    ).cpu()
    for row in range(3):
        for sample in range(5):
            scores = reference.scores(logits[row], 0.7, seed, offset, row, sample, vocab_offset)
            chosen = scores[got[row, sample] - vocab_offset]
            # Two scores that are equal in float32 may be in either order in float64.
            assert chosen >= scores.max() - 2e-6, (row, sample)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("vocab_offset", [0, 13])
def test_of_equal_scores_the_lowest_index_is_drawn(fuselage, device, vocab_offset):
    """Logits so great that a sum with the noise has few values; a group's are not made in order."""
    vocab, logit = 9001, 2.0**26
    seeds = torch.arange(64)
    tokens = fuselage.gumbel_sample(
        torch.full((64, vocab), logit, device=device),
        seed=seeds.to(device),
        vocab_offset=vocab_offset,
    ).cpu()
    index = np.arange(vocab) + vocab_offset
    noise = reference.noise(index, seeds.numpy()[:, None], 0)
    scores = (logit + noise).astype(np.float32)
    assert ((scores == scores.max(1, keepdims=True)).sum(1) > 100).sum() > 32
    assert (tokens[:, 0].numpy() == scores.argmax(1) + vocab_offset).all()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_draws_what_a_cpu_draws(fuselage, device, dtype):
    for batch, vocab in ((1, 151936), (7, 9001), (64, 4096)):
        logits = (4 * torch.randn(batch, vocab)).to(dtype)
        for options in (
            {},
            {"top_k": 50},
            {"top_p": 0.9},
            {"min_p": 0.05},
            {"top_k": 300, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
            {"temperature": 0.0},
            {"vocab_offset": 3, "num_samples": 4},
        ):
            on_cpu = fuselage.gumbel_sample(logits, seed=5, return_logprobs=True, **options)
            on_gpu = fuselage.gumbel_sample(
                logits.to(device), seed=5, return_logprobs=True, **options
            )
            assert torch.equal(on_cpu.tokens, on_gpu.tokens.cpu()), options
            # Weights of a strip are powers of two of a GPU's hardware, whose relative error is
            # 2^-22, and of a CPU's polynomial, 2^-23. Both are rounded to 2^-24 of the largest.
            for name in ("logprobs", "filtered_logprobs"):
                a, b = getattr(on_cpu, name), getattr(on_gpu, name)
                torch.testing.assert_close(b.cpu(), a, rtol=2.0**-22, atol=2.0**-20)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("vocab_offset", [0, 5])
def test_a_gpu_draws_what_a_cpu_draws_where_all_are_candidates(fuselage, device, vocab_offset):
    """More than the kernel keeps to score them together."""
    steep = torch.linspace(0.0, 400.0, 30_001)
    logits = torch.stack([steep, steep.flip(0), torch.zeros(30_001), steep % 7])
    for temperature in (1.0, 0.01, 100.0, 1e6):
        given = {"seed": 3, "num_samples": 3, "temperature": temperature}
        given["vocab_offset"] = vocab_offset
        on_gpu = fuselage.gumbel_sample(logits.to(device), **given)
        assert torch.equal(fuselage.gumbel_sample(logits, **given), on_gpu.cpu()), temperature


# Seeds, offsets and streams


def draws(fuselage, logits, **options) -> list:
    return fuselage.gumbel_sample(logits, num_samples=64, **options).tolist()


@pytest.mark.kernels_ci
def test_a_row_depends_on_its_own_key_alone(fuselage, device):
    logits = torch.randn(6, 1000, device=device)
    seeds = torch.randint(2**62, (6,), device=device)
    offsets = torch.randint(2**62, (6,), device=device)
    together = fuselage.gumbel_sample(logits, num_samples=8, seed=seeds, offset=offsets.clone())
    order = [4, 1, 5]
    some = fuselage.gumbel_sample(
        logits[order], num_samples=8, seed=seeds[order], offset=offsets[order]
    )
    assert torch.equal(together[order], some)
    one = fuselage.gumbel_sample(
        logits[2:3], num_samples=3, seed=seeds[2:3].clone(), offset=offsets[2:3].clone()
    )
    assert torch.equal(together[2:3, :3], one)


def test_rows_of_one_seed_have_streams_of_their_own(fuselage, device):
    logits = torch.zeros(1, 1000, device=device).expand(64, -1)
    tokens = fuselage.gumbel_sample(logits, seed=3)
    assert len(tokens.unique()) > 40
    same_seeds = torch.full((64,), 3, device=device)
    assert len(fuselage.gumbel_sample(logits, seed=same_seeds).unique()) == 1


def test_seed_offset_and_sample_change_the_draw(fuselage, device):
    logits = torch.zeros(1, 100000, device=device)
    first = draws(fuselage, logits, seed=1)
    assert first == draws(fuselage, logits, seed=1)
    assert len(set(first[0])) > 60
    assert first != draws(fuselage, logits, seed=2)
    assert first != draws(fuselage, logits, seed=1 + 2**32)
    zero, one, far = (torch.tensor([n], device=device) for n in (0, 1, 2**32))
    assert first == draws(fuselage, logits, seed=1, offset=zero)
    assert first != draws(fuselage, logits, seed=1, offset=one)
    assert first != draws(fuselage, logits, seed=1, offset=far)


@pytest.mark.kernels_ci
def test_the_offset_advances_where_it_is(fuselage, device):
    logits = torch.randn(3, 257, device=device)
    for size in (1, 3):
        seed, offset = torch.arange(size, device=device), torch.arange(size, device=device) + 5
        first = draws(fuselage, logits, seed=seed, offset=offset)
        assert offset.tolist() == [6 + i for i in range(size)]
        second = draws(fuselage, logits, seed=seed, offset=offset)
        assert first != second
        again = draws(fuselage, logits, seed=seed, offset=torch.arange(size, device=device) + 6)
        assert second == again
        head = torch.randn(16, 4, device=device)
        fuselage.lm_head_sample(logits[:, :4], head, seed=seed, offset=offset)
        fuselage.lm_head_sample_shard(logits[:, :4], head, seed=seed, offset=offset, vocab_offset=0)
        fuselage.gumbel_sample(logits, seed=seed, offset=offset, top_k=3, return_logprobs=True)
        assert offset.tolist() == [10 + i for i in range(size)]


@pytest.mark.kernels_ci
def test_the_default_never_repeats(fuselage, device):
    logits = torch.zeros(1, 2**20, device=device)
    tokens = [fuselage.gumbel_sample(logits).item() for _ in range(20)]
    hidden, head = torch.zeros(1, 4, device=device), torch.zeros(2**18, 4, device=device)
    tokens += [fuselage.lm_head_sample(hidden, head).item() for _ in range(5)]
    assert len(set(tokens)) == 25


def test_strided_seeds_and_offsets(fuselage, device):
    logits = torch.zeros(5, 2**16, device=device)
    many = torch.arange(20, device=device)
    seeds, offsets = many[2::4], (many + 7).view(5, 4)[:, 1]
    expected = fuselage.gumbel_sample(
        logits, seed=seeds.contiguous(), offset=offsets.contiguous(), num_samples=3
    )
    head = {"hidden": torch.zeros(5, 4, device=device), "weight": logits.new_zeros(2**16, 4)}
    steps = offsets.tolist()
    for given in ({"logits": logits}, head, {"logits": logits, "top_p": 1.0}, {**head, "min_p": 0}):
        sample = fuselage.lm_head_sample if "weight" in given else fuselage.gumbel_sample
        base = (many + 7).view(5, 4)
        tokens = sample(**given, seed=seeds, offset=base[:, 1], num_samples=3)
        assert torch.equal(tokens, expected)
        assert base[:, 1].tolist() == [step + 1 for step in steps]
        assert torch.equal(base[:, [0, 2, 3]], (many + 7).view(5, 4)[:, [0, 2, 3]])
    one_seed = torch.tensor([3], device=device).expand(5)
    assert len(fuselage.gumbel_sample(logits, seed=one_seed).unique()) == 1


def test_rows_that_share_an_offset_by_stride_are_refused(fuselage, device):
    offset = torch.zeros(1, dtype=torch.int64, device=device).expand(3)
    message = "`offset` is written to, and must have memory of its own for each row, got stride 0"
    with pytest.raises(RuntimeError, match=message):
        fuselage.gumbel_sample(torch.zeros(3, 9, device=device), seed=1, offset=offset)


def test_a_batch_without_rows_advances_the_offset(fuselage, device):
    hidden, head = torch.zeros(0, 4, device=device), torch.zeros(9, 4, device=device)
    seed, offset = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    fuselage.gumbel_sample(hidden @ head.T, seed=seed, offset=offset)
    fuselage.lm_head_sample(hidden, head, seed=seed, offset=offset, top_k=3)
    fuselage.lm_head_sample_shard(hidden, head, seed=seed, offset=offset, vocab_offset=0)
    assert offset.item() == 3
    fuselage.gumbel_sample(hidden @ head.T, seed=seed[:0], offset=offset[:0])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.9, "return_logprobs": True}, {"top_k": 30}, {"min_p": 0.01}],
    ids=str,
)
def test_replays_of_a_cuda_graph_draw_anew(fuselage, device, dtype, options):
    hidden = torch.randn(20, 64, device=device, dtype=dtype)
    head = 0.2 * torch.randn(40_000, 64, device=device, dtype=dtype)
    seed, offset = torch.tensor([9], device=device), torch.tensor([0], device=device)

    def call(offset):
        results = fuselage.lm_head_sample(hidden, head, seed=seed, offset=offset, **options)
        return results if isinstance(results, torch.Tensor) else results.tokens

    expected = []
    own = offset.clone()
    for _ in range(4):
        expected.append(call(own).tolist())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(offset.clone())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = call(offset)
    got = []
    for _ in range(4):
        graph.replay()
        got.append(tokens.tolist())
    assert got == expected and len({str(t) for t in got}) == 4
