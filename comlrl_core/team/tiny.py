"""`builtin:tiny`: a model that is there without a download, learns within a minute and fits in a test.

Qwen2 architecture, 0.12 M parameters, random initialisation. Its byte-level tokenizer is trained in a few
hundredths of a second from sentences of the bundled grammar, so any text can be encoded and decoded without
loss.
"""

import json
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from comlrl_core.environments.grammar import sentences
from comlrl_core.team.sources import TINY_CONTEXT_LENGTH

VOCAB_SIZE = 320
PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
CORPUS_SENTENCES = 500
CORPUS_SEED = 0  # part of the tokenizer's identity: every tiny model of every run has the same tokenizer


def load_tiny(seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The tiny model, initialised from `seed` (any integer), and its tokenizer; fp32, on the CPU, in eval
    mode.

    The same seed gives the same bytes, also in another process; the global random state of torch is left as
    it was.
    """
    tokenizer = tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model = Qwen2ForCausalLM(config)
    return model.eval(), tokenizer


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A fresh tokenizer of 320 entries: `<pad>`, `<eos>`, 256 bytes and the corpus's 62 commonest merges.

    It is of the class that Transformers pairs with Qwen2 models, so `AutoTokenizer` reads a saved one back
    unchanged; another class would bring other splitting rules and a token outside the vocabulary.
    """
    vocab, merges = _vocab_and_merges()
    return _qwen2_tokenizer(vocab=dict(vocab), merges=list(merges))


@cache
def _vocab_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = _qwen2_tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(PAD_TOKEN, special=True), AddedToken(EOS_TOKEN, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(CORPUS_SENTENCES, CORPUS_SEED), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _qwen2_tokenizer(**vocabulary: Any) -> PreTrainedTokenizerBase:
    # Every byte has an entry, so nothing is unknown; naming EOS keeps the class from adding a token.
    special: dict[str, str] = {"pad_token": PAD_TOKEN, "eos_token": EOS_TOKEN, "unk_token": EOS_TOKEN}
    return Qwen2Tokenizer(
        **vocabulary, **special, model_max_length=TINY_CONTEXT_LENGTH, clean_up_tokenization_spaces=False
    )
