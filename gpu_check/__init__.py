"""`make check-gpu`: the engine's programs and kernels as machine code for GPUs, on a machine without one.

XLA, Triton, Mosaic and ptxas need a description of a GPU, not a GPU: what comes out is the code that would
run, with its registers, spills, shared memory, buffers, aliasing and launches. How fast it is, and whether
its numbers are right, this does not tell.
"""
