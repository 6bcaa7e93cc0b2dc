"""Plain text: one line a case, the host table, what misses the bar."""

from __future__ import annotations

from . import bar

RATIOS = ("eager", "torch", "compile", "liger", "quack")


def header(names=RATIOS) -> str:
    ratios = " | ".join(f"x {name:<7}" for name in names)
    return f"{'operator':<22} {'shape':<22} | {'us':>9}  spread |   GB/s | % copy | {ratios}"


def case_line(case: dict, names=RATIOS) -> str:
    ours = case["contenders"]["fuselage"]
    spread = (ours["p90"] - ours["p10"]) / ours["us"] * 50
    operator = f"{case['operator']} {case['direction']}"
    shape = case["shape"] + (f" {case['threads']}t" if "threads" in case else "")
    ratios = " | ".join(f"{_ratio(case, name):>9}" for name in names)
    return (
        f"{operator:<22} {shape:<22} | {ours['us']:9.2f} ±{spread:5.1f}% | {ours['gbs']:6.0f} | "
        f"{100 * case['fraction_of_copy']:5.1f}% | {ratios}"
    )


def _ratio(case: dict, name: str) -> str:
    entry = case["contenders"].get(name)
    return f"{entry['us'] / case['contenders']['fuselage']['us']:.2f}x" if entry else "-"


def failures(results: dict) -> list[str]:
    """Why a column shows `-`, each reason once."""
    reasons: dict[str, list[str]] = {}
    for key, record in [*results["cases"].items(), *results["host"].items()]:
        for name, reason in record["failed"].items():
            reasons.setdefault(f"{name}: {reason}", []).append(key)
    return [
        f"  {reason}  ({rows[0]}{f' and {len(rows) - 1} more' if len(rows) > 1 else ''})"
        for reason, rows in reasons.items()
    ]


def host_lines(name: str, section: dict) -> list[str]:
    times = section["us"]
    references = [n for n in ("x.mul_(1.0)", "F.rms_norm") if n in times]
    lines = [f"host time, {name}" + " " * 4 + " | ".join(f"over {n}" for n in references)]
    for call, us in times.items():
        ratios = " | ".join(f"{us / times[n]:6.2f}x" for n in references)
        lines.append(f"  {call:<28} {us:8.2f} us | {ratios}")
    lines += [f"  {call:<28}        -" for call in section["failed"]]
    return lines


def bar_lines(results: dict) -> list[str]:
    found = bar.checks(results)
    missed = [check for check in found if check.missed]
    lines = [f"the bar: {len(found)} checks, {len(missed)} missed"]
    for check in missed:
        need = "at least" if check.at_least else "at most"
        measured = f"{check.measured:7.3f}, {need} {check.limit:.3f}"
        lines.append(f"  MISS {check.row:<48} {check.rule:<42} {measured}")
    return lines


def everything(results: dict) -> str:
    """All of a results file."""
    lines = [f"{name}: {value}" for name, value in results["environment"].items()]
    lines += ["", header(), *(case_line(case) for case in results["cases"].values())]
    for name, section in results["host"].items():
        lines += ["", *host_lines(name, section)]
    reasons = failures(results)
    if reasons:
        lines += ["", "columns with `-`:", *reasons]
    return "\n".join([*lines, "", *bar_lines(results)])
