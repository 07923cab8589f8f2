"""What `strata-jit topology` shows people.

Owns their words and form; measures and decides nothing. Text from the kernel's files is shown on one line,
control characters escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from strata_jit.engine.inspection import Inspection
from strata_jit.errors import one_line
from strata_jit.placement import NodePlan, Plan
from strata_jit.report.tables import counted, lines, plain_table, rendered, size
from strata_jit.topology.cpulist import format_cpulist
from strata_jit.topology.description import Core, Limit, Machine, Node
from strata_jit.units import format_bytes, format_rate, format_tok_per_s

_PLAIN_WIDTH = 120
"""Columns of a file, for the cores; its tables are as wide as they are."""
_INDENT = 4

HOST, WORKER, SPARE, FREE, FORBIDDEN = "H", "W", "s", ".", "x"
_MARKS = {
    HOST: ("the host's thread", "bold green"),
    WORKER: ("worker", "green"),
    SPARE: ("spare core", "cyan"),
    FREE: ("allowed, free", ""),
    FORBIDDEN: ("not allowed", "dim red"),
}
_LIMITS = {
    "affinity": "CPU affinity",
    "cpuset_cpus": "CPUs of the control group",
    "cpu_quota": "CPU quota",
    "mems_allowed": "nodes for memory",
    "memory_limit": "memory limit",
    "memory_room": "memory left of it",
    "memlock": "locked memory",
    "shm_size": "shared memory files",
}
_CPU_SETS = ("affinity", "cpuset_cpus")
_UNLIMITED = "unlimited"


def topology_view(
    found: Inspection, bytes_per_s: float | None, *, plan_only: bool = False, width: int | None = None
) -> str:
    """The view as text. `width`: columns of a terminal, which gets colours; None for a file."""
    machine = () if plan_only else _machine_sections(found, width)
    return rendered((*machine, *_plan_sections(found, bytes_per_s, explain=plan_only)), width)


def _machine_sections(found: Inspection, width: int | None) -> Iterator[tuple[str, RenderableType]]:
    machine = found.machine
    yield one_line(machine.cpu_model or "unknown processor"), Text(_counts(machine))
    yield "Cores", _cores(found, (width or _PLAIN_WIDTH) - 2)
    yield "Nodes", _nodes(found)
    if len(machine.nodes) > 1:
        yield "Distances", _distances(machine, width)
    yield "Limits", _limits(machine)
    yield "Settings", _settings(machine)


def _counts(machine: Machine) -> str:
    parts = [
        counted(max(1, len(machine.packages)), "package"),
        counted(len(machine.nodes), "node"),
        counted(len(machine.all_cores), "core"),
        f"{counted(len(machine.cpus_online), 'CPU')} online",
        f"{len(machine.allowed)} allowed",
    ]
    if machine.hybrid:
        efficient = sum(core.kind == "E" for core in machine.all_cores)
        parts[2] += f" ({len(machine.all_cores) - efficient} P, {efficient} E)"
    if machine.cpus_offline:
        parts.append(f"{len(machine.cpus_offline)} offline")
    return ", ".join(parts)


def _cores(found: Inspection, width: int) -> Text:
    """Every core as its CPUs with their marks, by package, node and kind."""
    machine = found.machine
    marks = cpu_marks(machine, found.plan)
    text = Text()
    cores = sorted(machine.all_cores, key=_group)
    cell_width = max((len(_cell(core, marks).plain) for core in cores), default=0)
    for key, members in groupby(cores, key=_group):
        text.append(_group_name(key, machine) + "\n")
        cells = [_cell(core, marks) for core in members]
        for cell in cells:
            cell.pad_right(cell_width - len(cell.plain) + 1)
        per_line = max(1, (width - _INDENT) // (cell_width + 1))
        for start in range(0, len(cells), per_line):
            text.append(" " * _INDENT)
            text.append_text(Text.assemble(*cells[start : start + per_line], "\n"))
    if machine.cpus_offline:
        text.append(f"offline: CPUs {format_cpulist(machine.cpus_offline)}\n", style="dim")
    if machine.nodes_offline:
        text.append(f"offline: nodes {format_cpulist(machine.nodes_offline)}\n", style="dim")
    return text.append_text(_legend(set(marks.values())))


def cpu_marks(machine: Machine, plan: Plan) -> dict[int, str]:
    """The mark of every CPU that is online."""
    cpus = {cpu for core in machine.all_cores for cpu in core.siblings}
    marks = {cpu: FREE if cpu in machine.allowed else FORBIDDEN for cpu in cpus}
    marks |= dict.fromkeys(plan.spare, SPARE)
    marks |= {worker.cpu: WORKER for worker in plan.workers if worker.cpu is not None}
    return marks if plan.host_cpu is None else {**marks, plan.host_cpu: HOST}


def _group(core: Core) -> tuple[int, int, str]:
    return core.package, core.node, "" if core.kind == "P" else core.kind


def _group_name(key: tuple[int, int, str], machine: Machine) -> str:
    package, node, kind = key
    kinds = f", {kind or 'P'} cores" if machine.hybrid else ""
    return f"package {package}, node {node}{kinds}"


def _cell(core: Core, marks: dict[int, str]) -> Text:
    """Such as "[0H 24.]"."""
    cell = Text("[")
    for i, cpu in enumerate(core.siblings):
        cell.append(" " * (i > 0))
        cell.append(f"{cpu}{marks[cpu]}", style=_MARKS[marks[cpu]][1])
    return cell.append("]")


def _legend(used: set[str]) -> Text:
    text = Text()
    for mark, (meaning, style) in _MARKS.items():
        if mark in used:
            text.append("   " if text else "")
            text.append(mark, style=style)
            text.append(f" {meaning}")
    return text


def _nodes(found: Inspection) -> Table:
    table = plain_table("node", "CPUs", ">memory", ">free", ">cached files", "use")
    for node in found.machine.nodes:
        table.add_row(
            "one (virtual)" if node.virtual else str(node.node_id),
            format_cpulist(node.cpus) or "none",
            size(node.memory_bytes),
            size(node.free_bytes),
            size(node.reclaimable_bytes),
            ", ".join(_uses(node, found.plan)),
        )
    return table


def _uses(node: Node, plan: Plan) -> Iterator[str]:
    if not node.has_memory:
        yield "no memory"
    elif not node.mem_allowed:
        yield "memory not allowed"
    if not node.cpus:
        yield "no CPUs"
        return
    workers = sum(worker.cpu in node.cpus for worker in plan.workers)
    host = plan.host_cpu in node.cpus
    if host or workers:
        yield " and ".join(["the host's thread"] * host + [counted(workers, "worker")] * (workers > 0))
    else:
        yield "no thread" if plan.pinned else "threads are not pinned"


def _distances(machine: Machine, width: int | None) -> Table | Text:
    """A table, or lines where the terminal is too narrow for one."""
    ids = [node.node_id for node in machine.nodes]
    if width is not None and 6 * (len(ids) + 2) > width:
        rows = (" ".join(str(machine.distance(start, end)) for end in ids) for start in ids)
        return lines(f"{start}: {row}" for start, row in zip(ids, rows, strict=True))
    table = plain_table("from \\ to", *(f">{node_id}" for node_id in ids))
    for start in ids:
        table.add_row(str(start), *(str(machine.distance(start, end)) for end in ids))
    return table


def _limits(machine: Machine) -> Table:
    table = plain_table("what", "value", "from")
    for name, label in _LIMITS.items():
        limit = machine.limit(name)
        if limit is None:
            table.add_row(label, "none found", "")
        else:
            table.add_row(label, _limit_value(limit), one_line(limit.source))
    return table


def _limit_value(limit: Limit) -> str:
    value = limit.value
    if value is None:
        return _UNLIMITED
    if isinstance(value, tuple):
        noun = "CPU" if limit.name in _CPU_SETS else "node"
        return f"{format_cpulist(value)} ({counted(len(value), noun)})"
    if limit.name == "cpu_quota":
        return counted(int(value), "CPU")
    return format_bytes(value) if isinstance(value, int) else one_line(str(value))


def _settings(machine: Machine) -> Table:
    balancing, pages = machine.numa_balancing, machine.huge_pages
    thp = "/sys/kernel/mm/transparent_hugepage"
    table = plain_table("what", "value", "from")
    rows = (
        (
            "NUMA balancing",
            None if balancing is None else f"on ({balancing})" if balancing else "off",
            "/proc/sys/kernel/numa_balancing",
        ),
        (
            "frequency governor",
            ", ".join(machine.governors) or None,
            "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        ),
        ("transparent huge pages", pages.enabled, f"{thp}/enabled"),
        ("the same for shared memory", pages.shmem_enabled, f"{thp}/shmem_enabled"),
    )
    for label, value, source in rows:
        table.add_row(label, "unknown" if value is None else one_line(value), "" if value is None else source)
    return table


def _plan_sections(
    found: Inspection, bytes_per_s: float | None, *, explain: bool
) -> Iterator[tuple[str, RenderableType]]:
    yield "Plan", lines(_plan_lines(found, explain))
    yield "Node processes", node_processes(found.plan, found.model is not None)
    if found.model is not None:
        yield "Model", lines(_model_lines(found, bytes_per_s))
    if found.notes:
        yield "Notes", lines(found.notes)
    if found.warnings:
        yield "Warnings", lines(found.warnings, style="yellow")


def _plan_lines(found: Inspection, explain: bool) -> Iterator[str]:
    plan = found.plan
    yield f"split {'on' if plan.split.on else 'off'}: {plan.split.reason}"
    workers = counted(plan.n_workers, "worker")
    if plan.host_cpu is None:
        yield f"{counted(plan.threads, 'thread')}, not pinned: {workers} and the host's"
    else:
        yield f"{counted(plan.threads, 'thread')}: the host's on CPU {plan.host_cpu}, {workers}"
    if not plan.spin:
        yield "threads sleep rather than spin: they share CPUs or CPU time"
    if plan.spare:
        yield f"left free: CPU{'s' * (len(plan.spare) > 1)} {format_cpulist(plan.spare)}"
    if explain and found.default.n_workers != plan.n_workers:
        default = found.default
        split = "on" if default.split.on else f"off ({default.split.reason})"
        yield f"by default: {counted(default.n_workers, 'worker')}, split {split}"


def node_processes(plan: Plan, sized: bool) -> Table:
    """A row for each node process; with its share of the model if that is `sized`.

    In test mode, whose slices are on no node of their own, the first column numbers these."""
    sizes = (">rows", ">weights", ">KV, state, buffers", ">room", "fits") if sized else (">room",)
    table = plain_table("node" if plan.placed or not plan.split.on else "slice", ">threads", "CPUs", *sizes)
    for node in plan.nodes:
        cpus = "not pinned" if node.cpus is None else format_cpulist(node.cpus)
        shown = _sized(node) if sized else (size(node.room_bytes),)
        table.add_row(str(node.node), str(node.threads), cpus, *shown)
    return table


def _sized(node: NodePlan) -> tuple[str, ...]:
    fits = {True: "yes", False: "no", None: "unknown"}[node.fits]
    rows = "unknown" if node.rows is None else f"{node.rows:,}"
    return rows, size(node.bytes), size(node.kv_bytes), size(node.room_bytes), fits


def _model_lines(found: Inspection, bytes_per_s: float | None) -> Iterator[str]:
    assert found.model is not None
    token = found.model.token_bytes
    yield f"{one_line(str(found.model_path))}: {found.model.model.arch}, context {found.model.limits.n_ctx}"
    fits = {True: "it fits", False: "it does not fit", None: "whether it fits is not known"}
    yield fits[found.plan.fits]
    each = f", {format_bytes(max(token))} on the busiest node" if len(token) > 1 else ""
    yield f"one token reads {format_bytes(sum(token))} of weights{each}"
    if bytes_per_s is not None:
        ceiling = found.model.ceiling_tok_s(bytes_per_s)
        yield f"at {format_rate(bytes_per_s)} a node, memory allows at most {format_tok_per_s(ceiling)}"
