import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from comlrl_core.algorithms.preference_learning import UPDATES
from comlrl_core.config.run import RunConfig
from comlrl_core.files import write_json, write_jsonl
from comlrl_core.preference.files import meta_path, write_iteration
from comlrl_core.preference.records import PairRecord
from tasks.evaluate import write_curve
from tasks.job import Job
from tasks.pruned import keep_small_files
from tasks.report import picture_paths, report, report_path, sample_pairs
from tasks.report_drawing import LIGHT
from tasks.report_page import visible
from tasks.report_pictures import CHARTS, interval
from tasks.reward_model import METRICS
from tasks.timing import timed

MakeJob = Callable[..., Job]
HOSTILE = "<script>alert(1)</script>\x00 \u202e ]]> {{ 7 * 7 }} &amp; \"'"
SHOWN = len(CHARTS) - 6  # a page leaves out what only reward models, references, critics and rollouts have
VOID = {"meta", "link", "br", "img", "input", "hr"}


def pair_record(text: str = "yes", winner: str | None = "current") -> PairRecord:
    return PairRecord(
        prompts=(f"[1] say {text}", f"[2] say {text}"),
        winner_completions=(text, text + " indeed"),
        loser_completions=("no", ""),
        winner_reward=0.75,
        loser_reward=0.25,
        candidate_reward_mean=0.5,
        task_id="task-1",
        winner_source=winner,
        winner_finished=(True, False),
        loser_finished=(True, True),
    )


def distribution(middle: float) -> dict[str, float]:
    return {
        "count": 4, "mean": middle, "std": 0.1, "min": 0.0, "first_quartile": middle - 0.1, "median": middle,
        "third_quartile": middle + 0.1, "max": 1.0,
    }  # fmt: skip


def evaluation_row(iteration: int, reward: float) -> dict[str, Any]:
    row: dict[str, Any] = {"iteration": iteration, "eval/reward_mean": reward, "eval/reward_se": 0.01}
    for agent in (1, 2):
        row |= {f"eval/agent_{agent}/tokens": 8.0 - agent, f"eval/agent_{agent}/finished": 0.5 / agent}
    if iteration:
        row |= {"eval/comparator/reward_mean": reward - 0.1, "eval/comparator/reward_se": 0.02}
        for name in ("initial", "previous", "comparator"):
            rates = {"": 0.8, "_low": 0.6, "_high": 0.9}
            row |= {f"eval/win_rate_{name}{end}": value for end, value in rates.items()}
    return row


def update_row(iteration: int, step: int) -> dict[str, Any]:
    return {
        "loss": 1.0 / (step + iteration), "accuracy": 0.5, "margin": -1.0, "winner_logps": -40.0, "loser_logps": -41.0,
        "skipped": 0, "environment_steps": 8 * iteration + 2 * step, "iteration": iteration,
    }  # fmt: skip


