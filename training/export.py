"""Writes a checkpoint as a GGUF file of float32 weights.

    python export.py WORK MODEL.gguf

`strata-jit quantize` makes the small file of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from corpus import END_OF_TEXT, PACKAGE, VERSION
from moe import Shape

NAME = "strata-kjv-8m"
TEMP, TOP_P, PENALTY = 0.8, 0.9, 1.1
# Of a block's parameters; those of the model itself stand in `write_weights`.
NAMES = {
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.output": "attn_output",
    "ffn_norm": "ffn_norm",
    "experts.router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
}


def write_origin(writer: gguf.GGUFWriter) -> None:
    """Who made the model, of what, and how to sample from it."""
    writer.add_name(NAME)
    writer.add_author("strata-jit")
    writer.add_license("mit")
    writer.add_description(
        "A small mixture of experts that goes on with text in the manner of the King James Bible, trained "
        f"from scratch on the text in the package {PACKAGE} {VERSION} of the Python Package Index"
    )
    writer.add_languages(["en"])
    writer.add_float32("general.sampling.temp", TEMP)
    writer.add_float32("general.sampling.top_p", TOP_P)
    writer.add_float32("general.sampling.penalty_repeat", PENALTY)


def write_shape(writer: gguf.GGUFWriter, s: Shape) -> None:
    writer.add_block_count(s.n_layer)
    writer.add_context_length(s.n_ctx)
    writer.add_embedding_length(s.n_embd)
    writer.add_feed_forward_length(s.n_ff_exp)
    writer.add_head_count(s.n_head)
    writer.add_head_count_kv(s.n_head_kv)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_freq_base(s.rope_base)
    writer.add_layer_norm_rms_eps(s.rms_eps)
    writer.add_expert_count(s.n_expert)
    writer.add_expert_used_count(s.n_expert_used)
    writer.add_expert_feed_forward_length(s.n_ff_exp)


def write_vocabulary(writer: gguf.GGUFWriter, path: Path) -> None:
    """Of the vocabulary file that `corpus.prepare` wrote. No token is put before a prompt by itself."""
    model = json.loads(path.read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    types = [gguf.TokenType.CONTROL if token == END_OF_TEXT else gguf.TokenType.NORMAL for token in tokens]
    end = tokens.index(END_OF_TEXT)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def write_weights(writer: gguf.GGUFWriter, state: dict[str, torch.Tensor]) -> None:
    """All parameters; the embedding is the output matrix too, as in a file without one."""
    for name, value in state.items():
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            name = f"blk.{layer}.{NAMES[rest]}"
        else:
            name = {"embedding": "token_embd", "output_norm": "output_norm"}[name]
        writer.add_tensor(f"{name}.weight", value.float().contiguous().numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of the training run")
    parser.add_argument("model", type=Path, help="file to write")
    args = parser.parse_args()
    checkpoint = torch.load(args.work / "checkpoint.pt", weights_only=True)
    writer = gguf.GGUFWriter(args.model, "qwen3moe")
    write_origin(writer)
    write_shape(writer, Shape(**checkpoint["shape"]))
    write_vocabulary(writer, args.work / "tokenizer.json")
    write_weights(writer, checkpoint["model"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
