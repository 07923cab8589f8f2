"""Which positions of a KV block a row attends to, where an indexer has chosen (block-sparse attention).

A row's choice is a word for each KV block: bit i stands for `ratio` positions from i * ratio on. Ops that
read or write it have the arguments SELECT of the registry; ratio 0: everything is selected. No bit is set
beyond the row's position, unless all are. Owns the meaning of the words; `index_select` writes them.
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel
from strata_jit.kernels.abi import THREAD_SCRATCH
from strata_jit.kernels.vec import load_i64, splat8, store8, store_f32, word

ALL = -1
LOWEST = np.float32(-np.inf)


@glue
def selected_words(args, at, thread, row, n_rows):
    """Address of a row's words, one of n_rows; 0: all is selected. `at`: index of the SELECT arguments."""
    if word(args, at + 3) == 0:
        return 0
    own = word(thread, THREAD_SCRATCH) + word(args, at)
    return own if n_rows == 1 else word(args, at + 1) + row * word(args, at + 2)


@glue
def selected_word(args, at, thread, row, n_rows, block):
    """Bits of a block of a row, as `selected_words`."""
    words = selected_words(args, at, thread, row, n_rows)
    return load_i64(words + 8 * block) if words != 0 else ALL


@inline_kernel
def any_selected(bits, ratio, place, n):
    """Whether one of the n positions from `place` on is selected: whole index blocks, or part of one."""
    if bits == ALL:
        return True
    return (bits >> place // ratio) & ((1 << max(n // ratio, 1)) - 1) != 0


@inline_kernel
def run_length(bits, ratio, place, stop):
    """Selected positions from `place` on, in one run that ends at `stop`; 0 if `place` is not selected."""
    if bits == ALL:
        return stop - place
    at = place
    while at < stop and bits >> at // ratio & 1 != 0:
        at = (at // ratio + 1) * ratio
    return min(at, stop) - place


@inline_kernel
def hide(bits, ratio, place, n, scores):
    """-inf for those of n scores, from position `place` of the block on, that are not selected."""
    if bits != ALL:
        for i in range(n):
            if bits >> (place + i) // ratio & 1 == 0:
                store_f32(scores + 4 * i, LOWEST)


@inline_kernel
def hide_all(n, scores):
    """-inf for n scores, a multiple of 8."""
    for k in range(0, 4 * n, 32):
        store8(scores + k, splat8(LOWEST))
