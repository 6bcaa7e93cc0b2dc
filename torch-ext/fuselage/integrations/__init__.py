"""fuselage in other libraries' models: `integrations.transformers` and `integrations.diffusers`.

Each is imported when it is first asked for; neither imports the library it is named after.
"""

from __future__ import annotations

import importlib

_MODULES = ("diffusers", "transformers")


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
