"""A fuzzer of every public function: random calls against the references of this folder's parent.

`python -m fuzz --help` (with tests/ on the path, as `make fuzz` has it); docs/fuzzing.md says how
to replay a case.
"""

import sys
from pathlib import Path

# The families' own references and cases.
for _folder in ("loss", "norm", "quant", "rope", "route", "sample"):
    sys.path.append(str(Path(__file__).resolve().parent.parent / _folder))
