"""What stands for options of `decode` that were not given: the built-in model, a file's sampling.

Each is told in a line on stderr. Imports what only a real run needs inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import strata_jit
from strata_jit.errors import UsageError

if TYPE_CHECKING:
    from strata_jit.engine.sample import Sampling
    from strata_jit.gguf.reader import GGUFFile

SAMPLING_OPTIONS = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed")


def builtin_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without --model: the built-in model, which takes a prompt as it is, or begins a text without one."""
    from strata_jit.engine.builtin import BUILTIN_NAME, BUILTIN_START
    from strata_jit.report import print_messages

    if given["system"] is not None or given["think"] is not None:
        wrong = "leave out --system, --think and --no-think, or give --model"
        raise UsageError(f"the built-in model has no chat template: {wrong}")
    text = f"no --model: the built-in {BUILTIN_NAME} goes on with the text, it answers no questions"
    print_messages("note", [text])
    has_prompt = given["prompt"] is not None or given["prompt_file"] is not None
    prompt = given["prompt"] if has_prompt else BUILTIN_START
    return {"model": str(strata_jit.builtin_model()), "raw": True, "prompt": prompt}


def chosen_sampling(options: Mapping[str, Any], gguf: GGUFFile) -> Sampling:
    """What the options say; for those not given (None), what the file recommends, if it does."""
    from strata_jit.engine.builtin import recommended_sampling
    from strata_jit.engine.sample import Sampling
    from strata_jit.report import print_messages

    given = {name: value for name, value in options.items() if value is not None}
    recommended = {name: value for name, value in recommended_sampling(gguf).items() if name not in given}
    sampling = Sampling(**recommended, **given)
    if recommended and not sampling.is_greedy:
        shown = ", ".join(f"{name.replace('_', '-')} {value:.4g}" for name, value in recommended.items())
        print_messages("note", [f"sampling as the file recommends: {shown}; --temp 0 is greedy"])
    return sampling
