"""`python -m benchmarks.roofline`."""

import sys

from .cli import main

sys.exit(main())
