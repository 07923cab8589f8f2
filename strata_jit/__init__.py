"""CPU inference of mixture-of-experts GGUF models, in one pinned process per NUMA node.

    import strata_jit

    with strata_jit.load("model.gguf") as model:
        for piece in model.generate(model.chat("Name three rivers."), max_tokens=64):
            ...

Owns the public names and the version. Each name is imported when it is first used, so that importing the
package costs next to nothing: the command line and the node processes rely on that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata_jit.engine.builtin import builtin_model
    from strata_jit.engine.expert_pool import ExpertPool
    from strata_jit.engine.model import Model, load
    from strata_jit.engine.perplexity import Divergence, PerplexityResult
    from strata_jit.engine.results import GenerationResult, KernelUse, ModelInfo, NodeInfo
    from strata_jit.engine.sample import Sampling
    from strata_jit.errors import (
        ModelError,
        NodeDied,
        PlacementError,
        PoolError,
        StrataError,
        TopologyError,
        UsageError,
    )
    from strata_jit.gguf.chat import render_chat
    from strata_jit.gguf.tokenizer import Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "Divergence": "strata_jit.engine.perplexity",
    "ExpertPool": "strata_jit.engine.expert_pool",
    "GenerationResult": "strata_jit.engine.results",
    "KernelUse": "strata_jit.engine.results",
    "Model": "strata_jit.engine.model",
    "ModelError": "strata_jit.errors",
    "ModelInfo": "strata_jit.engine.results",
    "NodeDied": "strata_jit.errors",
    "NodeInfo": "strata_jit.engine.results",
    "PerplexityResult": "strata_jit.engine.perplexity",
    "PlacementError": "strata_jit.errors",
    "PoolError": "strata_jit.errors",
    "Sampling": "strata_jit.engine.sample",
    "StrataError": "strata_jit.errors",
    "Tokenizer": "strata_jit.gguf.tokenizer",
    "TopologyError": "strata_jit.errors",
    "UsageError": "strata_jit.errors",
    "builtin_model": "strata_jit.engine.builtin",
    "load": "strata_jit.engine.model",
    "render_chat": "strata_jit.gguf.chat",
}

__all__ = [
    "Divergence",
    "ExpertPool",
    "GenerationResult",
    "KernelUse",
    "Model",
    "ModelError",
    "ModelInfo",
    "NodeDied",
    "NodeInfo",
    "PerplexityResult",
    "PlacementError",
    "PoolError",
    "Sampling",
    "StrataError",
    "Tokenizer",
    "TopologyError",
    "UsageError",
    "__version__",
    "builtin_model",
    "load",
    "render_chat",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
