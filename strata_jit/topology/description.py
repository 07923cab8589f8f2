"""The words for a machine: packages, nodes, cores, CPUs, caches, memory, and what limits this process.

Owns the dataclasses; reads nothing. CPUs and nodes are the numbers that Linux gives them, which may have
holes. A value that could not be read is None, except where a field says otherwise. Fields after the first few
have defaults, so that machines can also be described by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CoreKind = Literal["P", "E"]
LimitValue = int | str | tuple[int, ...] | None
LOCAL_DISTANCE = 10
REMOTE_DISTANCE = 20
"""What the kernel reports where the firmware has no table of distances."""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core with at least one CPU that is online."""

    package: int
    """Id of its package; 0 where the machine does not say."""
    core_id: int
    """The kernel's number, which others may share: even within a package, on some machines."""
    cpus: tuple[int, ...]
    """Its CPUs that this process may use, ascending; empty only in `Machine.other_cores`."""
    siblings: tuple[int, ...] = ()
    """All its CPUs that are online, ascending; left out, they are `cpus`."""
    node: int = 0
    """NUMA node of its first CPU; 0 where the machine does not say."""
    kind: CoreKind = "P"
    """E for an efficiency core of a hybrid machine; every core of any other machine is P."""
    capacity: int | None = None
    """Relative speed as the kernel sees it, 1024 for the fastest core of the machine."""

    def __post_init__(self) -> None:
        if not self.siblings:
            object.__setattr__(self, "siblings", self.cpus)


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node that is online: with CPUs, memory, both or (rarely) neither."""

    node_id: int
    cpus: frozenset[int]
    """Its CPUs that are online, allowed or not; empty for a memory expander, HBM or GPU node."""
    memory_bytes: int | None = None
    """0 for a node without memory of its own."""
    free_bytes: int | None = None
    """Memory that nobody uses; page cache is not free."""
    reclaimable_bytes: int | None = None
    """Clean page cache of files. The kernel may use another node's memory rather than give it up."""
    distances: tuple[int, ...] = ()
    """To every node, in the order of `Machine.nodes`; 10 to itself, 20 where the machine does not say."""
    mem_allowed: bool = True
    """Whether this process may have memory there (Mems_allowed, cpuset). The kernel leaves out nodes without
    memory as well, so ask `has_memory` first where the reason matters."""
    virtual: bool = False
    """The one node that stands for a machine whose kernel knows no NUMA nodes."""

    @property
    def has_memory(self) -> bool:
        """Whether it has memory; one that does not say is taken to."""
        return self.memory_bytes != 0


@dataclass(frozen=True, slots=True)
class Package:
    """What sits in one socket. Nodes are no part of it: a node may span packages and a package nodes."""

    package_id: int
    cpus: frozenset[int]
    """Its CPUs that are online."""
    cores: int
    """How many cores these belong to."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache and the online CPUs that share it."""

    level: int
    kind: str
    """Data, Instruction or Unified."""
    size_bytes: int | None
    line_bytes: int | None
    cpus: frozenset[int]


@dataclass(frozen=True, slots=True)
class HugePagePool:
    """Reserved huge pages of one size: on one node, or of the whole machine where `node` is None."""

    page_bytes: int
    total: int
    free: int | None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class HugePages:
    """Settings of transparent huge pages ("always", "madvise", "never" ...) and the reserved pools."""

    enabled: str | None = None
    defrag: str | None = None
    shmem_enabled: str | None = None
    """The setting for shared memory, memfd included: an advice does nothing there where it is "never"."""
    pools: tuple[HugePagePool, ...] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that limits what this process may use, and the file that says so.

    Names and values, where `None` means that nothing limits it:

        affinity      CPUs (tuple)    mask of the process
        cpuset_cpus   CPUs (tuple)    cpuset of its control group
        cpu_quota     whole CPUs      tightest quota of its control group and those above
        mems_allowed  nodes (tuple)   where it may have memory
        memory_limit  bytes           tightest limit of its control group and those above
        memory_room   bytes           what is left below the level with the least room, page cache not counted
        memlock       bytes           RLIMIT_MEMLOCK (soft)
        shm_size      bytes           size of /dev/shm
    """

    name: str
    value: LimitValue
    source: str
    """Path of the file, or the system call."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and what this process may use of it."""

    allowed: frozenset[int]
    """CPUs that this process may use and that are online."""
    cores: tuple[Core, ...]
    """Cores with an allowed CPU, ascending by the first of these."""
    nodes: tuple[Node, ...]
    """Nodes that are online, ascending; never none on a machine that was read."""
    cpu_quota: int | None = None
    """Whole CPUs' worth of time that the tightest cgroup allows, at least 1; None where nothing limits it."""
    other_cores: tuple[Core, ...] = ()
    """Cores without an allowed CPU, ascending by their first CPU."""
    packages: tuple[Package, ...] = ()
    caches: tuple[Cache, ...] = ()
    """Ascending by level, then by first CPU."""
    cpus_online: frozenset[int] = frozenset()
    cpus_offline: frozenset[int] = frozenset()
    """CPUs that are present but switched off."""
    nodes_offline: frozenset[int] = frozenset()
    """Node numbers that the kernel keeps for nodes that are not online."""
    cpu_model: str | None = None
    memory_bytes: int | None = None
    available_bytes: int | None = None
    """What the kernel believes could be had without swapping: free memory and most of the page cache."""
    memory_limit_bytes: int | None = None
    """Tightest control group limit; None where nothing limits it, as for the next two."""
    memory_room_bytes: int | None = None
    """Least (limit - current + inactive page cache) of the control group and those above it."""
    memlock_bytes: int | None = None
    shm_bytes: int | None = None
    """Size of /dev/shm; unknown for a recorded machine."""
    huge_pages: HugePages = HugePages()
    numa_balancing: int | None = None
    """Whether the kernel moves pages by itself: 0 off, other values some form of on."""
    zone_reclaim_mode: int | None = None
    governors: tuple[str, ...] = ()
    """Frequency governors of the allowed CPUs, each once, sorted; empty where there are none."""
    kernel_cmdline: str | None = None
    limits: tuple[Limit, ...] = ()

    @property
    def all_cores(self) -> tuple[Core, ...]:
        """Every core, allowed or not, ascending by first CPU."""
        return tuple(sorted((*self.cores, *self.other_cores), key=lambda core: core.siblings))

    @property
    def hybrid(self) -> bool:
        """Whether there are performance and efficiency cores."""
        return len({core.kind for core in (*self.cores, *self.other_cores)}) > 1

    def node_of(self, cpu: int) -> int:
        """NUMA node of a CPU; 0 where the machine does not say."""
        return next((node.node_id for node in self.nodes if cpu in node.cpus), 0)

    def node(self, node_id: int) -> Node | None:
        """The node of that number, if it is online."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def distance(self, start: int, end: int) -> int:
        """Distance between two nodes by their numbers; 10 to itself and 20 where the machine does not say."""
        ids = [node.node_id for node in self.nodes]
        row = self.nodes[ids.index(start)].distances if start in ids else ()
        if end in ids and ids.index(end) < len(row):
            return row[ids.index(end)]
        return LOCAL_DISTANCE if start == end else REMOTE_DISTANCE

    def limit(self, name: str) -> Limit | None:
        """The limit of that name, if it could be read."""
        return next((limit for limit in self.limits if limit.name == name), None)
