"""How many threads each node gets. Integers only: no machine, no CPU.

Owns the worker rules. In all of them the first node with threads is the host's, and its count includes the
host core's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_WORKERS_PER_NODE = 16
"""Of a default over several nodes: two nodes have 32 workers at most."""
MAX_WORKERS = 32
"""Of a default on one node. More threads than the memory can feed only meet later."""


def one_node_threads(n_cores: int, quota: int | None) -> int:
    """Threads of a default on one node: one a core, so that the workers are one less."""
    return max(1, _within(min(n_cores, MAX_WORKERS + 1), quota))


def default_counts(cores: Sequence[int], quota: int | None) -> list[int]:
    """Threads of a default on nodes with so many cores; 0 for a node that is left out.

    On the host's node every core has a thread, on any other one core stays free for the rest of the system,
    unless it has just one. Beyond two nodes see `balanced`; two are taken as they are.
    """
    kept = [i for i, n in enumerate(cores) if n > 0]
    while True:
        limits = [_node_limit(cores[i], host=i == kept[0]) for i in kept]
        chosen = balanced(limits) if len(kept) > 2 else limits
        if all(chosen):
            break
        kept = [i for i, n in zip(kept, chosen, strict=True) if n]
    counts = [0] * len(cores)
    for i, n in zip(kept, level(chosen, _within(sum(chosen), quota)), strict=True):
        counts[i] = n
    return counts


def balanced(limits: Sequence[int]) -> list[int]:
    """Most threads in all without any node having more than twice another's; 0 leaves a node out.

    A node much smaller than the others would hold them back, one much larger need not stand alone: so
    every node's count is tried as the least, below which nodes are left out and at twice which they are
    capped.
    """
    tried = [[min(n, 2 * least) if n >= least else 0 for n in limits] for least in sorted(set(limits))]
    return max(tried, key=sum, default=[])


def explicit_counts(tiers: Sequence[Sequence[int]], threads: int) -> list[int]:
    """Spread exactly `threads` threads, at most as many as there are CPUs.

    `tiers`: CPUs of each node in the order in which they are to be used. As even as each tier allows; beyond
    two nodes the smallest are left out for as long as they make it lopsided and the others have CPUs enough.
    """
    counts = spread(tiers, threads)
    while lopsided(counts) and sum(map(bool, counts)) > 2:
        least = min(n for n in counts if n)
        dropped = max(i for i, n in enumerate(counts) if n == least)
        fewer = [[0 if i == dropped else n for i, n in enumerate(tier)] for tier in tiers]
        if sum(map(sum, fewer)) < threads:
            break
        tiers, counts = fewer, spread(fewer, threads)
    return counts


def spread(tiers: Sequence[Sequence[int]], threads: int) -> list[int]:
    """Threads of each node: every tier filled before the next one, the last as level as can be."""
    counts = [0] * len(tiers[0]) if tiers else []
    for tier in tiers:
        full = [n + more for n, more in zip(counts, tier, strict=True)]
        if sum(full) >= threads:
            return level(full, threads, counts)
        counts = full
    return counts


def level(limits: Sequence[int], total: int, start: Sequence[int] | None = None) -> list[int]:
    """Counts that sum to `total`, raised from `start` (0) lowest first, the first of equals first."""
    counts = list(start) if start is not None else [0] * len(limits)
    for _ in range(min(total, sum(limits)) - sum(counts)):
        i = min((i for i, n in enumerate(counts) if n < limits[i]), key=lambda i: counts[i])
        counts[i] += 1
    return counts


def lopsided(counts: Sequence[int]) -> bool:
    """Whether some node that is used has more than twice another's threads.

    The reference leaves the threshold open. Twice lets 12/11, 7/6 and 2/1 pass and stops 12/3.
    """
    used = [n for n in counts if n]
    return bool(used) and max(used) > 2 * min(used)


def _node_limit(n_cores: int, *, host: bool) -> int:
    workers = min(n_cores - 1, MAX_WORKERS_PER_NODE)
    return workers + 1 if host else max(1, workers)


def _within(threads: int, quota: int | None) -> int:
    return threads if quota is None else min(threads, quota)
