"""`MAACTrainer` and `IACTrainer`: published code, turns, critics that are saved and found again, checkpoints."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.environments import length_ratio as environment
from comlrl_core.errors import ConfigError, DataError
from comlrl_core.files import read_jsonl
from comlrl_core.team.checkpoint import digest_folder
from comlrl_core.team.tiny import load_tiny
from comlrl_core.trainers import actor_critic
from comlrl_core.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
from comlrl_core.trainers.checkpoints import list_checkpoints

TINY = "builtin:tiny"
Make = Callable[..., MAACTrainer]


@pytest.fixture
def make(tasks) -> Make:
    """`make(args={...}, kind="MAAC", **arguments)`: a trainer of two epochs."""

    def trainer(args: dict[str, Any] | None = None, kind: str = "MAAC", **arguments: Any) -> MAACTrainer:
        chosen = {
            "num_train_epochs": 2,
            "num_turns": 1,
            "max_new_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "agent_learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "early_termination_threshold": None,
            "rollout_buffer_size": 2,
            "eval_interval": 0,
            **(args or {}),
        }
        given = {
            "agent_model": None if "agents" in arguments else TINY,
            "reward_func": "builtin:length_ratio",
            "train_dataset": tasks,
            "formatters": "{prompt}\n",
            "external_transition": environment.transition if chosen["num_turns"] > 1 else None,
            **arguments,
        }
        given = {name: value for name, value in given.items() if value is not None}
        config = getattr(actor_critic, f"{kind}Config")(**chosen)
        return getattr(actor_critic, f"{kind}Trainer")(args=config, **given)

    return trainer


def critic_weights(trainer: MAACTrainer) -> list[bytes]:
    assert trainer.critics is not None
    modules = [critic.modules[0] for critic in trainer.critics.critics]
    return [p.detach().numpy().tobytes() for module in modules for p in module.parameters()]


VARIANTS = [
    ("MAAC", {}),
    ("MAAC", {"num_generations": 3, "critic_type": "q"}),
    ("MAAC", {"num_turns": 2, "critic_type": "q", "q_baseline_samples": 2, "reference_kl_enabled": True}),
    ("IAC", {"num_turns": 2, "lr_schedule": "constant_with_warmup", "lr_warmup_steps": 3}),
    ("IAC", {"num_turns": 2, "use_separate_critic": False, "value_head_hidden_dim": 8}),
    ("IAC", {"use_separate_critic": False, "critic_type": "q", "reference_kl_enabled": True}),
    ("IAC", {"use_separate_critic": False, "lora": {"r": 4}}),
]
IDS = ["maac", "candidates-q", "turns-q-kl", "iac", "heads", "heads-q-kl", "heads-adapters"]


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=IDS)
def test_two_epochs_and_two_more_are_four(make: Make, tmp_path: Path, kind: str, changes: dict) -> None:
    """A resumed run leaves the same folder, byte for byte, as four epochs at once, critics and their moments too."""
    four = make({**changes, "num_train_epochs": 4}, kind)
    before, critics_before = four.team.fingerprint(), critic_weights(four)
    four.train(checkpoint_dir=tmp_path / "four")
    assert four.team.fingerprint() != before and critic_weights(four) != critics_before
    make(changes, kind).train(checkpoint_dir=tmp_path / "two")
    more = make({**changes, "num_train_epochs": 4}, kind)
    more.train(resume_from_checkpoint=True, checkpoint_dir=tmp_path / "two")
    assert critic_weights(more) == critic_weights(four)
    assert [path.name for path in list_checkpoints(tmp_path / "two")] == [f"epoch_{n:04d}" for n in range(1, 5)]
    for name in ("epoch_0002", "epoch_0004"):
        assert digest_folder(tmp_path / "two" / name) == digest_folder(tmp_path / "four" / name)


@pytest.mark.parametrize(("kind", "changes"), [VARIANTS[0], VARIANTS[4]], ids=[IDS[0], IDS[4]])
def test_evaluating_every_step_or_never_gives_the_same_weights(make: Make, held_out, kind: str, changes: dict) -> None:
    found = []
    for every in (0, 1):
        trainer = make({**changes, "eval_interval": every}, kind, eval_dataset=held_out)
        trainer.train()
        found.append((trainer.team.fingerprint(), critic_weights(trainer)))
    assert found[0] == found[1]


def test_what_is_reported(make: Make, held_out) -> None:
    reported: dict[str, float] = {}
    make(
        {"num_turns": 2, "eval_interval": 2, "reference_kl_enabled": True}, eval_dataset=held_out,
        metrics_callback=lambda metrics, step: reported.update(metrics),
    ).train()  # fmt: skip
    assert {
        "turn_1/reward_mean", "turn_2/expected_return", "train/value_loss", "train/advantage_mean",
        "train/advantage_std", "train/entropy", "train/critic_0/grad_norm", "critic/explained_variance",
        "critic/value_mean", "kl/agent_1", "eval/turn_2/reward_mean",
    } <= reported.keys()  # fmt: skip


def test_one_agent_is_actor_critic(make: Make) -> None:
    loaded, tokenizer = load_tiny(0)
    trainer = make(
        agent_model=loaded, tokenizer=tokenizer, critic_model=TINY, reward_func=lambda texts: [1.0] * len(texts)
    )
    before = trainer.team.fingerprint()
    trainer.train()
    assert trainer.team.num_agents == 1 and trainer.team.fingerprint() != before


def test_save_model_writes_agents_and_critics_that_load_again(make: Make, tmp_path: Path) -> None:
    trainer = make({"num_train_epochs": 1}, "IAC")
    trainer.train()
    trainer.save_model(tmp_path / "out")
    folders = [str(tmp_path / "out" / "critic" / f"agent_{agent}") for agent in (0, 1)]
    agents = [str(tmp_path / "out" / f"agent_{agent}") for agent in (0, 1)]
    again = make({}, "IAC", agents=agents, critics=folders)
    assert critic_weights(again) == critic_weights(trainer)
    again.train()
    central = make({"num_train_epochs": 1})
    central.save_model(tmp_path / "central")
    found = make(critic_model=str(tmp_path / "central" / "critic"))
    assert critic_weights(found) == critic_weights(central)


def test_a_critic_with_a_tokenizer_of_its_own(make: Make, tmp_path: Path) -> None:
    """GPT-2 with a character tokenizer: it reads texts, so the actors' ids do not matter."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = {token: index for index, token in enumerate(["<unk>", "<end>", *map(chr, range(32, 127)), "\n"])}
    inner = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")
    config = GPT2Config(vocab_size=len(letters), n_positions=400, n_embd=16, n_layer=1, n_head=2, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    trainer = make(critic_model=str(tmp_path / "other"))
    before = critic_weights(trainer)
    trainer.train()
    assert critic_weights(trainer) != before
    assert trainer.critics is not None
    (critic,) = trainer.critics.critics
    assert critic.model.tokenizer.eos_token == "<end>" and critic.max_length == 400


def test_another_discount_or_critic_is_another_run(make: Make, tmp_path: Path) -> None:
    make({"num_train_epochs": 1}).train(checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"discount is 0\.5, was 1\.0"):
        make({"discount": 0.5}).train(resume_from_checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="critics"):
        make(critic_model="builtin:tiny-pretrained").train(resume_from_checkpoint=tmp_path)
    (tmp_path / "epoch_0001" / "critic" / "value_head.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="value_head"):
        make().train(resume_from_checkpoint=tmp_path)


def test_training_state_holds_strict_json(make: Make, tmp_path: Path) -> None:
    make({"num_train_epochs": 1}).train(checkpoint_dir=tmp_path)
    rows = read_jsonl(tmp_path / "epoch_0001" / "state" / "updates.jsonl")
    assert len(rows) == 2 and {"value_loss", "entropy", "critic_0/value_loss"} <= rows[0].keys()
    assert (tmp_path / "epoch_0001" / "state" / "engine_critic_0" / "engine.safetensors").is_file()


def test_the_published_arguments() -> None:
    published = {
        "agent_model", "agents", "num_agents", "tokenizer", "reward_func", "reward_processor", "formatters", "args",
        "train_dataset", "eval_dataset", "model_config", "external_transition", "eval_logger", "eval_aggregator",
        "wandb_config", "critic_model", "critics", "metrics_callback",
    }  # fmt: skip
    for trainer, config in ((MAACTrainer, MAACConfig), (IACTrainer, IACConfig)):
        assert trainer.config_class is config
        assert set(inspect.signature(trainer).parameters) >= published


@pytest.mark.parametrize(
    ("kind", "args", "arguments", "message"),
    [
        ("MAAC", {"num_turns": 2}, {"external_transition": 3}, "a int cannot be called"),
        ("MAAC", {}, {"critics": [TINY, TINY]}, "critics must be a list with 1 model"),
        ("IAC", {"use_separate_critic": False}, {"critic_model": TINY}, "contradicts use_separate_critic: false"),
        ("MAAC", {}, {"critic_model": "builtin:huge"}, "critic_model: there is no model"),
        ("IAC", {"critic_devices": ["cpu"] * 3}, {}, "critic_devices names 3 devices for 2 critics"),
        ("MAAC", {"critic_devices": ["cpu"] * 2}, {}, "critic_devices names 2 devices for 1 critics"),
    ],
)
def test_refused_before_any_model_is_loaded(make: Make, monkeypatch, kind, args, arguments, message: str) -> None:
    from comlrl_core.trainers import team_trainer

    monkeypatch.setattr(team_trainer, "load_team", lambda **_: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=message):
        make(args, kind, **arguments)


def test_loaded_agents_without_an_identifier_need_a_critic_source(make: Make) -> None:
    loaded = [load_tiny(seed) for seed in (0, 1)]
    given = {"agents": [model for model, _ in loaded], "tokenizer": [tokenizer for _, tokenizer in loaded]}
    with pytest.raises(ConfigError, match="critic_model is needed"):
        make(**given)
    make({"use_separate_critic": False}, "IAC", **given).train()
    critic, _ = load_tiny(7)
    make(critic_model=critic, **given).train()
