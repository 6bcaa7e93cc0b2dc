"""What the timers of both devices share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

ROUNDS = 6


@dataclass
class Samples:
    """Times of one call in microseconds, one list a round."""

    rounds: list[list[float]] = field(default_factory=lambda: [[] for _ in range(ROUNDS)])

    def summary(self) -> dict:
        """Median and spread over all rounds; the rounds' medians show the drift."""
        times = sorted(time for times in self.rounds for time in times)
        return {
            "us": percentile(times, 50),
            "p10": percentile(times, 10),
            "p90": percentile(times, 90),
            "rounds": [percentile(sorted(times), 50) for times in self.rounds],
            "samples": len(times),
        }


def percentile(ordered: list[float], percent: float) -> float:
    """Linear between the neighbours, of sorted values."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return round(ordered[below] + (ordered[above] - ordered[below]) * (position - below), 4)


def in_turn(contenders: dict[str, Callable[[], Iterable[float]]], turns: int) -> dict[str, dict]:
    """Times every contender `turns` times a round, so that drift meets them all.

    In any order: at the limit of power what ran before counts.
    """
    samples = {name: Samples() for name in contenders}
    order = random.Random(ROUNDS)
    for i in range(ROUNDS * turns):
        for name in order.sample(list(contenders), len(contenders)):
            samples[name].rounds[i // turns].extend(contenders[name]())
    return {name: of.summary() for name, of in samples.items()}
