"""What an optimizer step is reported as."""

from comlrl_core.algorithms.shared import training_metrics


def test_the_metrics_of_an_update_have_names_to_compare_runs_by() -> None:
    row = {
        "loss": 0.5,
        "grad_norm": None,
        "margin": 1,
        "agent_0/margin": 0.25,
        "environment_steps": 8,
        "pairs": 4,
    }
    assert training_metrics(row) == {
        "train/loss": 0.5,
        "train/pairs": 4.0,
        "preference/margin": 1.0,
        "preference/agent_0/margin": 0.25,
    }


def test_the_metrics_of_a_policy_gradient_step_are_trainings_own() -> None:
    row = {"loss": 0.5, "agent_1/grad_norm": 2.0, "step": 3, "epoch": 0, "environment_steps": 8}
    assert training_metrics(row) == {"train/loss": 0.5, "train/agent_1/grad_norm": 2.0}
