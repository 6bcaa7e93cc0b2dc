"""`benchmark.py` is for `kernels benchmark`; `roofline` makes the numbers of this repository."""
