"""What may be asked of a plan.

Owns the options, their values and which make no sense; their names on a command line are given elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_jit.errors import UsageError

TEST_MODE = "test"
NUMA_POOL_MODES = (None, "0", "1", TEST_MODE)
ALL, AUTO, P_CORES = "all", "auto", "p-cores"
POOL_AFFINITIES = (None, ALL, AUTO, P_CORES)
DEFAULT_TEST_SLICES = 2
MAX_ASKED_WORKERS = 1 << 14
"""More than any machine has CPUs, so that a slip of the finger is no plan of a billion threads."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user asked for; UsageError for what makes no sense on any machine."""

    workers: int | None = None
    """Threads beside the host core's own; None: as many as the machine is good for."""
    numa_pool: str | None = None
    """Split over NUMA nodes: None automatic, "1" the same, but say why not, "0" off, "test" slices on any
    machine, without placement."""
    test_slices: int | None = None
    """Slices of test mode; None: 2."""
    pool_affinity: str | None = None
    """Cores of hybrid chips. "all": P cores, E cores, SMT siblings, in that order. "auto": P cores, their
    siblings, E cores; by default as many threads as P cores. "p-cores": no E core at all. None is "auto":
    on chips with one kind of core it is the same as "all"; on hybrids a team that meets at every step would
    wait for its slowest core."""
    exchange_rotate: bool = False
    """Whether experts may move into buffers of unknown place, which a split cannot have."""
    pinned: bool = True
    """Whether threads may be bound to CPUs."""
    platform: str = "linux"
    """As `sys.platform` has it."""

    def __post_init__(self) -> None:
        if self.workers is not None and not 0 <= self.workers <= MAX_ASKED_WORKERS:
            raise UsageError(f"pool workers: found {self.workers}, expected 0 to {MAX_ASKED_WORKERS}")
        if self.numa_pool not in NUMA_POOL_MODES:
            raise UsageError(f"NUMA pool mode: found {self.numa_pool!r}, expected 0, 1 or test")
        if self.pool_affinity not in POOL_AFFINITIES:
            raise UsageError(f"pool affinity: found {self.pool_affinity!r}, expected all, auto or p-cores")
        self._check_slices()

    def _check_slices(self) -> None:
        if self.test_slices is None:
            return
        if not 1 <= self.test_slices <= MAX_ASKED_WORKERS:
            raise UsageError(f"test slices: found {self.test_slices}, expected 1 to {MAX_ASKED_WORKERS}")
        if self.numa_pool != TEST_MODE:
            raise UsageError(
                "test slices were given without test mode: set the NUMA pool mode to test as well"
            )

    @property
    def testing(self) -> bool:
        return self.numa_pool == TEST_MODE

    @property
    def threads(self) -> int | None:
        """Threads that were asked for, the host core's included."""
        return None if self.workers is None else self.workers + 1
