"""What a GGUF file says: header, metadata, tensors, block layouts, tokenizer and chat template.

Data only: nothing here computes with weights or knows a model's architecture. Layout of the file: ggml's
docs/gguf.md and gguf.h.
"""
