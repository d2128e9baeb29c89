"""Kernels on the device at hand: are they right, how long do they take, and how long would they take at best?

    python -m pallas_kernels.bench [--cases decode,prefill,mixed,matmul] [--backends pallas_mosaic,xla]
    [--tune]

`workload` says what is run and counts its bytes and operations, `timing` how time is taken, `rows` makes one
line of the table, `worker` many of them in a process that may die of one, `__main__` is the command.
"""
