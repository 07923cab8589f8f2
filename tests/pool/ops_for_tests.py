"""Ops whose results say whether the team ran them right: counting, ordering, sleeping.

Each is `void(control, args, thread)`; arguments are documented per op. Units of a node are counted in
int64[n_units] of the buffer, node after node.
"""

from strata_jit.kernels import abi
from strata_jit.kernels._jit import inline_kernel, op
from strata_jit.kernels.atomics import clock_ns, fetch_add, field, load64, store64
from strata_jit.kernels.team import claim, first_unit


@inline_kernel
def _count_units(args, thread, amount):
    """args: buffer, n_units."""
    n = load64(field(args, 1))
    base = field(load64(args), load64(field(thread, abi.THREAD_NODE)) * n)
    unit = first_unit(thread)
    while unit < n:
        address = field(base, unit)
        store64(address, load64(address) + amount)  # not atomic: two owners of a unit would lose counts
        unit = claim(thread)


@op
def count_units(control, args, thread):
    """Add 1 to every unit of this node. args: buffer int64[n_nodes * n_units], n_units."""
    _count_units(args, thread, 1)


@op
def count_units_many(control, args, thread):
    """Add the number of rows to every unit of this node. args: as `count_units`."""
    _count_units(args, thread, load64(field(control, abi.STEP_N_ROWS)))


@op
def check_units(control, args, thread):
    """Every thread checks that all units of all nodes are equal, else it counts a fault.

    args: buffer int64[n_nodes * n_units], n_units, buffer of the fault count.
    """
    counts = load64(args)
    n = load64(field(args, 1)) * load64(field(thread, abi.THREAD_N_NODES))
    first = load64(counts)
    for i in range(n):
        if load64(field(counts, i)) != first:
            fetch_add(load64(field(args, 2)), 1)


@op
def count_threads(control, args, thread):
    """Add 1 to this thread's own word. args: buffer int64[team size]."""
    address = field(load64(args), load64(field(thread, abi.THREAD_TEAM_INDEX)))
    store64(address, load64(address) + 1)


@op
def nothing(control, args, thread):
    """Do nothing: a program of these measures barriers."""


@op
def delay_one(control, args, thread):
    """Thread `args[0]` of the team (modulo its size) works for `args[1]` nanoseconds."""
    size = load64(field(thread, abi.THREAD_TEAM_SIZE))
    if load64(args) % size == load64(field(thread, abi.THREAD_TEAM_INDEX)):
        until = clock_ns() + load64(field(args, 1))
        while clock_ns() < until:
            pass


@op
def work(control, args, thread):
    """Units of pure computing, dealt by claims. args: n_units, iterations, buffer int64[n_units]."""
    n = load64(args)
    unit = first_unit(thread)
    while unit < n:
        x = unit
        for _ in range(load64(field(args, 1))):
            x = x * 6364136223846793005 + 1442695040888963407
        store64(field(load64(field(args, 2)), unit), x)
        unit = claim(thread)


@op
def copy_vector(control, args, thread):
    """The first thread copies a vector's float32 words. args: tensor, buffer, n_words of 8 bytes."""
    if load64(field(thread, abi.THREAD_TEAM_INDEX)) == 0:
        source, target = load64(field(load64(args), abi.TENSOR_ADDR)), load64(field(args, 1))
        for i in range(load64(field(args, 2))):
            store64(field(target, i), load64(field(source, i)))


@op
def copy_octets(control, args, thread):
    """Copy the octets of a matrix to their place in the whole. args: tensor, buffer, octet bytes, expert."""
    record, n_bytes = load64(args), load64(field(args, 2))
    start = load64(field(record, abi.TENSOR_ROW_START)) // abi.ROW_GROUP
    stride = load64(field(record, abi.TENSOR_OCTET_STRIDE))
    source = load64(field(record, abi.TENSOR_ADDR))
    source += load64(field(args, 3)) * load64(field(record, abi.TENSOR_EXPERT_STRIDE))
    octet = first_unit(thread)
    while octet < load64(field(record, abi.TENSOR_N_OCTETS)):
        target = load64(field(args, 1)) + (start + octet) * n_bytes
        for i in range(n_bytes // 8):
            store64(field(target, i), load64(field(source + octet * stride, i)))
        octet = claim(thread)
