"""`MADPOTrainer`: one collection of the team's own candidates, then passes over its pairs."""

from pathlib import Path

from comlrl_core.algorithms.madpo import Metrics
from comlrl_core.algorithms.madpo_config import MADPOConfig
from comlrl_core.algorithms.preference_learning import Learned, learn
from comlrl_core.digests import digest_values
from comlrl_core.engine.processes import by_first
from comlrl_core.preference.files import read_iteration, read_meta
from comlrl_core.preference.iteration import collection_metrics, write_pairs
from comlrl_core.preference.records import PairRecord
from comlrl_core.store import Store, check_unoccupied, verify_history
from comlrl_core.team.checkpoint import save_team
from comlrl_core.trainers.base import PreferenceTrainer
from comlrl_core.trainers.checkpoints import check_checkpointing, find_checkpoint, keep_newest

COLLECTION = 1  # offline runs collect once


class MADPOTrainer(PreferenceTrainer):
    """Offline multi-agent DPO: pairs of the team's own answers, made once, learned from `args.num_train_epochs` times.

    Keyword arguments as for `MADPOIterTrainer`, with a `MADPOConfig` as `args`.
    """

    config_class = MADPOConfig

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_interval: int = 1,
        checkpoint_total_limit: int | None = None,
    ) -> None:
        """Collect, pair and learn; checkpoints are made after every `checkpoint_interval` epochs.

        Args:
            resume_from_checkpoint: a checkpoint folder, a folder of checkpoints (the newest is taken), or True for
                `checkpoint_dir`. The number of epochs may be larger than before; all else must be the same.
            checkpoint_dir: where the pairs (`replay/`) and the checkpoints go; a resumed run goes on beside its
                checkpoint unless told otherwise.
            checkpoint_total_limit: keep only that many.
        """
        self.required_tasks()
        check_checkpointing(checkpoint_interval, checkpoint_total_limit)
        checkpoints = Path(checkpoint_dir) if checkpoint_dir is not None else None
        start_epoch = 0
        if resume_from_checkpoint:
            checkpoint = find_checkpoint(resume_from_checkpoint, checkpoint_dir)
            manifest = self.checked_manifest(checkpoint)
            store = _store(checkpoint.parent)
            verify_history(store, manifest)
            self.restore(checkpoint, manifest)
            start_epoch = self.epochs_done(checkpoint)
            checkpoints = checkpoints or checkpoint.parent
        else:
            store = _store(self.folder_or_temporary(checkpoints, "replay"))
            by_first(lambda: check_unoccupied(store.replay))
            if self.keeps_initial():
                save_team(self.team, store.policy(0))
            self._collect(store)
        self._learn(store, start_epoch, checkpoints, checkpoint_interval, checkpoint_total_limit)

    def keeps_initial(self) -> bool:
        return self.args.reference != "none"

    def epochs_done(self, checkpoint: Path) -> int:
        """Passes that were made up to the checkpoint that was just restored."""
        per_epoch = self.manifest.history[-1].num_pairs * self.args.environment_steps_per_pair
        return self.environment_steps // max(1, per_epoch)

    def _collect(self, store: Store) -> None:
        candidates = self.collect_scored(COLLECTION, None)
        policy, labeller = self.team.fingerprint(), self.labeller()
        _, entry = by_first(
            lambda: write_pairs(
                store.replay, COLLECTION, candidates, labeller, self.args, policy=policy, comparator=None
            )
        )
        self.manifest = self.manifest.next(
            inputs=digest_values(self.identity()), previous="", entry=entry, environment_steps=0
        )
        self.report(collection_metrics(read_meta(store.replay, COLLECTION)), 0)

    def _learn(
        self, store: Store, start_epoch: int, checkpoints: Path | None, interval: int, limit: int | None
    ) -> None:
        records: list[PairRecord] = read_iteration(store.replay / f"iteration_{COLLECTION:04d}.json")
        self._updates_per_epoch = -(-len(records) // self.args.pairs_per_update())
        seen: list[Metrics] = []

        def on_step(metrics: Metrics, environment_steps: int) -> None:
            self.on_step(metrics, environment_steps)
            seen.append(metrics)
            epoch = metrics["epoch"] + 1
            done = metrics["step"] + 1 == epoch * self._updates_per_epoch
            last = epoch == self.args.num_train_epochs
            if done and checkpoints is not None and (epoch % interval == 0 or last):
                folder = checkpoints / f"epoch_{epoch:04d}"
                learned = Learned(seen, environment_steps)
                self.save_checkpoint(folder, learned)
                keep_newest(checkpoints, limit)

        learn(
            self.team,
            self.engines,
            records,
            self.args,
            iteration=COLLECTION,
            environment_steps=0,
            load_initial=lambda: self.load_past(store.policy(0), self.args.reference_devices),
            on_step=on_step,
            start_epoch=start_epoch,
        )


def _store(root: Path) -> Store:
    return Store(root / "replay", root / "policies", root / "state")
