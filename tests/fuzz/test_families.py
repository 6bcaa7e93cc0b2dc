"""The calls that run under compute-sanitizer."""

from __future__ import annotations

import pytest
import torch

from . import families


def labels(calls: list[families.Call]) -> list[str]:
    return [label for label, _ in calls]


def test_a_run_cut_short_has_some_of_every_kind(fuselage):
    kinds = families.all_kinds(fuselage, "cpu")
    calls = labels(families.in_turns(kinds, 0))
    assert len(set(calls)) == len(calls) == sum(len(kind) for kind in kinds)
    fifth = set(calls[: len(calls) // 5])
    for kind in kinds:
        assert len(fifth & set(labels(kind))) >= len(kind) // 5 >= 1
    assert labels(families.in_turns(kinds, 0)) == calls
    assert labels(families.in_turns(kinds, 1)) != calls


@pytest.mark.slow
def test_all_calls_run(fuselage):
    for label, call in families.in_turns(families.all_kinds(fuselage, "cpu"), 0):
        torch.manual_seed(0)
        try:
            call()
        except Exception as error:
            raise AssertionError(label) from error
