"""MLflow as this project uses it: one parent run per training, one nested run per iteration, never in the
way.

Every method is best effort: a failure is one logged warning, and the training goes on. MLflow is imported at
`open`.
"""

import functools
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from tasks.tracking_store import ARTIFACTS, database_uri, ensure_database

logger = logging.getLogger(__name__)

EXPERIMENT = "comlrl"
MAX_PARAM = 6000  # characters, mlflow.utils.validation.MAX_PARAM_VAL_LENGTH
MAX_TAG = 8000
MAX_DIGEST = 36  # mlflow dataset digests
RUN_KEY = "comlrl.run_key"
_PROCESS = "comlrl.process"
_PARENT = "mlflow.parentRunId"
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")

P = ParamSpec("P")
R = TypeVar("R")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `{"agents.0.model": "...", "seed": "1"}`; lists of plain values stay one JSON
    text.
    """
    flat: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def _best_effort(
    method: "Callable[Concatenate[Tracker, P], R]",
) -> "Callable[Concatenate[Tracker, P], R | None]":
    """Turn any exception into one warning per method and run; without an open run the method does nothing."""

    @functools.wraps(method)
    def guarded(self: "Tracker", /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.run_id is None:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._warn(method.__name__, error)
            return None

    return guarded


class Tracker:
    """One MLflow run. `open` makes or finds the parent; `iteration` gives a Tracker of a nested run.

    `run_id` is None before `open`, and after it if MLflow cannot be used: then every method does nothing.
    """

    def __init__(self, state_root: Path, *, experiment: str = EXPERIMENT, tracking_uri: str | None = None) -> None:
        """`state_root` is the `.comlrl` folder. `tracking_uri` defaults to `MLFLOW_TRACKING_URI`, else its
        database.
        """
        self.state_root = Path(state_root).resolve()
        self.tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or database_uri(self.state_root)
        self.experiment = experiment
        self.run_id: str | None = None
        self._client: Any = None
        self._experiment_id = ""
        self._steps: dict[str, set[int]] = {}
        self._warned: set[str] = set()

    def open(
        self,
        run_key: str,
        name: str,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Start the parent run, or go on with the one that has this `run_key`; its id, or None if MLflow
        fails.

        `params` may be nested. On resume a parameter whose value changed (MLflow keeps the first) becomes the
        tag `changed.<name>`, and runs whose process died are set to KILLED.
        """
        try:
            self._connect()
            self._mark_dead_runs()
            self._find_or_create(run_key, name)
        except Exception as error:
            self.run_id = None
            self._warn("open", error)
            return None
        if tags:
            self.set_tags(tags)
        if params:
            self.log_params(params)
        return self.run_id

    @property
    def place(self) -> str:
        """Where MLflow's pages show the run, below `#/`."""
        return f"experiments/{self._experiment_id}/runs/{self.run_id}"

    @contextmanager
    def iteration(self, n: int) -> "Iterator[Tracker]":
        """A nested run for this attempt at iteration `n`; FINISHED at the end, FAILED or KILLED on an
        exception.
        """
        child = self._child(n) or Tracker(self.state_root, experiment=self.experiment, tracking_uri=self.tracking_uri)
        try:
            yield child
        except BaseException as error:
            child.finish("FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        child.finish("FINISHED")

    @_best_effort
    def log_params(self, params: Mapping[str, Any]) -> None:
        """Parameters, flattened; over-long ones are cut and stand in full in the artifact folder
        `params/`.
        """
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        new, changed = [], {}
        for raw, full in flatten(params).items():
            key, value = _NOT_IN_NAMES.sub("_", raw)[:250], full
            if len(value) > MAX_PARAM:
                value = value[: MAX_PARAM - 1] + "…"
                self._client.log_text(self.run_id, full, f"params/{key.replace('/', '_')}.txt")
            if key not in known:
                new.append(Param(key, value))
            elif known[key] != value:
                changed[f"changed.{key}"] = full
        for first in range(0, len(new), 100):
            self._client.log_batch(self.run_id, params=new[first : first + 100])
        self.set_tags(changed)
        self._client.log_text(self.run_id, json.dumps(params, indent=2, default=str, sort_keys=True), "config.json")

    @_best_effort
    def set_tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        entries = [RunTag(_NOT_IN_NAMES.sub("_", key)[:250], str(value)[:MAX_TAG]) for key, value in tags.items()]
        for first in range(0, len(entries), 100):
            self._client.log_batch(self.run_id, tags=entries[first : first + 100])

    @_best_effort
    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Numbers at a step; a step that the run already has is left out.

        Non-finite values become the tag `nonfinite.<name>`; what is no number is left out.
        """
        self._log_metrics(metrics, step)

    @_best_effort
    def log_dataset(self, name: str, digest: str, source: str, context: str) -> None:
        """A data set as an input of the run; `digest` is DVC's, `context` says what for ("training",
        "replay").
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(name[:500], digest[:MAX_DIGEST], "local", json.dumps({"uri": str(source)}))
        entry = DatasetInput(dataset, tags=[InputTag("mlflow.data.context", context)])
        self._client.log_inputs(self.run_id, [entry])

    @_best_effort
    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file, or what is in a folder, to the run's artifacts (below `folder`)."""
        if Path(path).is_dir():
            self._client.log_artifacts(self.run_id, str(path), folder)
        else:
            self._client.log_artifact(self.run_id, str(path), folder)

    @_best_effort
    def log_policy(
        self,
        folder: Path,
        name: str,
        metrics: Mapping[str, Any],
        step: int,
        *,
        register_as: str | None = None,
        alias: str | None = "challenger",
    ) -> str:
        """A Hugging Face folder as a LoggedModel with its metrics; the model id (`models:/<id>` loads it).

        With `register_as` it also becomes a version of that registered model and gets `alias`. The
        transformers flavor of MLflow is not used: it fails without a network. The same name and step of a run
        are logged once.
        """
        name = re.sub(r"[/:.%\"']", "-", name)
        found = self._client.search_logged_models(
            [self._experiment_id],
            f"name = '{name}' AND tags.`comlrl.step` = '{step}' AND source_run_id = '{self.run_id}'",
        )
        ready = next((model for model in found if str(model.status) == "READY"), None)
        if ready is not None:
            return str(ready.model_id)
        model = self._client.create_logged_model(
            self._experiment_id, name, self.run_id, tags={"comlrl.step": str(step)}, model_type="policy"
        )
        try:
            self._client.log_model_artifacts(model.model_id, str(folder))
        except BaseException:
            self._client.finalize_logged_model(model.model_id, "FAILED")
            raise
        self._client.finalize_logged_model(model.model_id, "READY")
        self._log_metrics({f"{name}/{key}": value for key, value in metrics.items()}, step, model.model_id)
        if register_as:
            self._register(register_as, model.model_id, alias)
        return str(model.model_id)

    @_best_effort
    def finish(self, status: str = "FINISHED") -> None:
        """End the run as FINISHED, FAILED or KILLED; it can be opened again."""
        self._client.set_terminated(self.run_id, status)

    def _connect(self) -> None:
        from mlflow import MlflowClient

        # Its own report of a failing database would stand, with a traceback, beside our one warning.
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        logging.getLogger("alembic").setLevel(logging.ERROR)
        if self.tracking_uri == database_uri(self.state_root):
            ensure_database(self.state_root)
        self._client = MlflowClient(self.tracking_uri, registry_uri=self.tracking_uri)
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                self._experiment_id = self._create_experiment()
            except Exception:
                experiment = self._client.get_experiment_by_name(self.experiment)  # another process was faster
                if experiment is None:
                    raise
        if experiment is not None:
            self._experiment_id = experiment.experiment_id

    def _create_experiment(self) -> str:
        if not self.tracking_uri.startswith("sqlite:"):
            return str(self._client.create_experiment(self.experiment))
        artifacts = str(self.state_root / ARTIFACTS)
        return str(self._client.create_experiment(self.experiment, artifacts, tags={"comlrl.artifacts": artifacts}))

    def _search(self, condition: str) -> list[Any]:
        return list(self._client.search_runs([self._experiment_id], condition, max_results=1000))

    def _mark_dead_runs(self) -> None:
        """A run whose process was killed still says RUNNING."""
        for run in self._search("attributes.status = 'RUNNING'"):
            if _is_dead(run.data.tags.get(_PROCESS)):
                self._client.set_terminated(run.info.run_id, "KILLED")

    def _find_or_create(self, run_key: str, name: str) -> None:
        found = [run for run in self._search(f"tags.`{RUN_KEY}` = '{run_key}'") if _PARENT not in run.data.tags]
        if found:
            run = min(found, key=lambda item: item.info.start_time)
            self._client.set_tag(run.info.run_id, _PROCESS, _process_tag())  # first: a RUNNING run has a living owner
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            tags = {RUN_KEY: run_key, _PROCESS: _process_tag()}
            run = self._client.create_run(self._experiment_id, tags=tags, run_name=name)
        self.run_id = run.info.run_id

    @_best_effort
    def _child(self, n: int) -> "Tracker":
        earlier = self._search(f"tags.`{_PARENT}` = '{self.run_id}' AND tags.`comlrl.iteration` = '{n}'")
        tags = {
            _PARENT: self.run_id,
            _PROCESS: _process_tag(),
            "comlrl.iteration": str(n),
            "comlrl.attempt": str(len(earlier) + 1),
        }
        child = Tracker(self.state_root, experiment=self.experiment, tracking_uri=self.tracking_uri)
        run = self._client.create_run(self._experiment_id, tags=tags, run_name=f"iteration-{n:04d}")
        child._client, child._experiment_id, child.run_id = self._client, self._experiment_id, run.info.run_id
        return child

    def _log_metrics(self, metrics: Mapping[str, Any], step: int, model_id: str | None = None) -> None:
        from mlflow.entities import Metric

        now, batch, bad = int(time.time() * 1000), [], {}
        for raw, number in metrics.items():
            key = _NOT_IN_NAMES.sub("_", raw)[:250]
            with suppress(TypeError, ValueError):
                value = float(number)
                if not math.isfinite(value):
                    bad[f"nonfinite.{key}"] = f"{value} at step {step}"
                elif step not in self._logged_steps(key):
                    batch.append(Metric(key, value, now, step, model_id=model_id))
        for first in range(0, len(batch), 1000):
            self._client.log_batch(self.run_id, metrics=batch[first : first + 1000])
        for metric in batch:
            self._steps[metric.key].add(step)
        if bad:
            self.set_tags(bad)

    def _logged_steps(self, key: str) -> set[int]:
        if key not in self._steps:
            self._steps[key] = {point.step for point in self._client.get_metric_history(self.run_id, key)}
        return self._steps[key]

    def _register(self, name: str, model_id: str, alias: str | None) -> None:
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException):  # it exists
            self._client.create_registered_model(name)
        source = f"models:/{model_id}"
        with self._as_global_uri():
            version = self._client.create_model_version(name, source, self.run_id, model_id=model_id)
        if alias:
            self._client.set_registered_model_alias(name, alias, version.version)

    @contextmanager
    def _as_global_uri(self) -> Iterator[None]:
        """The registry resolves `models:/` addresses with MLflow's global URI, not with its client's."""
        import mlflow

        former = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        mlflow.set_tracking_uri(self.tracking_uri)
        try:
            yield
        finally:
            mlflow.set_tracking_uri(former)  # type: ignore[arg-type]  # None unsets it

    def _warn(self, what: str, error: Exception) -> None:
        if what in self._warned:
            logger.debug("MLflow: %s failed again: %s", what, error)
            return
        self._warned.add(what)
        text = (str(error).strip().splitlines() or [""])[0]
        logger.warning("MLflow tracking: %s failed, the training goes on (%s: %s)", what, type(error).__name__, text)


class NullTracker(Tracker):
    """Tracking switched off: the same methods, and none does anything."""

    def __init__(self) -> None:
        super().__init__(Path(), tracking_uri="off")

    def open(
        self,
        run_key: str,
        name: str,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> str | None:
        return None


def _process_tag() -> str:
    process = psutil.Process()
    return f"{socket.gethostname()} {process.pid} {process.create_time():.2f}"


def _is_dead(tag: str | None) -> bool:
    """True means: the process of this machine that `tag` names has ended. Unknown processes count as
    alive.
    """
    try:
        host, pid, created = (tag or "").rsplit(" ", 2)
        if host != socket.gethostname():
            return False
        return abs(psutil.Process(int(pid)).create_time() - float(created)) > 1.0
    except psutil.NoSuchProcess:
        return True
    except (ValueError, psutil.Error):
        return False