def finish(job: Job, records: list[PairRecord] | None = None, evaluated: bool = True) -> None:
    """Leave the files of a finished run in the job's folder, as far as a report reads them."""
    iterations = range(1, job.config.num_iterations + 1)
    records = [pair_record(winner="comparator"), pair_record("of course")] if records is None else records
    counts = {
        "tasks": 3, "tasks_without_pairs": 1, "candidates": 24, "dropped": 1, "unmatched": 1, "pairs_possible": 11,
        "duplicates": 1, "ties": 2, "near_ties": 3, "not_selected": 5 - len(records), "pairs": len(records),
    }  # fmt: skip
    for iteration in iterations:
        rewards = {"current": distribution(0.4 + 0.05 * iteration), "comparator": distribution(0.4)}
        write_iteration(job.store.replay, iteration, records, {"counts": counts, "rewards": rewards})
        job.store.training_state(iteration).mkdir(parents=True)
        updates = [update_row(iteration, step) for step in range(4)] if records else []
        write_jsonl(job.store.training_state(iteration) / UPDATES, updates)
        for stage in ("collect", "score", "update"):
            with timed(job, stage, iteration):
                pass
    curve = [evaluation_row(i, 0.4 + 0.1 * i) for i in range(job.config.num_iterations + 1)] if evaluated else []
    write_curve(job.plots / "evaluation.csv", curve)


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, and the text outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def page_of(job: Job) -> Page:
    assert report.fn(job) == report_path(job)
    return read_page(job)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished run of two iterations with its report, for tests that only read."""
    root = tmp_path_factory.mktemp("reported")
    settings = {"num_iterations": 2, "training": {"dpo_beta": 0.3, "num_agents": 2}}
    job = Job(source_root=root, work_root=root, config=RunConfig.model_validate(settings), code="code")
    finish(job)
    report.fn(job)
    return job


def read_page(job: Job) -> Page:
    page = Page(report_path(job).read_text(encoding="utf-8"))
    assert not page.open
    return page


def test_a_whole_run(reported: Job) -> None:
    page = read_page(reported)
    assert page.count("svg") == SHOWN
    assert "After 2 iterations the team earns 0.600 on held-out tasks; it began at 0.400." in page.text
    assert "better than the initial team, beyond what chance explains" in page.text
    assert "0.580 to 0.620, iteration 2" in page.text  # 0.6 -+ 1.96 x 0.01
    assert "80%" in page.text and "60% to 90%" in page.text
    assert page.count("article") == 4  # two pairs of the first iteration and two of the last
    assert "Winner: reward 0.750" in page.text and "cut off at the longest length" in page.text
    assert "training.dpo_beta" in page.text and "torch" in page.text
    assert "Nothing to show" not in page.text


def test_it_is_one_file_without_scripts_and_without_addresses(reported: Job) -> None:
    page = read_page(reported)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "xlink:href", "src"):
            assert (attributes.get(name) or "#").startswith("#")
    text = report_path(reported).read_text(encoding="utf-8")
    assert "@import" not in text and "http://" not in text and "https://" not in text
    assert str(reported.work_root) not in text
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert set(re.findall(r"url\(#([\w-]+)\)", text)) <= set(ids)


def test_untrusted_text_stays_text(make_job: MakeJob) -> None:
    job = make_job(team={"templates": ["<script>{prompt}", "</style><script>{prompt}"]})
    finish(job, [pair_record(HOSTILE)])
    page = page_of(job)
    assert page.count("script") == 0 and page.count("style") == 1
    assert "say <script>alert(1)</script>" in page.text
    assert "{{ 7 * 7 }} &amp; \"'" in page.text
    assert "\\x00" in page.text and "\\u202e" in page.text
    text = report_path(job).read_text(encoding="utf-8")
    assert "\x00" not in text and "\u202e" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <b>\n\tc", "a &lt;b&gt;\n\tc"),
        ("\x1b", '<i class="code">\\x1b</i>'),
        ("\u2066x\ud800", '<i class="code">\\u2066</i>x<i class="code">\\ud800</i>'),
        ("Grüße, 日本語 🙂", "Grüße, 日本語 🙂"),
        (7, "7"),
    ],
)
def test_every_character_can_be_seen(text: Any, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode()


def test_long_texts_are_cut(make_job: MakeJob) -> None:
    job = make_job()
    finish(job, [pair_record("word " * 1000)])
    assert "more characters" in page_of(job).text
    assert report_path(job).stat().st_size < 400_000


def test_without_held_out_tasks(make_job: MakeJob) -> None:
    job = make_job(tasks={"eval": None})
    finish(job, evaluated=False)
    page = page_of(job)
    assert "There are no held-out tasks, so this page shows how training went" in page.text
    assert page.count("svg") == SHOWN - 4
    assert all(path.is_file() for path in picture_paths(job)) and len(picture_paths(job)) == len(CHARTS)


def test_without_any_pair(make_job: MakeJob) -> None:
    job = make_job()
    finish(job, [])
    page = page_of(job)
    assert "There are no pairs yet." in page.text and page.count("article") == 0
    assert page.count("svg") == SHOWN - 4  # loss, accuracy, margin, log_probs


def test_critics_have_pictures_of_their_own(make_job: MakeJob) -> None:
    rows = [{"iteration": float(i), "critic_explained_variance": 0.2 * i, "environment_steps": 8.0 * i} for i in (1, 2)]
    updates = [{**row, "step": row["iteration"], "loss": 1.0, "value_loss": 0.5, "entropy": 2.0} for row in rows]
    config = RunConfig(algorithm="maac", num_iterations=2, training={"num_turns": 1})
    job = make_job().model_copy(update={"config": config})
    write_curve(job.plots / "collection.csv", rows)
    write_curve(job.plots / "training.csv", updates)
    page = page_of(job)
    assert "Sample pairs" not in page.text and "Preference pairs" not in page.text
    assert "The critics" in page.text and "How undecided the agents are" in page.text
    drawn = {path.stem: path.read_text() for path in picture_paths(job)}
    assert ">explained variance<" in drawn["explained_variance"]
    assert ">squared error<" in drawn["value_loss"] and ">nats per token<" in drawn["entropy"]


def test_a_reward_model_and_a_reference_have_pictures_of_their_own(make_job: MakeJob) -> None:
    """Held-out accuracy, rank correlation and KL per agent; also of an iteration whose files are gone."""
    job = make_job(algorithm="marlhf_iter", training={"num_agents": 2}, num_iterations=3)
    finish(job)
    for iteration in (1, 2, 3):
        measures = {
            "reward_model/heldout_accuracy": 0.6 + 0.1 * iteration, "reward_model/heldout_pairs": 12.0,
            "reward_model/rank_correlation": 0.2 * iteration, "reward_model/after/rank_correlation": 0.1 * iteration,
            "kl/agent_1": 0.5 * iteration, "kl/agent_2": 0.25,
        }  # fmt: skip
        write_json(job.store.training_state(iteration) / METRICS, measures)
    page = page_of(job)
    assert page.count("svg") == SHOWN  # three more, without the three of MADPO
    assert "The reward model" in page.text and "Distance from the reference" in page.text
    drawn = {path.stem: path.read_text() for path in picture_paths(job)}
    assert "held-out pairs in the right order" in drawn["reward_accuracy"]
    assert ">before the update<" in drawn["rank_correlation"] and ">after it<" in drawn["rank_correlation"]
    assert ">agent 1<" in drawn["divergence"] and ">agent 2<" in drawn["divergence"]

    keep_small_files(job.work_root, 1)
    shutil.rmtree(job.store.training_state(1))
    page_of(job)
    assert {path.stem: path.read_text() for path in picture_paths(job)} == drawn
    write_json(job.store.training_state(2) / METRICS, {"reward_model/train_pairs": 0.0})  # nothing could be fitted
    assert page_of(job).count("svg") == SHOWN


def test_one_iteration_of_the_offline_algorithm(make_job: MakeJob) -> None:
    job = make_job(algorithm="madpo", num_iterations=1)
    finish(job, [pair_record(winner=None)])
    page = page_of(job)
    assert "After 1 iteration the team" in page.text
    assert "This run has none: the team's own answers are compared with each other." in page.text


def test_nothing_is_there(make_job: MakeJob) -> None:
    page = page_of(make_job())
    assert "The team has not been measured on held-out tasks yet." in page.text
    assert page.count("svg") == 0


def test_what_was_pruned_is_read_from_the_plots(make_job: MakeJob) -> None:
    """Policies and training states are gone, and so are the iteration files; the rows in `plots/` remain."""
    job = make_job()
    finish(job)
    write_curve(job.plots / "training.csv", [update_row(i, step) for i in (1, 2) for step in range(4)])
    page_of(job)
    pictures = {path.name: path.read_bytes() for path in picture_paths(job)}
    shutil.rmtree(job.store.state)
    assert page_of(job).count("svg") == SHOWN
    assert pictures == {path.name: path.read_bytes() for path in picture_paths(job)}
    shutil.rmtree(job.store.replay)
    page = page_of(job)
    assert page.count("svg") == SHOWN - 2  # distributions and pairs
    assert "There are no pairs yet." in page.text


def test_damaged_files_are_left_out_with_a_warning(make_job: MakeJob, caplog: pytest.LogCaptureFixture) -> None:
    job = make_job()
    finish(job)
    meta_path(job.store.replay, 1).write_text('{"iteration": 1')
    (job.store.replay / "iteration_0002.json").write_text('{"iteration": 2')
    page_of(job)
    assert "the report leaves out a collection" in caplog.text


def test_rows_of_a_longer_run_are_left_out(make_job: MakeJob) -> None:
    finish(make_job(num_iterations=3))
    assert "After 2 iterations" in page_of(make_job(num_iterations=2)).text


def test_files_of_before_the_comparator_was_measured(make_job: MakeJob) -> None:
    job = make_job()
    finish(job)
    rows = [evaluation_row(i, 0.5) for i in range(3)]
    rows = [{name: value for name, value in row.items() if "comparator/" not in name} for row in rows]
    write_curve(job.plots / "evaluation.csv", rows)
    assert page_of(job).count("svg") == SHOWN


def test_many_iterations_and_many_agents(make_job: MakeJob) -> None:
    job = make_job(num_iterations=42)
    finish(job)
    rows = [evaluation_row(i, 0.5) | {f"eval/agent_{agent}/tokens": 5.0 for agent in range(1, 15)} for i in range(43)]
    write_curve(job.plots / "evaluation.csv", rows)
    write_jsonl(job.store.training_state(42) / UPDATES, [update_row(42, step) for step in range(2000)])
    page = page_of(job)
    assert page.count("svg") == SHOWN
    assert "band: the middle half" in page.text
    assert report_path(job).stat().st_size < 1_000_000


def test_a_skipped_update_has_no_loss(make_job: MakeJob) -> None:
    job = make_job(num_iterations=1)
    finish(job)
    rows = [update_row(1, 0), {**update_row(1, 1), "loss": None, "margin": None, "skipped": 1}, update_row(1, 2)]
    write_jsonl(job.store.training_state(1) / UPDATES, rows)
    assert "in 3 updates, 1 of them skipped" in page_of(job).text


def test_a_team_that_fell(make_job: MakeJob) -> None:
    job = make_job()
    finish(job)
    lost = {"eval/win_rate_initial": 0.2, "eval/win_rate_initial_low": 0.1, "eval/win_rate_initial_high": 0.4}
    rows = [evaluation_row(0, 0.7), evaluation_row(1, 0.8), evaluation_row(2, 0.3) | lost]
    write_curve(job.plots / "evaluation.csv", rows)
    text = page_of(job).text
    assert "worse than the initial team" in text and "the evaluation reward fell to 0.300 from 0.800" in text


def test_the_same_run_gives_the_same_bytes(make_job: MakeJob) -> None:
    """What noting the report's own seconds changes must not change the page: DVC would call it modified."""
    job = make_job()
    finish(job)
    files = [report.fn(job), *picture_paths(job)]
    before = {path: path.read_bytes() for path in files}
    with timed(job, "report", None):
        report.fn(job)
    report.fn(job)
    assert before == {path: path.read_bytes() for path in files}


