"""What people and programs see of `strata-jit perplexity`: the running value, the figures, a JSON document.

Owns their form; measures nothing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from strata_jit.engine.perplexity import Divergence, PerplexityResult
from strata_jit.engine.results import ModelInfo
from strata_jit.report.run import info_values, print_message, versions

JSON_KEYS = (
    "perplexity perplexity_stderr nll nll_stderr tokens ctx windows scored per_position kl eval_s tok_s "
    "model load_s compile_s weight_bytes_per_token workers threads split nodes kernels versions"
).split()


class RunningValue:
    """The perplexity so far on stderr: one line that is written over on a terminal, else a line a window."""

    def __call__(self, done: int, total: int, perplexity: float) -> None:
        text = f"window {done} of {total}, {perplexity:.4f} so far"
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"\rperplexity: {text}" + "\n" * (done == total))
            sys.stderr.flush()
        else:
            print_message("perplexity", text)


def perplexity_text(result: PerplexityResult, per_position: bool) -> str:
    """The figures, a line each; before them, if `per_position`, a tab-separated line for each token."""
    lines = [*_position_lines(result), ""] if per_position else []
    return "\n".join([*lines, *_figure_lines(result)]) + "\n"


def _figure_lines(result: PerplexityResult) -> Iterator[str]:
    yield f"perplexity        {result.perplexity:.4f} +/- {result.perplexity_stderr:.4f}"
    yield f"mean NLL          {result.nll:.6f} +/- {result.nll_stderr:.6f} nats"
    windows = f"{result.n_windows} windows of {result.n_ctx}"
    yield f"scored            {len(result.token_nll)} of {result.n_tokens} tokens, {windows}"
    if result.divergence is not None:
        kl = result.divergence
        yield f"base perplexity   {math.exp(kl.base_nll):.4f}"
        yield f"mean KL           {kl.mean:.6f} +/- {kl.mean_stderr:.6f} nats"
        yield f"median KL         {kl.median:.6f} nats"
        yield f"maximum KL        {kl.max:.6f} nats"
        yield f"same likeliest    {100 * kl.same_top:.2f} %"


def _position_lines(result: PerplexityResult) -> Iterator[str]:
    columns = [result.positions.tolist(), result.token_ids.tolist(), result.token_nll.tolist()]
    names = ["position", "token_id", "nll"]
    if result.divergence is not None:
        columns.append(result.divergence.kl.tolist())
        names.append("kl")
    yield "\t".join(names)
    for position, token_id, *figures in zip(*columns, strict=True):
        yield "\t".join([str(position), str(token_id), *(f"{figure:.6f}" for figure in figures)])


def perplexity_json(result: PerplexityResult, info: ModelInfo, eval_s: float) -> str:
    """One line with the keys `JSON_KEYS`, always all of them; `kl` is null where no base was given."""
    kl = result.divergence
    values = {
        "perplexity": _finite(result.perplexity),
        "perplexity_stderr": _finite(result.perplexity_stderr),
        "nll": result.nll,
        "nll_stderr": result.nll_stderr,
        "tokens": result.n_tokens,
        "ctx": result.n_ctx,
        "windows": result.n_windows,
        "scored": len(result.token_nll),
        "per_position": {
            "position": result.positions.tolist(),
            "token_id": result.token_ids.tolist(),
            "nll": result.token_nll.tolist(),
            "kl": None if kl is None else kl.kl.tolist(),
        },
        "kl": None if kl is None else _kl_values(kl),
        "eval_s": eval_s,
        "tok_s": result.n_windows * result.n_ctx / eval_s,
        "versions": versions(),
        **info_values(info),
    }
    return json.dumps({key: values[key] for key in JSON_KEYS}, allow_nan=False) + "\n"


def _kl_values(kl: Divergence) -> dict[str, Any]:
    return {
        "mean": kl.mean,
        "mean_stderr": kl.mean_stderr,
        "median": kl.median,
        "max": kl.max,
        "same_top": kl.same_top,
        "base_nll": kl.base_nll,
        "base_perplexity": _finite(math.exp(kl.base_nll)),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
