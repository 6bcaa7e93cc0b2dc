"""Which GPU's results of an operator are shown: those of the one that measured it last."""

from __future__ import annotations

from collections.abc import Iterable


def operator_of(case: dict) -> str:
    """Without its variant: "group_norm" of "group_norm-channels-last"."""
    return case["operator"].replace("-", " ").partition(" ")[0]


def latest(files: Iterable[dict]) -> dict[str, dict]:
    """`{operator: the results of a GPU}`, of what several GPUs' results have."""
    dates: dict[str, tuple[str, dict]] = {}
    for stored in files:
        for case in stored["cases"].values():
            operator = operator_of(case)
            if operator not in dates or case["date"] > dates[operator][0]:
                dates[operator] = case["date"], stored
    return {operator: stored for operator, (_, stored) in dates.items()}
