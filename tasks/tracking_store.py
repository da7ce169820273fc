"""The MLflow database of a project: made once, brought up to date, and moved along with its folder."""

import fcntl
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

DATABASE = "mlflow.db"
ARTIFACTS = "artifacts"
_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("model_versions", "source"),
)
"""Every table and column that holds an absolute path below the artifact folder."""


def database_uri(state_root: Path) -> str:
    return f"sqlite:///{Path(state_root).resolve() / DATABASE}"


def ensure_database(state_root: Path) -> None:
    """Create the project's MLflow database, or migrate one of an older MLflow version; several processes may
    call it.

    MLflow itself migrates at first use, in every process at once, which can leave a file that no later start
    repairs. Here one process does it, under a file lock, on a file aside that gets its name when it is
    complete. An older database is copied to `mlflow.db.backup` first. Raises what sqlite or MLflow raise.
    """
    root = Path(state_root).resolve()
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / "mlflow.lock"):
        file = root / DATABASE
        if not file.is_file() or file.stat().st_size == 0:
            aside = root / f"{DATABASE}.{os.getpid()}.tmp"
            _remove(aside)
            _migrate(aside)
            aside.replace(file)
        elif _version(file) != _latest_version():
            shutil.copy2(file, root / f"{DATABASE}.backup")
            _migrate(file)
        _follow_move(file, root / ARTIFACTS)


def _version(file: Path) -> str:
    """Raises `sqlite3.DatabaseError` at once for a file that is no database; MLflow would retry for
    minutes.
    """
    with closing(sqlite3.connect(file, timeout=20.0)) as connection:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(row[0]) if row else ""


def _latest_version() -> str:
    from mlflow.store.db.utils import _get_latest_schema_revision

    return str(_get_latest_schema_revision())


def _migrate(file: Path) -> None:
    from mlflow.store.db.utils import (
        _initialize_tables,
        _is_empty_database,
        _upgrade_db,
        create_sqlalchemy_engine,
    )

    engine = create_sqlalchemy_engine(f"sqlite:///{file}")
    try:
        if _is_empty_database(engine):
            _initialize_tables(engine)
        else:
            _upgrade_db(engine)
    finally:
        engine.dispose()


def _follow_move(file: Path, artifacts: Path) -> None:
    """MLflow stores absolute paths: after the project moved it would read and write in the old place.

    The old place is the folder of the experiments of this project; paths below it get the new one's name.
    """
    with closing(sqlite3.connect(file, timeout=20.0)) as connection:
        rows = connection.execute(
            "SELECT DISTINCT value FROM experiment_tags WHERE key = 'comlrl.artifacts'"
        ).fetchall()
        for (old,) in rows:
            if old == str(artifacts):
                continue
            logger.warning("the project moved: MLflow's artifact paths change from %s to %s", old, artifacts)
            for table, column in _LOCATIONS:
                moved = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                with suppress(sqlite3.OperationalError):  # a column that this MLflow version does not have
                    connection.execute(moved, (str(artifacts), len(old) + 1, len(old), old))
            connection.execute(
                "UPDATE experiment_tags SET value = ? WHERE key = 'comlrl.artifacts' AND value = ?",
                (str(artifacts), old),
            )
        connection.commit()


def _remove(file: Path) -> None:
    for name in (file.name, f"{file.name}-journal", f"{file.name}-wal", f"{file.name}-shm"):
        file.with_name(name).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
