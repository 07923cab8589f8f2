"""Lists of the entries (row, rank) of each expert, so that its weights are read once for all its rows.

Owns the layout of `list_scratch`; every thread builds the same lists in its own, so nobody waits. Entries of
an expert are in ascending order of row, then rank. Knows no tensor and no op.

int64 words of the lists: offsets[n_expert + 2], active[n_expert], entries[n_rows * n_used].
"""

from strata_jit.kernels._jit import inline_kernel, kernel
from strata_jit.kernels.vec import load_i64, store_i64, word


@inline_kernel
def is_expert(expert, n_expert):
    """Whether an id names an expert; -1, like anything outside, contributes nothing."""
    return 0 <= expert < n_expert


@kernel
def group_entries(ids, n_entries, n_expert, lists):
    """Fill `lists` from int64[n_entries] at `ids` by a counting sort; returns how many experts have some."""
    active = lists + 8 * (n_expert + 2)
    entries = active + 8 * n_expert
    for i in range(n_expert + 2):
        store_i64(lists + 8 * i, 0)
    for i in range(n_entries):
        expert = load_i64(ids + 8 * i)
        if is_expert(expert, n_expert):
            count = lists + 8 * (expert + 2)
            store_i64(count, load_i64(count) + 1)
    n_active = 0
    for expert in range(n_expert):
        count = word(lists, expert + 2)
        if count > 0:
            store_i64(active + 8 * n_active, expert)
            n_active += 1
        # now offsets[e + 1] is where expert e starts; placing its entries moves it to where e ends
        store_i64(lists + 8 * (expert + 2), word(lists, expert + 1) + count)
    for i in range(n_entries):
        expert = load_i64(ids + 8 * i)
        if is_expert(expert, n_expert):
            at = word(lists, expert + 1)
            store_i64(entries + 8 * at, i)
            store_i64(lists + 8 * (expert + 1), at + 1)
    return n_active


@inline_kernel
def active_expert(lists, n_expert, i):
    """Id of the i-th expert that has entries."""
    return word(lists, n_expert + 2 + i)


@inline_kernel
def n_entries_of(lists, expert):
    """Entries of an expert."""
    return word(lists, expert + 1) - word(lists, expert)


@inline_kernel
def entries_of(lists, n_expert, expert):
    """Address of the int64 entries (row * n_used + rank) of an expert."""
    return lists + 8 * (2 * n_expert + 2 + word(lists, expert))
