"""How a node's threads share the experts of a many-row step: claims of (expert, run of octets).

Owns the loop alone: an expert's weights are read once for all its entries, in blocks of rows.
"""

from strata_jit.kernels import abi
from strata_jit.kernels._jit import glue
from strata_jit.kernels.grouping import active_expert, entries_of, group_entries, n_entries_of
from strata_jit.kernels.runs import n_runs, run_octets
from strata_jit.kernels.scratch import ROW_BLOCK, RUN_OCTETS_MANY
from strata_jit.kernels.team import claim, first_unit
from strata_jit.kernels.vec import word


@glue
def share_experts(compute, args, thread, ids, n_entries, n_expert, lists, n_octets, octet_bytes):
    """compute(args, scratch, expert, octet, n, entries, n_tok) for runs of all experts that have entries.

    A run is octets [octet, octet + n) of the expert; `entries`: address of n_tok int64 row * n_used + rank.
    """
    scratch = word(thread, abi.THREAD_SCRATCH)
    n_active = group_entries(ids, n_entries, n_expert, lists)
    work = n_active * n_octets * octet_bytes
    run = run_octets(work, octet_bytes, word(thread, abi.THREAD_N_THREADS), RUN_OCTETS_MANY)
    runs = n_runs(n_octets, run)
    unit = first_unit(thread)
    while unit < n_active * runs:
        expert, octet = active_expert(lists, n_expert, unit // runs), unit % runs * run
        entries, count = entries_of(lists, n_expert, expert), n_entries_of(lists, expert)
        for first in range(0, count, ROW_BLOCK):
            n_tok, at = min(count - first, ROW_BLOCK), entries + 8 * first
            compute(args, scratch, expert, octet, min(run, n_octets - octet), at, n_tok)
        unit = claim(thread)
