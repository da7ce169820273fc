"""Small agents with what the built-in model lacks: pad = eos, absolute positions, dropout, two EOS ids, a
chat template.

All share one byte-level vocabulary of 320 entries. Weights are drawn wide (0.3) so that the distributions are
peaked: with nearly flat ones a greedy choice would hang on the last bit.
"""

import json
from collections.abc import Callable

import pytest
import torch
from tokenizers import AddedToken, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from comlrl_core.team.agent import Agent, make_agent
from comlrl_core.team.tiny import load_tiny, tiny_tokenizer

torch.set_num_threads(1)

CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_tokenizer(*, pad_is_eos: bool = False, bos: bool = False, chat_template: str | None = None):
    """The built-in tokenizer's vocabulary behind other special tokens; `bos` is put in front by default, as
    Llama's."""
    backend = tiny_tokenizer().backend_tokenizer
    if bos:
        backend.add_special_tokens([AddedToken("<bos>", special=True)])  # id 320
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        bos_token="<bos>" if bos else None,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def widen(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draw every matrix anew with a standard deviation of 0.3."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def absolute_model() -> PreTrainedModel:
    """GPT-2: learnt absolute positions and dropout, a context of 96 tokens."""
    config = GPT2Config(
        vocab_size=321, n_positions=96, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=1,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    return widen(GPT2LMHeadModel(config))


def rotary_model() -> PreTrainedModel:
    """Llama: rotary positions, no tied embeddings."""
    config = LlamaConfig(
        vocab_size=321, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=320, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return widen(LlamaForCausalLM(config))


def sliding_model() -> PreTrainedModel:
    """Mistral: rotary positions, attention to the last 8 tokens alone."""
    config = MistralConfig(
        vocab_size=321, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=8, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, head_dim=8,
    )  # fmt: skip
    return widen(MistralForCausalLM(config))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "rotary": rotary_model,
    "absolute": absolute_model,
    "sliding": sliding_model,
}


@pytest.fixture(params=sorted(MODELS))
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """One model of each kind of position."""
    return MODELS[request.param]()


@pytest.fixture
def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`builtin:tiny` itself."""
    return load_tiny(0)


@pytest.fixture
def absolute() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """GPT-2-like: absolute positions, dropout, pad = eos, no BOS."""
    return absolute_model(), byte_tokenizer(pad_is_eos=True)


@pytest.fixture
def chat() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Llama-like: a BOS put in front by default, and a chat template that writes one too."""
    return rotary_model(), byte_tokenizer(bos=True, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def two_eos() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The tokenizer knows one EOS (1); `generation_config` declares another one, that of the full stop."""
    model = rotary_model()
    model.generation_config.eos_token_id = [1, dot_id()]
    return model, byte_tokenizer()


@pytest.fixture
def chat_agent(chat: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> Agent:
    return make_agent(0, *chat, "chat")


@pytest.fixture
def two_eos_agent(two_eos: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> Agent:
    return make_agent(0, *two_eos, "two eos")


def dot_id() -> int:
    """The id of '.' in the shared vocabulary."""
    vocabulary = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    return int(vocabulary["."])


@pytest.fixture(name="dot_id")
def dot_id_fixture() -> int:
    return dot_id()
