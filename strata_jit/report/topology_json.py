"""The JSON document of `strata-jit topology`.

Owns its keys: `machine`, `limits`, `plan` and `warnings`, and `model` where one was named.
"""

from __future__ import annotations

import json
from typing import Any

from strata_jit.engine.inspection import Inspection
from strata_jit.placement import Plan
from strata_jit.topology.description import Machine


def topology_json(found: Inspection, bytes_per_s: float | None) -> str:
    """One line with the keys machine, limits, plan and warnings; with a model also `model`."""
    document: dict[str, Any] = {
        "machine": _machine_values(found.machine),
        "limits": [
            {"name": limit.name, "value": limit.value, "source": limit.source}
            for limit in found.machine.limits
        ],
        "plan": _plan_values(found.plan),
        "warnings": list(found.warnings),
    }
    if found.model is not None:
        document["model"] = _model_values(found, bytes_per_s)
    return json.dumps(document, allow_nan=False) + "\n"


def _machine_values(machine: Machine) -> dict[str, Any]:
    return {
        "cpu_model": machine.cpu_model,
        "packages": [
            {"id": package.package_id, "cores": package.cores, "cpus": sorted(package.cpus)}
            for package in machine.packages
        ],
        "nodes": [
            {
                "id": node.node_id,
                "cpus": sorted(node.cpus),
                "memory_bytes": node.memory_bytes,
                "free_bytes": node.free_bytes,
                "distances": list(node.distances),
            }
            for node in machine.nodes
        ],
        "cores": len(machine.all_cores),
        "cpus_online": sorted(machine.cpus_online),
        "cpus_offline": sorted(machine.cpus_offline),
        "cpus_allowed": sorted(machine.allowed),
        "nodes_offline": sorted(machine.nodes_offline),
        "hybrid": machine.hybrid,
        "memory_bytes": machine.memory_bytes,
        "available_bytes": machine.available_bytes,
        "numa_balancing": machine.numa_balancing,
        "governors": list(machine.governors),
        "transparent_huge_pages": machine.huge_pages.enabled,
    }


def _plan_values(plan: Plan) -> dict[str, Any]:
    return {
        "split": {"on": plan.split.on, "reason": plan.split.reason},
        "host_cpu": plan.host_cpu,
        "workers": [{"cpu": worker.cpu, "node": worker.node} for worker in plan.workers],
        "nodes": [
            {"node": node.node, "rows": node.rows, "bytes": node.bytes, "room_bytes": node.room_bytes}
            for node in plan.nodes
        ],
    }


def _model_values(found: Inspection, bytes_per_s: float | None) -> dict[str, Any]:
    assert found.model is not None
    return {
        "path": found.model_path,
        "arch": found.model.model.arch,
        "ctx": found.model.limits.n_ctx,
        "fits": found.plan.fits,
        "weight_bytes_per_token": list(found.model.token_bytes),
        "ceiling_tok_s": None if bytes_per_s is None else found.model.ceiling_tok_s(bytes_per_s),
    }
