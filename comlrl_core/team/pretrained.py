"""`builtin:tiny-pretrained`: the tiny model after a few seconds of language modelling on the bundled grammar.

A reward model that starts from it generalises to other tasks; one that starts from random weights remembers its
pairs. It is made on the spot, always by the same steps, and kept in the user's cache (`$XDG_CACHE_HOME/comlrl`).
"""

import hashlib
import logging
import os
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_model, save_model
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl_core.environments.grammar import sentences
from comlrl_core.errors import DataError
from comlrl_core.progress import progress
from comlrl_core.randomness import generator, torch_seed
from comlrl_core.store import whole_folder
from comlrl_core.team.sources import check_weights
from comlrl_core.team.tiny import load_tiny

CORPUS_SENTENCES = 6000
CORPUS_SEED = 1  # its sentences are drawn apart from those of the built-in tasks and of the tokenizer
STEPS = 150
BATCH_SIZE = 16
LENGTH = 96
LEARNING_RATE = 6e-3
WARMUP_STEPS = 10
WEIGHTS = "model.safetensors"
RECIPE = 1  # raise it when the steps below change: a cached model of another recipe is not used

logger = logging.getLogger(__name__)


def load_tiny_pretrained() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The pre-trained tiny model and its tokenizer; fp32, on the CPU, in eval mode. There is one, whatever the seed."""
    model, tokenizer = load_tiny(torch_seed("tiny pretrained", "initial weights"))
    cached = cache_folder() / f"tiny-pretrained-{_recipe()}"
    if not _read(model, cached):
        _pretrain(model, tokenizer)
        _write(model, cached)
    return model.eval(), tokenizer


def cache_folder() -> Path:
    """Where this package keeps what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "comlrl"


def _recipe() -> str:
    parts = (RECIPE, CORPUS_SENTENCES, CORPUS_SEED, STEPS, BATCH_SIZE, LENGTH, LEARNING_RATE, WARMUP_STEPS)
    return hashlib.sha256(repr((*parts, torch.__version__)).encode()).hexdigest()[:16]


def _read(model: PreTrainedModel, folder: Path) -> bool:
    if not (folder / WEIGHTS).is_file():
        return False
    try:
        check_weights(folder)
        load_model(model, folder / WEIGHTS)
    except (DataError, RuntimeError, OSError) as error:
        logger.warning("%s cannot be read and is made again: %s", folder / WEIGHTS, error)
        return False
    return True


def _write(model: PreTrainedModel, folder: Path) -> None:
    try:
        with whole_folder(folder) as staging:
            save_model(model, str(staging / WEIGHTS))
    except OSError as error:  # a cache is no must
        logger.warning("%s: the pre-trained tiny model is not kept there: %s", folder, error)


def _pretrain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Next-token prediction on sentences that follow each other; always on one thread, so that the sums agree."""
    rows = _rows(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    draws = generator("tiny pretrained", "batches")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad(), progress("Pre-training builtin:tiny-pretrained", STEPS, "step") as bar:
            for step in range(STEPS):
                warm = min(1.0, (step + 1) / WARMUP_STEPS)
                for group in optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * warm * (1 - step / STEPS)
                batch = rows[torch.from_numpy(draws.integers(len(rows), size=BATCH_SIZE))]
                logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
                loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                bar.update(1)
    finally:
        torch.set_num_threads(threads)
    logger.info("builtin:tiny-pretrained: loss %.2f after %d steps", loss.item(), STEPS)


def _rows(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Rows of `LENGTH` tokens cut from sentences with an end-of-sequence token after each, Long `[R, LENGTH]`."""
    eos = cast(int, tokenizer.eos_token_id)
    encoded = tokenizer(sentences(CORPUS_SENTENCES, CORPUS_SEED), add_special_tokens=False)["input_ids"]
    stream = [token for ids in encoded for token in (*ids, eos)]
    return torch.tensor(stream[: len(stream) // LENGTH * LENGTH]).view(-1, LENGTH)
