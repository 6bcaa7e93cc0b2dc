"""Plots of the site: how fast each operator was, from the benchmark's results.

An operator's figure has a row for each shape, forward and backward side by side: a bar for fuselage
and a mark for each contender, in percent of the speed of a copy of the same bytes. It is an SVG in
the page, in the page's own colours, light and dark.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.roofline.latest import latest, operator_of

REPO_DIR = Path(__file__).resolve().parent.parent
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
CONTENDERS = {"torch": "PyTorch", "eager": "PyTorch", "compile": "torch.compile", "liger": "Liger"}
MARKS = {  # around their centre
    "PyTorch": "M-3.5-3.5h7v7h-7z",
    "torch.compile": "M0-4.5L4.5 3.5h-9z",
    "Liger": "M0-4.5L4.5 0 0 4.5-4.5 0z",
}
PANEL, GAP, ROW, TOP, CHARACTER = 228, 26, 19, 40, 6.2  # sizes in pixels
MOST = 110  # percent at the right end of a panel
NOTES = {
    "lm_head_sample": "PyTorch is the product alone here, which draws nothing.",
    "gumbel_sample": "PyTorch is an argmax here, which draws nothing.",
}


def with_plots(markdown: str) -> str:
    """A page of operators, each section with its operator's figure at the end."""
    parts = re.split(r"(?m)^(?=## )", markdown)
    for i, part in enumerate(parts):
        name = re.match(r"## `(\w+)`", part)
        plot = figure(name.group(1)) if name else ""
        if plot:
            parts[i] = f"{part.rstrip()}\n\n**Speed**\n\n{plot}\n\n"
    return "".join(parts)


@cache
def results() -> dict[str, dict]:
    """`{operator: the results of the GPU that measured it last}`."""
    paths = sorted((REPO_DIR / "benchmarks/results").glob("nvidia-*.json"))
    return latest(json.loads(path.read_text("utf-8")) for path in paths)


def cases(operator: str) -> dict[str, dict[str, dict]]:
    """`{shape: {direction: case}}`; a shape has the operator's variant in its name."""
    found: dict[str, dict[str, dict]] = {}
    for case in results().get(operator, {"cases": {}})["cases"].values():
        if operator_of(case) == operator:
            shape = case["shape"] + case["operator"].removeprefix(operator).replace("-", " ")
            found.setdefault(shape, {})[case["direction"]] = case
    return found


def percent(case: dict, contender: str) -> float:
    """Of the speed of a copy of the same bytes."""
    return 100 * case["copy"]["us"] / case["contenders"][contender]["us"]


def figure(operator: str) -> str:
    """HTML of an operator's figure; nothing where it was not measured."""
    shapes = cases(operator)
    if not shapes:
        return ""
    ordered = sorted(shapes, key=lambda shape: -max(c["bytes"] for c in shapes[shape].values()))
    directions = [d for d in DIRECTIONS if any(d in shapes[shape] for shape in shapes)]
    labels = int(CHARACTER * max(map(len, ordered))) + 12
    width = labels + len(directions) * (PANEL + GAP)
    height = TOP + ROW * len(ordered) + 6
    style = f"max-width:{width}px;min-width:{width * 2 // 3}px"
    parts = [f'<svg viewBox="0 0 {width} {height}" style="{style}" role="img">']
    shown: set[str] = set()
    for i, direction in enumerate(directions):
        parts += _axis(labels + i * (PANEL + GAP), height, DIRECTIONS[direction])
    for row, shape in enumerate(ordered):
        y = TOP + ROW * row
        parts.append(f'<text class="shape" x="{labels - 10}" y="{y + 13}">{escape(shape)}</text>')
        for i, direction in enumerate(directions):
            if direction in shapes[shape]:
                case = shapes[shape][direction]
                parts += _row(case, labels + i * (PANEL + GAP), y, shown)
    legend = ["<span>▬ fuselage</span>"]
    for name in MARKS:
        if name in shown:
            mark = f'<svg viewBox="-6 -6 12 12"><path class="mark" d="{MARKS[name]}"/></svg>'
            legend.append(f"<span>{mark} {name}</span>")
    what = (
        f"On an {results()[operator]['environment']['device']}, in percent of the speed of a copy "
        "of the same bytes, with nothing in the L2 cache. "
        f"{NOTES.get(operator, '')} Point at a bar for its time."
    )
    caption = f"<figcaption>{''.join(legend)}<br/>{what}</figcaption>"
    return f'<figure class="speed">{"".join(parts)}</svg>{caption}</figure>'


def _axis(left: int, height: int, title: str) -> list[str]:
    parts = [f'<text class="title" x="{left}" y="14">{title}</text>']
    for value in (0, 50, 100):
        x = left + PANEL * value / MOST
        kind = "copy" if value == 100 else "grid"
        parts.append(f'<path class="{kind}" d="M{x:.1f} {TOP - 4}V{height - 2}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{TOP - 9}">{value}%</text>')
    return parts


def _row(case: dict, left: int, y: int, shown: set[str]) -> list[str]:
    def x_of(contender: str) -> float:
        return PANEL * min(percent(case, contender), MOST) / MOST

    def title(contender: str, name: str) -> str:
        time = case["contenders"][contender]["us"]
        share = percent(case, contender)
        return f"<title>{name}: {time:.4g} µs, {share:.0f}% of the copy</title>"

    parts = [
        f'<rect class="bar" x="{left}" y="{y + 3}" width="{x_of("fuselage"):.1f}" '
        f'height="{ROW - 6}">{title("fuselage", "fuselage")}</rect>'
    ]
    for contender, name in CONTENDERS.items():
        there = contender in case["contenders"]
        if not there or (contender == "eager" and "torch" in case["contenders"]):
            continue
        shown.add(name)
        parts.append(
            f'<path class="mark" transform="translate({left + x_of(contender):.1f} {y + ROW / 2})" '
            f'd="{MARKS[name]}">{title(contender, name)}</path>'
        )
    return parts
