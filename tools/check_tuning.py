#!/usr/bin/env python3
"""Checks the tuning of GPUs: torch-ext/fuselage/tuning/*.json, or the files named.

Each must keep to tools/tuning_schema.json, be named after its GPU, and have measured what it says:
a value that is not as built in needs its time over that of the built-in one. docs/tuning.md.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

REPO_DIR = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((REPO_DIR / "tools/tuning_schema.json").read_text("utf-8"))
FOLDER = REPO_DIR / "torch-ext/fuselage/tuning"


def problems(path: Path) -> list[str]:
    """What is wrong with the file; empty when nothing is."""
    from jsonschema import Draft202012Validator

    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        return [f"it is not JSON: {error}"]
    errors = Draft202012Validator(SCHEMA).iter_errors(document)
    found = [f"{error.json_path}: {error.message}" for error in errors]
    if found:
        return found
    name = re.sub(r"[^a-z0-9]+", "-", document["gpu"].lower()).strip("-") + ".json"
    if path.name != name:
        found.append(f"a {document['gpu']} looks for {name}")
    measured = document["measured"]
    for parameter, value in document["parameters"].items():
        its = measured["parameters"].get(parameter, {}).get(str(value))
        if its is None or its["mean"] >= 1 or not measured["shapes"]:
            found.append(f"{parameter}={value} was not measured, or does not win")
    return found


def main(arguments: list[str]) -> int:
    """Prints what is wrong; no file at all is right."""
    wrong = False
    for path in map(Path, arguments) if arguments else sorted(FOLDER.glob("*.json")):
        for problem in problems(path):
            print(f"{path}: {problem}", file=sys.stderr)
            wrong = True
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
