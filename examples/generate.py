#!/usr/bin/env python3
"""Generates with a Llama of transformers whose last step is `lm_head_sample`, token by token.

`make build` first. The weights are random: nothing is downloaded, and the text means nothing. The
model's own head is left out of its forward: the hidden state of the last position is what is drawn
from. Tokens per second are compared with those of plain sampling, softmax and multinomial.

    python examples/generate.py
    python examples/generate.py --layers 2 --hidden 128 --vocab 4096 --tokens 32 --top-p 0.9
"""

import argparse
import time

import torch
from demo import check, load


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def build_llama(options: argparse.Namespace, device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(options.hidden // 64, 2)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        initializer_range=0.05,  # so that logits differ
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LlamaForCausalLM(config).to(device, dtype).eval()


class Fused:
    """Draws by lm_head_sample. Each row has its own seed, and its own step on the device."""

    def __init__(self, kernel, options: argparse.Namespace, device: str):
        self.draw = kernel.lm_head_sample
        self.seed = options.seed + torch.arange(options.batch, device=device)
        self.offset = torch.zeros(options.batch, dtype=torch.int64, device=device)
        self.filters = {name: getattr(options, name) for name in ("top_k", "top_p", "min_p")}
        self.temperature = options.temperature

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.draw(
            *(hidden, weight),
            temperature=self.temperature,
            seed=self.seed,
            offset=self.offset,
            **self.filters,
        )


class Plain:
    """Draws as most loops do, by softmax and multinomial, with the filters of transformers."""

    def __init__(self, options: argparse.Namespace):
        from transformers import generation

        self.warpers = [generation.TemperatureLogitsWarper(options.temperature)]
        if options.top_k is not None:
            self.warpers.append(generation.TopKLogitsWarper(options.top_k))
        if options.top_p is not None:
            self.warpers.append(generation.TopPLogitsWarper(options.top_p))
        if options.min_p is not None:
            self.warpers.append(generation.MinPLogitsWarper(options.min_p))

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = (hidden @ weight.T).float()
        for warper in self.warpers:
            logits = warper(None, logits)
        return torch.multinomial(torch.softmax(logits, -1), 1)


@torch.no_grad()
def generate(model: torch.nn.Module, prompt: torch.Tensor, tokens: int, draw):
    """Yields the tokens `[batch, 1]` of each step."""
    ids, cache = prompt, None
    for _ in range(tokens):
        output = model.model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        ids = draw(output.last_hidden_state[:, -1], model.lm_head.weight)
        yield ids


def tokens_per_second(model, prompt, options, draw) -> float:
    for _ in generate(model, prompt, 2, draw):  # warms up
        pass
    wait = torch.cuda.synchronize if prompt.is_cuda else bool
    wait()
    start = time.perf_counter()
    for _ in generate(model, prompt, options.tokens, draw):
        pass
    wait()
    return options.batch * options.tokens / (time.perf_counter() - start)


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    kernel, device = load()
    model = build_llama(options, device)
    prompt = torch.randint(0, options.vocab, (options.batch, 8), device=device)
    print(f"tokens of row 0 on {device}:", end="", flush=True)
    streamed = []
    for step in generate(model, prompt, options.tokens, Fused(kernel, options, device)):
        streamed.append(step)
        print(f" {step[0].item()}", end="", flush=True)
    print()
    again = list(generate(model, prompt, options.tokens, Fused(kernel, options, device)))
    check(torch.equal(torch.cat(streamed), torch.cat(again)), "the same seeds drew other tokens")
    for name, draw in (("plain", Plain(options)), ("fuselage", Fused(kernel, options, device))):
        print(f"{name:10} {tokens_per_second(model, prompt, options, draw):8.1f} tokens per second")


if __name__ == "__main__":
    main()
