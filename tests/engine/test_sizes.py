"""What a plan knows of a model's memory."""

from strata_jit import models
from strata_jit.engine.setup import model_sizes
from strata_jit.gguf.reader import open_gguf
from strata_jit.models.language_model import StepLimits


def test_partial_results_of_attention_are_counted(request_golden):
    """They grow with the rows of a step and with the context's blocks of 256."""
    file = open_gguf(request_golden("glm4moe") / "model.gguf")
    n_head, value_dim = (file.metadata[f"glm4moe.attention.{key}"] for key in ("head_count", "value_length"))
    programs = [models.build(file, StepLimits(max_rows=512, n_ctx=n_ctx)) for n_ctx in (256, 1024)]
    one, four = (model_sizes(model.program, 1).buffer_bytes for model in programs)
    assert four - one == 3 * 512 * n_head * 4 * (8 + value_dim)
