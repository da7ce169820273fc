"""`MADPOIterTrainer`: collect against a comparator, draw from replay, update; again and again."""

from collections.abc import Sequence
from pathlib import Path

from comlrl_core.algorithms.madpo_config import MADPOIterConfig
from comlrl_core.algorithms.preference_learning import learn
from comlrl_core.algorithms.shared import Learned
from comlrl_core.comparators import open_comparator
from comlrl_core.comparators.base import Comparator
from comlrl_core.digests import digest_values
from comlrl_core.engine.processes import by_first
from comlrl_core.preference.files import read_meta
from comlrl_core.preference.iteration import collection_metrics, draw_pairs, write_pairs
from comlrl_core.preference.records import PairRecord
from comlrl_core.store import Store, check_unoccupied, verify_history
from comlrl_core.team.checkpoint import save_team
from comlrl_core.team.team import Team, load_team
from comlrl_core.trainers.base import PreferenceTrainer, frozen
from comlrl_core.trainers.checkpoints import check_checkpointing, find_checkpoint, keep_newest


class MADPOIterTrainer(PreferenceTrainer):
    """Iterative multi-agent DPO.

    Every iteration the team and the comparator answer the training tasks, the reward function decides which joint
    answer of each pair wins, the pairs go to `args.preference_replay_dir`, and the team learns from a draw of them.

    Keyword arguments as published: `agent_model` or `agents`, `num_agents`, `tokenizer`, `reward_func`,
    `reward_processor`, `formatters`, `args` (a `MADPOIterConfig`), `train_dataset`, `eval_dataset`, `model_config`,
    `eval_logger` with `eval_aggregator`. Ours: `metrics_callback(metrics, step)` and `on_long_prompt`.
    """

    config_class = MADPOIterConfig
    args: MADPOIterConfig

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_interval: int = 1,
        checkpoint_total_limit: int | None = None,
    ) -> None:
        """Run the iterations up to `args.num_iterations`.

        Args:
            resume_from_checkpoint: a checkpoint folder, a folder of checkpoints (the newest is taken), or True for
                `checkpoint_dir`. All settings but the number of iterations must be those of the checkpoint.
            checkpoint_dir: where checkpoints go, one per `checkpoint_interval` iterations; a resumed run goes on beside
                its checkpoint unless told otherwise.
            checkpoint_total_limit: keep only that many.
        """
        self.required_tasks()
        check_checkpointing(checkpoint_interval, checkpoint_total_limit)
        checkpoints = Path(checkpoint_dir) if checkpoint_dir is not None else None
        resumed = find_checkpoint(resume_from_checkpoint, checkpoint_dir) if resume_from_checkpoint else None
        if checkpoints is None and resumed is not None:
            checkpoints = resumed.parent
        beside = checkpoints / "replay" if checkpoints else None
        replay = self.folder_or_temporary(self.args.preference_replay_dir or beside, "replay")
        policies = self._policies_folder(checkpoints)
        store = Store(replay, policies or replay, replay)
        if resumed is not None:
            self._resume(resumed, store)
        else:
            by_first(lambda: check_unoccupied(replay))
            if policies is not None:
                save_team(self.team, store.policy(0))
        for iteration in range(self.manifest.iteration + 1, self.args.num_iterations + 1):
            self._iterate(iteration, store, policies is not None, checkpoints, checkpoint_interval)
            if checkpoints is not None:
                keep_newest(checkpoints, checkpoint_total_limit)

    def _iterate(
        self, iteration: int, store: Store, keep_policies: bool, checkpoints: Path | None, interval: int
    ) -> None:
        comparator = self._comparator(iteration, store)
        candidates = self.collect_scored(iteration, comparator)
        version = comparator.version
        comparator.release()
        policy, labeller = self.team.fingerprint(), self.labeller()
        _, entry = by_first(
            lambda: write_pairs(
                store.replay, iteration, candidates, labeller, self.args, policy=policy, comparator=version
            )
        )
        self.report(collection_metrics(read_meta(store.replay, iteration)), self.environment_steps)
        drawn = draw_pairs(store.replay, iteration, self.manifest.eligible(), self.args)
        if self.args.optimizer_state == "reset":
            self.reset_engines()
        learned = self.learn_from(drawn.records, iteration, store)
        self.environment_steps = learned.environment_steps
        self.manifest = self.manifest.next(
            inputs=digest_values(self.identity()), previous="", entry=entry, environment_steps=learned.environment_steps
        )
        if keep_policies:
            save_team(self.team, store.policy(iteration))
        if checkpoints is not None and (iteration % interval == 0 or iteration == self.args.num_iterations):
            folder = checkpoints / f"iteration_{iteration:04d}"
            self.save_checkpoint(folder, learned)

    def learn_from(self, records: Sequence[PairRecord], iteration: int, store: Store) -> Learned:
        """One iteration's update, from the pairs that were drawn."""
        self._updates_per_epoch = -(-len(records) // self.args.pairs_per_update())
        return learn(
            self.team,
            self.engines,
            records,
            self.args,
            iteration=iteration,
            environment_steps=self.environment_steps,
            load_initial=lambda: self.load_past(store.policy(0), self.args.reference_devices),
            on_step=self.on_step,
        )

    def _comparator(self, iteration: int, store: Store) -> Comparator:
        return open_comparator(
            self.args,
            self.team,
            iteration,
            lambda index: self.load_past(store.policy(index), self.args.comparator_devices),
            self._load_models,
        )

    def _load_models(self, sources: Sequence[str]) -> Team:
        team = load_team(
            agents=list(sources),
            formatters=self.formatters,
            model_config=self.model_config,
            seed=self.args.seed,
            devices=self.args.comparator_devices,
            on_long_prompt=self.team.on_long_prompt,
        )
        return frozen(team)

    def _policies_folder(self, checkpoints: Path | None) -> Path | None:
        """Where every iteration's policies go; None where nobody asks for them."""
        needed = self.args.comparator_policy == "history" or self.keeps_initial()
        if self.args.policy_checkpoint_dir is None and not needed:
            return None
        beside = checkpoints / "policies" if checkpoints else None
        return self.folder_or_temporary(self.args.policy_checkpoint_dir or beside, "policies")

    def _resume(self, checkpoint: Path, store: Store) -> None:
        manifest = self.checked_manifest(checkpoint)
        verify_history(store, manifest)
        self.restore(checkpoint, manifest)
