"""What both preference trainers share: agents, data, evaluation, saving."""

import json
from pathlib import Path

import datasets
import pytest
import torch

from comlrl_core.errors import ConfigError, DataError
from comlrl_core.team.checkpoint import load_team_folder
from comlrl_core.team.team import load_team

TINY = "builtin:tiny"


@pytest.fixture(params=["list", "Dataset", "IterableDataset", "file"])
def any_dataset(request: pytest.FixtureRequest, tasks, tmp_path: Path):
    """The same rows as each kind of data set."""
    if request.param == "list":
        return tasks
    if request.param == "file":
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in tasks))
        return str(path)
    dataset = datasets.Dataset.from_list(tasks)
    return dataset if request.param == "Dataset" else dataset.to_iterable_dataset()


def test_an_iterable_dataset_has_no_length_and_a_list_is_refused(make_iterative, tasks, any_dataset) -> None:
    """Pitfall 36: all kinds of data sets work, and hold the same tasks."""
    expected = make_iterative(train_dataset=tasks)
    trainer = make_iterative({"num_iterations": 1}, train_dataset=any_dataset)
    assert trainer.train_tasks == expected.train_tasks
    before = trainer.team.fingerprint()
    trainer.train()
    assert trainer.team.fingerprint() != before


def test_training_needs_tasks_and_evaluation_none(make_iterative, make_offline) -> None:
    for make in (make_iterative, make_offline):
        trainer = make(train_dataset=None)
        assert trainer.evaluate() == {}
        with pytest.raises(ConfigError, match="train_dataset is required"):
            trainer.train()


def test_a_device_that_is_not_here_is_refused_before_anything_is_loaded(make_iterative, monkeypatch) -> None:
    from comlrl_core.trainers import team_trainer

    monkeypatch.setattr(team_trainer, "load_team", lambda **_: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"^agent_devices: the device 'cuda:99' is not here"):
        make_iterative({"agent_devices": "cuda:99"})


def test_metrics_have_their_published_names(make_iterative) -> None:
    told: set[str] = set()
    make_iterative(
        {"num_iterations": 1, "logging_steps": 1}, metrics_callback=lambda metrics, step: told.update(metrics)
    ).train()
    assert {"train/loss", "train/grad_norm", "preference/margin", "preference/accuracy"} <= told
    assert not any(name.startswith(("train/epoch", "train/margin")) for name in told)


def test_a_list_of_agents_sets_their_number(make_iterative, tmp_path: Path, absolute_folder: Path) -> None:
    """Heterogeneous agents: two kinds of models and tokenizers, three roles."""

    def three(a, b, c):
        return [len(x) + len(y) - len(z) for x, y, z in zip(a, b, c, strict=True)]

    trainer = make_iterative({"num_iterations": 1}, agents=[TINY, str(absolute_folder), TINY], reward_func=three)
    assert trainer.args.num_agents == trainer.team.num_agents == 3
    assert [type(model).__name__ for model in trainer.team.models] == [
        "Qwen2ForCausalLM",
        "GPT2LMHeadModel",
        "Qwen2ForCausalLM",
    ]
    before = trainer.team.fingerprint()
    trainer.train()
    assert trainer.team.fingerprint() != before
    trainer.save_model(tmp_path / "saved")
    assert load_team_folder(tmp_path / "saved").fingerprint() == trainer.team.fingerprint()


