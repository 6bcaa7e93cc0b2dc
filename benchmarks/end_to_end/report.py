"""The table of one scenario, and of all that are stored."""

from __future__ import annotations


def replaced_share(columns: dict, name: str) -> float | None:
    """The part of a column's device time that went to the operators that fuselage replaces.

    With fuselage: its kernels. Without: what the other kernels than matmul and attention took, less
    what they still take beside fuselage's.
    """
    shares = columns[name]["breakdown"]
    total = sum(shares.values())
    if not total:
        return None
    if name.endswith("fuselage"):
        return shares["fuselage"] / total
    beside = columns.get(f"{name} + fuselage")
    return None if beside is None else (shares["other"] - beside["breakdown"]["other"]) / total


def over(columns: dict, name: str, times: dict) -> str:
    """How many times as fast as the column of that name, which may have run out of memory."""
    if name not in columns:
        return "-"
    return f"{columns[name]['milliseconds']['median'] / times['median']:.2f}x"


def summary(cases: dict[str, dict]) -> str:
    """One row for each scenario: what fuselage gains, in Markdown."""
    lines = [
        "| scenario | model | eager: ms | with fuselage | | compiled: ms | with fuselage | |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for scenario, record in cases.items():
        cells = [f"`{scenario}`", record["title"]]
        for name in ("eager", "torch.compile"):
            pair = [record["columns"].get(n) for n in (name, f"{name} + fuselage")]
            times = [c and c["milliseconds"]["median"] * record["per_sample"] for c in pair]
            cells += ["-" if time is None else f"{time:.1f}" for time in times]
            cells.append("-" if None in times else f"{times[0] / times[1]:.2f}x")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def details(cases: dict[str, dict]) -> str:
    """The tables of all scenarios, with their notes."""
    return "\n\n".join(
        f"{record['title']} ({'; '.join(record['notes'])}):\n\n{table(record)}"
        for record in cases.values()
    )


def table(record: dict) -> str:
    """In Markdown."""
    columns, steps = record["columns"], record["per_sample"]
    unit = "ms" if steps == 1 else f"ms / {steps} steps"
    lines = [
        f"| | {unit} | min to max | over eager | over the same without fuselage | peak GiB | "
        "replaced operators' share | matmul + attention |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, column in columns.items():
        times = column["milliseconds"]
        eager = over(columns, "eager", times)
        without = over(columns, name.removesuffix(" + fuselage"), times)
        share = replaced_share(columns, name)
        total = sum(column["breakdown"].values()) or 1.0
        big = (column["breakdown"]["matmul"] + column["breakdown"]["attention"]) / total
        cells = [
            name,
            f"{times['median'] * steps:.1f}",
            f"{times['min'] * steps:.1f} to {times['max'] * steps:.1f}",
            eager,
            without if name.endswith("fuselage") else "",
            "-" if column["peak_gib"] is None else f"{column['peak_gib']:.1f}",
            "-" if share is None else f"{share:.0%}",
            f"{big:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
