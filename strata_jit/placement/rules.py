"""Whether the pool is split over the sites, with how many threads each, and why not.

Owns the refusals and their words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata_jit.placement.counts import default_counts, explicit_counts, lopsided
from strata_jit.placement.options import PlanOptions
from strata_jit.placement.records import Split
from strata_jit.placement.sites import Site, Survey
from strata_jit.placement.words import counted


@dataclass(frozen=True, slots=True)
class Decision:
    """`counts`: threads of each site of the survey, 0 for none; empty where the split is off."""

    split: Split
    counts: tuple[int, ...]


def decide(ground: Survey, quota: int | None, options: PlanOptions) -> Decision:
    """Split or not, outside test mode, whose slices do not depend on the machine."""
    if options.numa_pool == "0":
        return Decision(Split(False, "switched off", False), ())
    counts = _counts(ground, quota, options)
    refusal = _refusal(ground, counts, options)
    if refusal:
        # who did not ask need not be told that there is nothing to split
        logged = options.numa_pool == "1" or not _is_single(ground, counts)
        return Decision(Split(False, refusal, logged), ())
    return Decision(
        Split(True, f"the pool's CPUs span {counted(_n_used(counts), 'node')}", True), tuple(counts)
    )


def _counts(ground: Survey, quota: int | None, options: PlanOptions) -> list[int]:
    """Threads of each site if there were a split; more than there are CPUs are counted on them all."""
    sites = ground.sites
    if options.threads is None:
        return default_counts([site.n_cores for site in sites], quota)
    return explicit_counts(_tier_sizes(sites), min(options.threads, ground.n_cpus))


def _tier_sizes(sites: Sequence[Site]) -> list[list[int]]:
    keys = sorted({key for site in sites for key in site.tiers})
    return [[len(site.tiers.get(key, ())) for site in sites] for key in keys]


def _n_used(counts: Sequence[int]) -> int:
    return sum(map(bool, counts))


def _is_single(ground: Survey, counts: Sequence[int]) -> bool:
    """Whether the pool has one node anyway: it is one thread, or no other node has cores for it."""
    n_able = sum(site.n_cores > 0 for site in ground.sites)
    return _n_used(counts) < 2 and (sum(counts) < 2 or n_able < 2)


def _refusal(ground: Survey, counts: Sequence[int], options: PlanOptions) -> str:
    """Why there is no split; "" if there can be one. Nodes are those of the CPUs that the pool would use."""
    n_used = _n_used(counts)
    if options.platform != "linux":
        return f"needs Linux, this is {options.platform}"
    if _is_single(ground, counts):
        return f"the pool's CPUs span {counted(n_used, 'node')}"
    if options.exchange_rotate:
        return "exchange rotation would move experts to memory of unknown place"
    if not options.pinned:
        return "threads are not pinned"
    if options.threads is not None and options.threads > ground.n_cpus:
        return f"threads are not pinned: {options.threads} of them on {ground.n_cpus} CPUs"
    if n_used < 2 or lopsided(counts):
        return f"lopsided: {_layout(ground, counts)}"
    return ""


def _layout(ground: Survey, counts: Sequence[int]) -> str:
    """Threads of each node that was thought of, or its cores where only one came into question."""
    if _n_used(counts) < 2:
        return ", ".join(f"node {site.node} has {counted(site.n_cores, 'core')}" for site in ground.sites)
    pairs = zip(ground.sites, counts, strict=True)
    return ", ".join(f"node {site.node} would have {counted(n, 'thread')}" for site, n in pairs if n)
