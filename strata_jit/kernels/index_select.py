"""The op `index_select`: scores of a row's index blocks -> which of them it attends to, as bits.

Owns the choice: the n_best highest scores, of equal ones the lower block; the incomplete block at the end
always. Where no more than n_best blocks are complete, all are taken. Scores are sums of non-negative numbers,
never NaN and never below zero, so their order is that of their bits: the n_best-th score is found bit by bit.
"""

import numpy as np

from strata_jit.kernels._jit import inline_kernel, kernel, op
from strata_jit.kernels.abi import KV_BLOCK, STEP_N_ROWS
from strata_jit.kernels.hyper import team_rows
from strata_jit.kernels.kv import row_position
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.selection import selected_words
from strata_jit.kernels.vec import at_least8, count_bits, load8, load_i64, splat8, store_i64, word

A = arg_index("index_select")
HIGHEST_BIT = 30
"""Of a float32 that is not negative."""
ALL = -1


@inline_kernel
def count_at_least(scores, n_octets, bound):
    """Scores that are `bound` or more."""
    n = 0
    for k in range(0, 32 * n_octets, 32):
        n += count_bits(at_least8(load8(scores + k), splat8(bound)))
    return n


@inline_kernel
def count_above(scores, n_octets, bound):
    """Scores above `bound`."""
    n = 0
    for k in range(0, 32 * n_octets, 32):
        n += 8 - count_bits(at_least8(splat8(bound), load8(scores + k)))
    return n


@inline_kernel
def highest_bound(scores, n_octets, n_best):
    """The largest float32 that n_best scores or more reach (or a smaller one that exactly n_best reach)."""
    bits = 0
    for b in range(HIGHEST_BIT, -1, -1):
        n = count_at_least(scores, n_octets, np.int32(bits | 1 << b).view(np.float32))
        if n >= n_best:
            bits |= 1 << b
        if n == n_best:
            break
    return np.int32(bits).view(np.float32)


@inline_kernel
def lowest_bits(bits, n):
    """The n lowest of the bits that are set."""
    kept = 0
    while n > 0 and bits != 0:
        lowest = bits & -bits
        kept |= lowest
        bits ^= lowest
        n -= 1
    return kept


@kernel
def select_best(scores, n_complete, n_best, per_word, mask):
    """int64 words at `mask`, per_word bits in use of each: the n_best of n_complete > n_best scores."""
    n_octets = (n_complete + 7) // 8
    bound = highest_bound(scores, n_octets, n_best)
    spare = n_best - count_above(scores, n_octets, bound)
    bits = 0
    for octet in range(n_octets):
        v = load8(scores + 32 * octet)
        reach = at_least8(v, splat8(bound))
        equal = reach & at_least8(splat8(bound), v)
        taken = lowest_bits(equal, spare)
        spare -= count_bits(taken)
        bits |= (reach ^ equal | taken) << 8 * octet % per_word
        if 8 * (octet + 1) % per_word == 0 or octet == n_octets - 1:
            store_i64(mask + 8 * (8 * octet // per_word), bits)
            bits = 0


@op
def index_select(control, args, thread):
    """One row: every thread, into its scratch. Many rows: in turn over the team, into the shared buffer."""
    n_rows, ratio, n_best = word(control, STEP_N_ROWS), word(args, A.ratio), word(args, A.n_best)
    per_word = KV_BLOCK // ratio
    first, step = team_rows(thread, n_rows)
    for row in range(first, n_rows, step):
        mask = selected_words(args, A.mask_scratch, thread, row, n_rows)
        n_complete, fill = (row_position(control, row) + 1) // ratio, ALL
        if n_complete > n_best:
            fill = 0
        for block in range(row_position(control, row) // KV_BLOCK + 1):
            store_i64(mask + 8 * block, fill)
        if n_complete > n_best:
            scores = word(args, A.scores) + row * word(args, A.scores_stride)
            select_best(scores, n_complete, n_best, per_word, mask)
            tail = mask + 8 * (n_complete // per_word)
            if n_complete * ratio <= row_position(control, row):
                store_i64(tail, load_i64(tail) | 1 << n_complete % per_word)
