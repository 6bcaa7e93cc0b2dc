"""The table of one scenario, and of all that are stored."""

from __future__ import annotations


def plain(name: str) -> str:
    """The column without fuselage."""
    return name.partition(" + ")[0]


def replaced_share(columns: dict, name: str) -> float | None:
    """The part of a column's device time that went to the operators that fuselage replaces.

    With fuselage: its kernels. Without: what the other kernels than matmul and attention took, less
    what they still take beside fuselage's.
    """
    shares = columns[name].get("breakdown", {})
    total = sum(shares.values())
    if not total:
        return None
    if "fuselage" in name:
        return shares["fuselage"] / total
    beside = columns.get(f"{name} + fuselage")
    return None if beside is None else (shares["other"] - beside["breakdown"]["other"]) / total


def over(columns: dict, name: str, times: dict) -> str:
    """How many times as fast as the column of that name, which may have run out of memory."""
    if name not in columns:
        return "-"
    return f"{columns[name]['milliseconds']['median'] / times['median']:.2f}x"


def summary(cases: dict[str, dict]) -> str:
    """What fuselage gains, in Markdown."""
    losses = {name: record for name, record in cases.items() if "largest_batch" in record}
    others = {name: record for name, record in cases.items() if name not in losses}
    varied = {n: record for n, record in others.items() if _variants(record)}
    parts = ((rows, others), (variant_rows, varied), (loss_rows, losses))
    return "\n\n".join([f(part) for f, part in parts if part])


def _variants(record: dict) -> set[str]:
    """What some columns are beside fuselage: "fuselage + fp8", or the name of a peer."""
    beside = {name.partition(" + ")[2] for name in record["columns"]}
    return beside - {"", "fuselage"}


def variant_rows(cases: dict[str, dict]) -> str:
    """One row for each variant of a scenario."""
    lines = [
        "| scenario | variant | eager: ms | over plain eager | compiled: ms | over plain compiled "
        "| outputs differ by |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for scenario, record in cases.items():
        for variant in sorted(_variants(record)):
            errors: list[float] = []
            cells = [f"`{scenario}`", variant.removeprefix("fuselage + ")]
            for mode in ("eager", "torch.compile"):
                column = record["columns"].get(f"{mode} + {variant}")
                if column is None:
                    cells += ["-", "-"]
                    continue
                errors.append(column["error"])
                times = column["milliseconds"]
                median = times["median"] * record["per_sample"]
                cells += [f"{median:.1f}", over(record["columns"], mode, times)]
            lines.append("| " + " | ".join([*cells, f"{max(errors):.2f}"]) + " |")
    return "\n".join(lines)


def loss_rows(cases: dict[str, dict]) -> str:
    """One table for each training step that is timed with and without the fused loss."""
    parts = []
    for record in cases.values():
        columns, found = record["columns"], record["largest_batch"]
        parts.append(
            f"{heading(record)}\n\n"
            "| | ms | over the same without fuselage | peak GiB | "
            f"sequences of {found['tokens']} tokens |\n"
            "| --- | ---: | ---: | ---: | ---: |"
        )
        for name, column in columns.items():
            times = column["milliseconds"]
            gain = over(columns, plain(name), times) if name != plain(name) else ""
            cells = [name, f"{times['median']:.1f}", gain, gib(column), fitting(found, name)]
            parts[-1] += "\n| " + " | ".join(cells) + " |"
    return "\n\n".join(parts)


def rows(cases: dict[str, dict]) -> str:
    """One row for each scenario."""
    lines = [
        "| scenario | model | eager: ms | with fuselage | | compiled: ms | with fuselage | |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for scenario, record in cases.items():
        layers = [f" ({note})" for note in record["notes"] if note.endswith(" layers")]
        cells = [f"`{scenario}`", record["title"] + "".join(layers)]
        for name in ("eager", "torch.compile"):
            pair = [record["columns"].get(n) for n in (name, f"{name} + fuselage")]
            times = [c and c["milliseconds"]["median"] * record["per_sample"] for c in pair]
            cells += ["-" if time is None else f"{time:.1f}" for time in times]
            cells.append("-" if None in times else f"{times[0] / times[1]:.2f}x")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def details(cases: dict[str, dict]) -> str:
    """The tables of all scenarios, with their notes."""
    return "\n\n".join(f"{heading(record)}\n\n{table(record)}" for record in cases.values())


def heading(record: dict) -> str:
    return f"{record['title']} ({'; '.join(record['notes'])}):"


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
        without = over(columns, plain(name), times)
        share = replaced_share(columns, name)
        parts = column.get("breakdown")
        big = parts and (parts["matmul"] + parts["attention"]) / (sum(parts.values()) or 1.0)
        cells = [
            name,
            f"{times['median'] * steps:.1f}",
            f"{times['min'] * steps:.1f} to {times['max'] * steps:.1f}",
            eager,
            without if name != plain(name) else "",
            gib(column),
            "-" if share is None else f"{share:.0%}",
            "-" if big is None else f"{big:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if "largest_batch" in record:
        lines += ["", largest(record["largest_batch"])]
    return "\n".join(lines)


def gib(column: dict) -> str:
    return "-" if column["peak_gib"] is None else f"{column['peak_gib']:.1f}"


def largest(found: dict) -> str:
    """What the search for the largest batch has found."""
    parts = [f"{name}: {fitting(found, name)}" for name in found["sequences"]]
    return f"Largest batch, in sequences of {found['tokens']} tokens: {'; '.join(parts)}."


def fitting(found: dict, name: str) -> str:
    """How many sequences fit, and how many do not; nothing of what was not searched."""
    ends = found["sequences"].get(name)
    if ends is None:
        return ""
    return f"{ends['fits']} fit, " + (f"{ends['fails']} do not" if ends["fails"] else "more may")
