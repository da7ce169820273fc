"""Publishing an iteration's policies: complete with its manifest, by one rename."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from comlrl_core.engine.processes import by_first, is_first, wait_for_all, world_size
from comlrl_core.engine.weights import gathered
from comlrl_core.store import MANIFEST, Manifest, whole_folder
from comlrl_core.team.checkpoint import save_agents
from comlrl_core.team.team import Team


@contextmanager
def folder_for_all(target: Path) -> Iterator[Path]:
    """`whole_folder`, of which every process gets the path; the first makes it, and puts it in its place at the end."""
    if world_size() == 1 or is_first():
        with whole_folder(target) as staging:
            yield by_first(lambda: staging)
            wait_for_all()
    else:
        yield by_first(lambda: target)
        wait_for_all()


def publish_policy(target: Path, team: Team, manifest: Manifest, beside: Mapping[str, Path] | None = None) -> Manifest:
    """Write the agents' folders and the manifest to `target`; returns the manifest with the fingerprint of the weights.

    Of several processes, all have to call it, and the first writes.

    `beside`: folders (a reward model) that are part of it, by name; those that are not there are left out.
    """

    def publish() -> Manifest:
        with whole_folder(target) as staging:
            save_agents(team, staging)
            for name, folder in (beside or {}).items():
                if folder.is_dir():
                    shutil.copytree(folder, staging / name)
            complete = replace(manifest, policy=team.fingerprint())
            complete.write(staging / MANIFEST)
        return complete

    with gathered(*team.models):
        return by_first(publish)
