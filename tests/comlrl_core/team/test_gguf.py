"""The import of a packaged GGUF model: a small real one, and everything that can be missing."""

import subprocess
import zipfile

import pytest
import torch

from comlrl_core.errors import ConfigError
from comlrl_core.team import gguf as gguf_module
from comlrl_core.team.gguf import import_gguf_package
from comlrl_core.team.team import load_team


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.fixture
def registry(monkeypatch):
    """pip, replaced: `registry.files` is what the downloaded wheel holds, None a failed download."""

    class Registry:
        files: dict[str, bytes] | None = None

    def run(command, **options):
        if Registry.files is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for nothing")
        folder = gguf_module.Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        wheel(folder / "model-1-py3-none-any.whl", Registry.files)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gguf_module.subprocess, "run", run)
    return Registry


def small_llama_gguf(path, chat_template):
    """A Llama of one layer, hidden size 32, in float32, with a byte-level vocabulary, as llama.cpp writes
    it."""
    gguf = pytest.importorskip("gguf")
    from tokenizers import pre_tokenizers

    generator = torch.Generator().manual_seed(0)

    def weights(*shape):
        return (0.3 * torch.randn(*shape, generator=generator)).numpy()

    vocabulary = ["<pad>", "<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("small")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3] + [1] * (len(vocabulary) - 2))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(chat_template)
    writer.add_tensor("token_embd.weight", weights(len(vocabulary), 32))
    writer.add_tensor("output_norm.weight", weights(32))
    for name, shape in {
        "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
        "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,),
    }.items():  # fmt: skip
        writer.add_tensor(f"blk.0.{name}.weight", weights(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_packaged_model_becomes_a_plain_folder(registry, tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    small_llama_gguf(tmp_path / "small.gguf", template)
    registry.files = {"pkg/small.gguf": (tmp_path / "small.gguf").read_bytes(), "pkg/__init__.py": b""}
    (tmp_path / "small.gguf").unlink()
    out = import_gguf_package("pkg==1", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    team = load_team(agent_model=str(out), num_agents=1)
    agent = team.agents[0]
    assert {parameter.dtype for parameter in agent.model.parameters()} == {torch.float32}
    assert agent.tokenizer.chat_template == template
    assert agent.eos_ids == (1,)
    assert agent.context_length == 64
    assert agent.decode(agent.encode_prompt("the bird")) == "the bird"
    with pytest.raises(ConfigError, match="exists already"):
        import_gguf_package("pkg==1", out)


def test_without_the_extra_the_command_to_install_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'comlrl\[gguf\]'"):
        import_gguf_package("pkg", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "could not download 'pkg': ERROR: No matching distribution"),
        ({"pkg/__init__.py": b""}, "must hold one GGUF file, but holds none"),
        ({"a.gguf": b"", "b.gguf": b""}, "but holds a.gguf, b.gguf"),
    ],
)
def test_a_package_that_cannot_be_used_is_named_and_leaves_nothing(registry, monkeypatch, tmp_path, files, said):
    monkeypatch.setattr(gguf_module.importlib.util, "find_spec", lambda name: object())
    registry.files = files
    with pytest.raises(ConfigError, match=said):
        import_gguf_package("pkg", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
