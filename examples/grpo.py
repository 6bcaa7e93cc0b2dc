#!/usr/bin/env python3
"""Reinforcement learning of a small language model (GRPO), in which rollout and trainer agree.

`make build` first. Sequences are drawn from the head by `lm_head_sample`, which also reports the
log-probability of each token; the trainer computes it again with `linear_log_probs`. From the same
hidden states both have the same bits, which is asserted at every step: a ratio of probabilities is
then exactly one before the first update. The reward is the share of even digits, which the model
learns to prefer. Takes less than a minute on a CPU.

    python examples/grpo.py
    python examples/grpo.py --steps 60 --group 64
"""

import argparse
import time

import torch
from demo import check, load
from train import CHARACTERS, Model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--group", type=int, default=48, help="sequences that are compared")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser.parse_args()


@torch.no_grad()
def rollout(kernel, model: Model, options: argparse.Namespace, device: str, step: int):
    """Tokens `[group, 1 + tokens]`, the hidden states that they were drawn from, and their
    log-probabilities as the draw reported them.
    """
    tokens = torch.full((options.group, 1), CHARACTERS.index(" "), device=device)
    hidden, log_probs = [], []
    for position in range(options.tokens):
        hidden.append(model(tokens)[:, -1])
        drawn = kernel.lm_head_sample(
            *(hidden[-1], model.head.weight),
            temperature=options.temperature,
            seed=1000 * step + position,
            return_logprobs=True,
        )
        tokens = torch.cat([tokens, drawn.tokens], 1)
        log_probs.append(drawn.logprobs)
    return tokens, torch.stack(hidden, 1), torch.cat(log_probs, 1)


def rewards_of(tokens: torch.Tensor) -> torch.Tensor:
    """The share of even digits. Tokens of digits are the digits."""
    return ((tokens < 10) & (tokens % 2 == 0)).float().mean(1)


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    kernel, device = load()
    model = Model(kernel, len(CHARACTERS), options.dim, layers=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rewards, started = [], time.perf_counter()
    for step in range(options.steps):
        tokens, hidden, reported = rollout(kernel, model, options, device, step)
        drawn, weight = tokens[:, 1:], model.head.weight
        temperature = {"temperature": options.temperature}
        same = kernel.linear_log_probs(hidden, weight.detach(), drawn, **temperature).log_probs
        check(torch.equal(same, reported), "the trainer's log-probabilities are not the draw's")

        reward = rewards_of(drawn)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        now = kernel.linear_log_probs(
            model(tokens[:, :-1]), weight, drawn, **temperature, return_entropy=True
        )
        # The body computed hidden states one by one before: other roundings.
        drift = (now.log_probs.detach() - reported).abs().max().item()
        check(drift < 1e-3, f"log-probabilities differ by {drift}")
        ratio = (now.log_probs - reported).exp()
        loss = -(ratio * advantage[:, None]).mean() - 0.01 * now.entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward.mean().item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3}: reward {rewards[-1]:.3f}", flush=True)
    print(f"{options.steps} steps in {time.perf_counter() - started:.1f} s on {device}")
    check(rewards[-1] > rewards[0] + 0.1, f"reward went from {rewards[0]} to {rewards[-1]}")
    print("rollout and trainer agree bit for bit, and the reward rose")


if __name__ == "__main__":
    main()
