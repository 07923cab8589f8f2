"""`strata-jit topology`: the machine, what limits this process on it, and the plan with its reasons.

Owns its options only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from strata_jit.commands.common import (
    AT_LEAST_1,
    model_errors,
    plan_choice,
    plan_options,
    read_environment,
    with_output,
)
from strata_jit.errors import UsageError

if TYPE_CHECKING:
    from strata_jit.report import TextOutput


@click.command(short_help="Show the machine, its limits and the plan.")
@click.option("--root", default="/", metavar="DIR", help="Read a recorded machine below DIR.")
@click.option("--model", metavar="PATH", help="GGUF file: what it needs on each node. It is not loaded.")
@click.option("--ctx", type=AT_LEAST_1, metavar="N", help="Context that memory is counted for.")
@click.option("--bandwidth", type=float, metavar="GB/S", help="Of a node: gives the model's tok/s ceiling.")
@plan_options
@click.option("--plan-only", is_flag=True, help="Only the plan, and why it is so.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of the view.")
@click.pass_context
def topology(ctx: click.Context, /, **given: Any) -> None:
    """Show packages, nodes and cores, what this process may use of them, and what the pool will do.

    \b
    Environment (options win):
      STRATA_NUMA_POOL        0, 1 or test, as for decode
      STRATA_EXCHANGE_ROTATE  0 or 1, as for decode
    """
    n_ctx = given.pop("ctx")
    ctx.exit(_topology(n_ctx, **given))


def _topology(
    n_ctx: int | None,
    root: str,
    model: str | None,
    bandwidth: float | None,
    pool_workers: int | None,
    pool_affinity: str | None,
    test_slices: int | None,
    plan_only: bool,
    as_json: bool,
) -> int:
    from strata_jit.engine.inspection import inspect
    from strata_jit.report.topology_json import topology_json
    from strata_jit.report.topology_view import topology_view

    if model is None and (bandwidth is not None or n_ctx is not None):
        raise UsageError(
            f"--{'ctx' if bandwidth is None else 'bandwidth'} is about a model: give --model too"
        )
    options = plan_choice(read_environment(os.environ), pool_workers, pool_affinity, test_slices)
    with model_errors():
        found = inspect(options, root, model, n_ctx)
    bytes_per_s = None if bandwidth is None else bandwidth * 1e9

    def write(out: TextOutput) -> int:
        if as_json:
            out.write(topology_json(found, bytes_per_s))
        else:
            out.write_own(topology_view(found, bytes_per_s, plan_only=plan_only, width=out.width))
        return 0

    return with_output(write)
