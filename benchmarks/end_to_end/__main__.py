"""`python -m benchmarks.end_to_end`."""

import sys

from .cli import main

sys.exit(main())
