"""Times every operator against a copy of the same bytes, PyTorch, `torch.compile` and Liger.

    python -m benchmarks.roofline                      # everything, on the GPU if there is one
    python -m benchmarks.roofline --only rms_norm.bwd --shapes 16384x4096
    python -m benchmarks.roofline --device cpu --quick
    python -m benchmarks.roofline --report             # the stored results again, nothing is timed
    python -m benchmarks.roofline.plot                 # results/<gpu>.png from results/<gpu>.json
    python -m benchmarks.roofline.tables               # the tables of docs and of results/README.md
    python -m benchmarks.roofline.history stale nvidia-h200    # what changed since it was measured

A new operator needs one file in `cases/`, which is found by being there (`cases/norm.py` is the
model).

Method, on CUDA
---------------
*Verify first.* Outputs and gradients are compared with a float64 reference. If fuselage is wrong
the run ends there; a baseline that is wrong or fails shows `-`, and the results file has the
reason.

*The floor* is `copy_` moving as many bytes, read plus written, as the operator must: each input
read once, each output written once, nothing else counted. It is timed in the same way and in the
same minute, beside a copy made by an elementwise kernel: in a graph `copy_` becomes a memcpy node,
which at some sizes takes half as long again. The faster of the two is the floor; both are recorded.

*Cold L2 without launch gaps.* One CUDA graph holds many calls, at least 20 (fewer of a call that
takes long anyway), which rotate over so many sets of inputs and outputs that everything touched
between two uses of a set is more than four times the L2 cache. The graph's time over its calls is
the time of one call: the cost of starting a graph, some microseconds, is spread so thin that it
does not tell, and what remains between two kernels is the same for every contender and for the
copy. Timing single calls after a flush was the alternative; it adds the whole start of a graph to
each kernel and the flush's dirty lines to its memory traffic. It remains for tensors so small that
more than 256 sets would be needed ("flush" in the results): there, a graph of one call is replayed
after an overwrite of four times the L2, between events recorded after the overwrite. All data is
random.

*What is captured.* Forward: the call under `no_grad`. Backward: `torch.autograd.grad(outputs,
inputs, grad_outputs, retain_graph=True)`, whose forward ran before on the same stream; the graph
holds the kernels of the backward alone, and neither Python nor the autograd engine is timed.
`retain_graph` keeps the saved tensors at the addresses that the graph reads; `torch.compile`'s
donated buffers are switched off for it. Before timing, outputs are overwritten with NaN, the graph
is replayed, and they are compared with a direct call: kernels that escaped the capture cannot look
fast.

*Side by side.* All contenders of a case are captured first and then timed in turn, 24 times each,
in an order that changes. A turn is some milliseconds: at the limit of power the clock follows what
ran in the last tens of them, and so is much the same for all. (Rounds of 15 ms differed by a
tenth.) Short graphs are replayed before they are timed. Median, 10th and 90th percentile over all
replays are recorded, and the medians of sixths of the turns, whose spread is the noise.

*Host time* is a section of its own: wall-clock of one call on small tensors, in turn as well,
blocks of calls without synchronisation; the smallest of the rounds' median blocks counts.

On the CPU, calls are timed one by one with `perf_counter`, rotating over several sets, with one
thread and with all of them. glibc is told to keep freed memory, or page faults would be timed.
Other load on the machine spoils these numbers: with more threads than idle cores, each parallel
region waits for the scheduler. The load at the start is recorded.
"""
