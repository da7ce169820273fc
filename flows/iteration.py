"""One iteration: collect, score, pair, sample, update, or rollout with updates; then publish and evaluate."""

from prefect import flow

from comlrl_core.preference.files import iteration_path, read_iteration
from flows.artifacts import publish_pairs_table
from flows.project import Project
from flows.registry import registered
from tasks.calling import call, orchestrated
from tasks.collect import collect, num_chunks
from tasks.evaluate import evaluate_iteration
from tasks.job import Job
from tasks.pair import pair
from tasks.reward_model import fit
from tasks.rollout import rollout
from tasks.sample import sample
from tasks.score import score
from tasks.steps import clear_before
from tasks.update import publish, update


@flow(name="iteration", flow_run_name="iteration-{iteration:04d}", validate_parameters=False)
def iterate(job: Job, iteration: int) -> dict[str, float]:
    """Run one iteration, publish it and evaluate its policies; steps that an earlier attempt finished are kept.

    Args:
        job: the training job.
        iteration: its number, from 1; the one before must be published.

    Returns:
        The evaluation's metrics.
    """
    with registered(Project.at(job.source_root)):
        return _iterate(job, iteration)


def _iterate(job: Job, iteration: int) -> dict[str, float]:
    clear_before(job, iteration)
    if job.config.learns_from_rewards():
        call(rollout, job, iteration)
    else:
        _learn_from_pairs(job, iteration)
    call(publish, job, iteration)
    metrics: dict[str, float] = call(evaluate_iteration, job, iteration)
    if orchestrated() and not job.config.learns_from_rewards():
        publish_pairs_table(iteration, read_iteration(iteration_path(job.store.replay, iteration)))
    return metrics


def _learn_from_pairs(job: Job, iteration: int) -> None:
    for chunk in range(num_chunks(job)):
        call(collect, job, iteration, chunk)
        call(score, job, iteration, chunk)
    call(pair, job, iteration)
    call(sample, job, iteration)
    if job.config.fits_reward_model():
        call(fit, job, iteration)
    call(update, job, iteration)