def test_the_pictures_are_files_and_seconds_are_no_output_of_the_pipeline(reported: Job) -> None:
    paths = {path.relative_to(reported.work_root).as_posix() for path in picture_paths(reported)}
    assert paths == {f"plots/{name}.svg" for name in CHARTS if name != "seconds"} | {".comlrl/seconds.svg"}
    for path in picture_paths(reported):
        root = ElementTree.fromstring(path.read_bytes())
        assert root.tag.endswith("svg")
        assert not re.search(r"date|var\(--", path.read_text().lower())


def test_the_pipeline_names_the_files_that_a_report_writes() -> None:
    from ruamel.yaml import YAML

    root = Path(__file__).parents[2]
    text = (root / "dvc.yaml").read_text()
    assert text == (root / "flows/templates/pipeline.yaml").read_text()
    stage = YAML(typ="safe").load(text)["stages"]["report"]
    expected = {"report.html"} | {f"plots/{name}.svg" for name in CHARTS if name != "seconds"}
    assert {name for out in stage["outs"] for name in out} == expected
    assert all(out == {name: {"cache": False}} for out in stage["outs"] for name in out)


def test_colours_are_roles_in_the_page(reported: Job) -> None:
    head, _, body = report_path(reported).read_text(encoding="utf-8").partition("<body>")
    assert not set(re.findall(r"#[0-9a-f]{6}\b", body)) & set(LIGHT.values())
    assert "var(--blue)" in body and "prefers-color-scheme: dark" in head


def test_samples_are_taken_evenly_from_the_first_and_last_iteration_with_pairs(make_job: MakeJob) -> None:
    job = make_job(num_iterations=4)
    meta: dict[str, Any] = {"counts": {}, "rewards": {}}
    for iteration, count in ((1, 0), (2, 10), (3, 3), (4, 0)):
        write_iteration(job.store.replay, iteration, [pair_record(str(n)) for n in range(count)], meta)
    found = [(iteration, record.winner_completions[0]) for iteration, record in sample_pairs(job, [1, 2, 3, 4])]
    assert found == [(2, "0"), (2, "5"), (3, "0"), (3, "1"), (3, "2")]
    assert [iteration for iteration, _ in sample_pairs(job, [2])] == [2] * 6
    assert sample_pairs(job, []) == []


def test_intervals() -> None:
    """The 95 % point of the normal distribution is 1.96."""
    assert interval(0.5, 0.1, 0.95) == pytest.approx((0.304, 0.696), abs=1e-4)