@pytest.fixture
def absolute_folder(tmp_path: Path) -> Path:
    """A GPT-2 of another width, with the built-in tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from comlrl_core.team.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_loaded_models_and_one_agent(make_iterative) -> None:
    loaded = load_team(agent_model=TINY, num_agents=1)
    trainer = make_iterative(
        {"num_iterations": 1},
        agent_model=loaded.models[0],
        tokenizer=loaded.agents[0].tokenizer,
        reward_func=lambda texts: [float(len(text)) for text in texts],
    )
    before = trainer.team.fingerprint()
    trainer.train()
    assert trainer.team.num_agents == 1 and trainer.team.fingerprint() != before


def test_a_shared_model_given_twice_gets_two_optimizers(make_iterative) -> None:
    """Pitfall 19."""
    loaded = load_team(agent_model=TINY, num_agents=1)
    model, tokenizer = loaded.models[0], loaded.agents[0].tokenizer
    trainer = make_iterative({"num_iterations": 1}, agents=[model, model], tokenizer=tokenizer)
    assert trainer.engines[0] is trainer.engines[1]
    trainer.train()
    assert trainer.team.models[0] is trainer.team.models[1]


def test_evaluation_without_a_data_set_is_empty(make_iterative) -> None:
    assert make_iterative().evaluate() == {}


def test_evaluation_measures_held_out_tasks(make_iterative, held_out) -> None:
    trainer = make_iterative(eval_dataset=held_out)
    found = trainer.evaluate()
    assert found["eval/turn_1/tasks"] == 2
    assert found["eval/turn_1/reward_mean"] == found["eval/turn_1/expected_return"]
    assert 0.0 < found["eval/turn_1/reward_mean"] < 1.0
    assert trainer.evaluate() == found
    assert trainer.evaluate(1)["eval/turn_1/tasks"] == 1
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match="num_eval_samples"):
            trainer.evaluate(wrong)


def test_eval_batch_size_changes_no_number(make_iterative, held_out) -> None:
    one, both = (make_iterative({"eval_batch_size": size}, eval_dataset=held_out).evaluate() for size in (1, 2))
    assert one == both


def test_own_metrics_come_from_logger_and_aggregator(make_iterative, held_out) -> None:
    seen = {}

    def logger(agent_completions_turns, batch_items, prompts):
        seen.update(turns=agent_completions_turns, items=batch_items, prompts=prompts)
        return [{"longest": max(len(a), len(b))} for (a,), (b,) in zip(*agent_completions_turns, strict=True)]

    def aggregator(metrics, num_turns):
        seen["num_turns"] = num_turns
        return {"turn_1/longest": max(one["longest"] for one in metrics)}

    found = make_iterative(eval_dataset=held_out, eval_logger=logger, eval_aggregator=aggregator).evaluate()
    texts = [turns[0] for agent in seen["turns"] for turns in agent]
    assert found["eval/turn_1/longest"] == max(map(len, texts))
    assert len(seen["turns"]) == 2 and all(len(agent) == 2 for agent in seen["turns"])  # agents, items
    assert [item["prompt"] for item in seen["items"]] == [row["prompt"] for row in held_out]
    assert seen["prompts"] == [row["prompt"] + "\n" for row in held_out] and seen["num_turns"] == 1


def test_a_formatter_that_reads_an_absent_field_fails_before_training(make_iterative) -> None:
    with pytest.raises(DataError, match="absent"):
        make_iterative(formatters="{absent}")


def test_saved_models_go_into_a_new_trainer(make_iterative, tmp_path: Path) -> None:
    trainer = make_iterative()
    trainer.save_model(tmp_path / "saved")
    again = make_iterative(agents=[str(tmp_path / "saved" / f"agent_{i}") for i in range(2)])
    assert again.team.fingerprint() == trainer.team.fingerprint()


def test_the_seed_decides_the_initial_team(make_iterative) -> None:
    assert make_iterative().team.fingerprint() == make_iterative().team.fingerprint()
    assert make_iterative({"seed": 1}).team.fingerprint() != make_iterative().team.fingerprint()


def test_the_users_settings_stay_as_they_are(make_iterative, settings) -> None:
    from comlrl_core.trainers.preference import MADPOIterConfig, MADPOIterTrainer

    args = MADPOIterConfig(**settings())
    before = args.model_copy(deep=True)
    MADPOIterTrainer(
        agents=[TINY] * 3, reward_func=lambda a, b, c: [0.0] * len(a), args=args, train_dataset=[{"prompt": "x"}]
    )
    assert args == before and args.model_fields_set == before.model_fields_set


def test_a_fall_of_the_reward_is_said_once(make_iterative, caplog: pytest.LogCaptureFixture) -> None:
    """From 0.9 +- 0.03 the line of an evaluation +- 0.04 is at 0.8; what stays below it is not said again."""
    trainer = make_iterative()
    reported = []
    trainer.metrics_callback = lambda metrics, step: reported.append(step)
    for step, reward in enumerate((0.4, 0.9, 0.81, 0.5, 0.3, 0.85, 0.6)):
        error = 0.03 if reward == 0.9 else 0.04
        trainer.report({"eval/turn_1/expected_return": reward, "eval/turn_1/reward_se": error}, step)
    assert reported == list(range(7))
    said = [record.getMessage() for record in caplog.records if "reward fell" in record.getMessage()]
    assert [text.split(":")[0] for text in said] == ["environment step 3", "environment step 6"]
    assert "to 0.500 from 0.900 (environment step 1)" in said[0]
