"""Pool specs for tests: small programs of `ops_for_tests`, any team."""

from strata_jit.pool.program import BufferSpec, NodeSpec, Op, PoolSpec, Program

ops = "ops_for_tests:"


def make_op(name, *args, many=None, barrier=True, count="rows", kind="test"):
    """An op with the same function (or `many`) and barrier at one row and at many."""
    ref, many = (None if n is None else ops + n for n in (name, many or name))
    return Op(name or "barrier", name or "barrier", ref, many, barrier, barrier, count, tuple(args), kind)


def make_spec(program_ops, buffers=(), threads=(2,), tensors=(), files=(), pinned=False, **options):
    """A pool of `len(threads)` node processes; `pinned` puts the i-th thread of the team on CPU i."""
    buffers = tuple(BufferSpec(i, f"b{i}", n) for i, n in enumerate(buffers))
    ranges = options.pop("row_ranges", [{}] * len(threads))
    cpu_lists = options.pop("cpus", None)
    nodes, before = [], 0
    for node, n in enumerate(threads):
        cpus = cpu_lists[node] if cpu_lists else tuple(range(before, before + n)) if pinned else None
        nodes.append(NodeSpec(node, cpus, n, ranges[node]))
        before += n
    program = Program(tuple(program_ops), tuple(tensors), buffers, options.pop("scratch_bytes", 4096), 0)
    defaults = {"max_rows": 8, "n_seq": 1, "kv_blocks": 1, "spin_us": 200}
    return PoolSpec(program, tuple(nodes), tuple(map(str, files)), **{**defaults, **options})
