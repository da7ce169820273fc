"""Publishing an iteration's policies: complete with its manifest, by one rename."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from comlrl_core.engine.processes import by_first
from comlrl_core.engine.weights import gathered
from comlrl_core.store import MANIFEST, Manifest, whole_folder
from comlrl_core.team.checkpoint import save_agents
from comlrl_core.team.team import Team


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
