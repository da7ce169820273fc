"""Publishing an iteration's policies: complete with its manifest, by one rename."""

from dataclasses import replace
from pathlib import Path

from comlrl_core.store import MANIFEST, Manifest, whole_folder
from comlrl_core.team.checkpoint import save_team
from comlrl_core.team.team import Team


def publish_policy(target: Path, team: Team, manifest: Manifest) -> Manifest:
    """Write the agents' folders and the manifest to `target`; returns the manifest with the weights' fingerprint."""
    with whole_folder(target) as staging:
        save_team(team, staging)
        complete = replace(manifest, policy=team.fingerprint())
        complete.write(staging / MANIFEST)
    return complete
