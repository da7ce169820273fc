"""One iteration: collect, score, pair, sample, update, publish, evaluate."""

from prefect import flow

from comlrl_core.preference.files import iteration_path, read_iteration
from flows.artifacts import publish_pairs_table
from tasks.calling import call, orchestrated
from tasks.collect import collect, num_chunks
from tasks.evaluate import evaluate_iteration
from tasks.job import Job
from tasks.pair import pair
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
    clear_before(job, iteration)
    for chunk in range(num_chunks(job)):
        call(collect, job, iteration, chunk)
        call(score, job, iteration, chunk)
    call(pair, job, iteration)
    call(sample, job, iteration)
    call(update, job, iteration)
    call(publish, job, iteration)
    metrics: dict[str, float] = call(evaluate_iteration, job, iteration)
    if orchestrated():
        publish_pairs_table(iteration, read_iteration(iteration_path(job.store.replay, iteration)))
    return metrics
