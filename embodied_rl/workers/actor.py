"""ActorWorker: learns from trajectories by PPO or GRPO, and owns parameters, optimiser and checkpoints.

Several ranks share the work by data parallelism: gradients are summed, every mean is taken over global counts.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embodied_rl import algorithms as rl
from embodied_rl.build import build_policy
from embodied_rl.checkpoint import load_checkpoint, save_checkpoint
from embodied_rl.config import Config
from embodied_rl.data import Trajectories
from embodied_rl.sums import Sums
from embodied_rl.workers.batch import Batch, Gathered, decisions
from embodied_rl.workers.parity import Gap, Limit, disagreement
from envs.base import EnvSpec
from envs.wire import plain_spec
from policies import Policy
from scheduler.stage import Output
from scheduler.worker import Worker

CRITIC = "critic"  # what names of its parameters begin with
PARITY_BATCH = 64  # decisions whose log-probabilities are compared before the first update
COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # by the actors' device; counts and metrics are on the host


def _free_cache() -> None:
    """Give memory that torch keeps for later back to the device, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class ActorWorker(Worker):
    """Holds the policy that learns."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    warms_up = False  # the critic alone learns
    gap: Gap | None = None  # measured in the first optimiser step of an iteration

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.device = torch.device("cuda" if self.context.device_kind == "gpu" else "cpu")
        self.generator = torch.Generator().manual_seed(config.seed * 1009 + self.rank)
        self.has_learned = False
        self.gathered = Gathered()

    def build(self, spec: EnvSpec) -> None:
        """Build the policy for the envs and its optimiser, and meet the other ranks."""
        self.spec = spec
        self.policy = build_policy(self.config, spec).to(self.device)
        self.optimizer = torch.optim.Adam(self._parameter_groups(), eps=1e-5)
        if self.config.algorithm.kl_coef:
            self.beginning = {name: tensor.cpu().clone() for name, tensor in self.policy.learned_state().items()}
        if self.world_size > 1:
            self._join_peers()

    def _parameter_groups(self) -> list[dict[str, Any]]:
        rates = {
            False: self.config.algorithm.lr,
            True: self.config.algorithm.value_lr or self.config.algorithm.lr,
        }
        named = [(name, p) for name, p in self.policy.named_parameters() if p.requires_grad]
        return [
            {
                "params": [p for name, p in named if name.startswith(CRITIC) is critic],
                "lr": rate,
                "base_lr": rate,
                "is_critic": critic,
            }
            for critic, rate in rates.items()
        ]

    def _join_peers(self) -> None:
        """Form the process group; rank 0 picks the address and sends it round."""
        if self.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                address = f"tcp://{socket.gethostbyname(socket.gethostname())}:{probe.getsockname()[1]}"
            for peer in range(1, self.world_size):
                self.send(address, f"{self.context.group}[{peer}]")
        else:
            address = self.recv(f"{self.context.group}[0]")
        backend = COLLECTIVES[self.device.type]
        dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=self.world_size)

    # ------------------------------------------------------------------------------------------ device memory

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        self.policy.to(device)
        for state in self.optimizer.state.values():
            state |= {key: value.to(device) for key, value in state.items() if isinstance(value, Tensor) and value.ndim}
        _free_cache()

    # ------------------------------------------------------------------------------------------ weights

    def weights(self, _: list[Any]) -> list[dict[str, Tensor]]:
        """The parameters that learning changes, for the rollout workers."""
        return [{name: tensor.cpu() for name, tensor in self.policy.learned_state().items()}]

    # ------------------------------------------------------------------------------------------ learning

    def update(self, trajectories: list[Trajectories]) -> Output:
        """Learn from this rank's share of an iteration's streams, once enough rollouts have been gathered.

        Gives the new parameters (rank 0 does); reports the metrics, the same on every rank. Gives and reports nothing
        while more rollouts are needed: see `rollout.epochs` and `algorithm.filter_rollouts`.
        """
        rollout = Trajectories.concatenate(trajectories)
        if not self.has_learned and not self.gathered.batches:
            self._require_equal_policies(rollout)
        self._gather(rollout)
        if not self._has_enough():
            return Output([], {})
        metrics = self._learn(self.iteration)
        self.has_learned = True
        return Output(self.weights([]) if self.rank == 0 else [], metrics)

    def _gather(self, rollout: Trajectories) -> None:
        decisions(rollout, self.config.algorithm, self.gathered)
        seen = {key: rollout.observation[key] for key in self.policy.statistics_of}
        self.gathered.seen.append({**seen, "valid": rollout.valid.any(-1)})

    def _has_enough(self) -> bool:
        """Whether the rollouts so far make a batch: their number, or that of the groups which filtering left."""
        algorithm, epochs = self.config.algorithm, self.config.rollout.epochs
        if not algorithm.filters_groups:
            return len(self.gathered.batches) >= epochs
        wanted = epochs * self.config.env.num_envs // algorithm.group_size
        groups = int(self._total(torch.tensor(self.gathered.groups)))
        return groups >= wanted or len(self.gathered.batches) >= epochs * algorithm.filter_rollouts

    def _learn(self, iteration: int) -> dict[str, float]:
        """Update from what was gathered."""
        algorithm, gathered, self.gathered = self.config.algorithm, self.gathered, Gathered()
        batch, sums = Batch.concatenate(gathered.batches), Sums()
        for name, counts in gathered.counts.items():
            part, whole = self._total(counts).tolist()
            sums.add(name, part / max(whole, 1.0))
        if algorithm.name == "grpo" and algorithm.group_advantage == "reinforce_baseline":
            mean, std = rl.mean_and_std(*(self._total(moment) for moment in gathered.moments))
            batch.advantage = rl.normalise(batch.advantage, batch.counts, mean, std)
        if algorithm.normalise_advantage == "batch":
            batch.advantage = self._normalise(batch.advantage, batch.counts)
        if algorithm.name == "ppo":
            variance = self._explained_variance(batch.value, batch.returns, batch.counts)
            sums.add("losses/explained_variance", variance)
        self._set_learning_rate(iteration, self._risen(iteration))
        count = int(self._total(torch.tensor(len(batch))))
        sums.add("losses/samples", count)
        sums.add("losses/learning_rate", self.optimizer.param_groups[0]["lr"])
        if algorithm.name == "grpo":  # an iteration whose groups were all filtered out says so
            sums.add("grpo/empty_iteration", float(count == 0))
        if count:
            self.warms_up = iteration < algorithm.critic_warmup
            if algorithm.kl_coef and not self.warms_up:
                batch.reference = self._reference_logprob(batch)
            self.gap = Gap()
            self._optimise(batch, sums)
        for seen in gathered.seen:
            self._observe(seen)
        return sums.means(self._total)

    @torch.no_grad()
    def _reference_logprob(self, batch: Batch) -> Tensor:
        """Log-probs [B, C, A] under the policy that the run began with."""
        current = {name: tensor.clone() for name, tensor in self.policy.learned_state().items()}
        self.policy.load_learned_state(self.beginning)
        found = [torch.empty(0, *batch.logprob.shape[1:])]
        for index in torch.arange(len(batch)).split(self.config.algorithm.micro_batch or PARITY_BATCH):
            some = batch.rows(index, self.device)
            found.append(self.policy.evaluate(some.observation, some.token)[0].float().cpu())
        self.policy.load_learned_state(current)
        return torch.cat(found)

    def _observe(self, own: dict[str, Tensor]) -> None:
        """Let the policy take in a rollout's observations, those of all ranks in the order of ranks."""
        shares = [own]
        if self.world_size > 1:  # their shares need not be equal
            shares = [{} for _ in range(self.world_size)]
            dist.all_gather_object(shares, own)
        for share in shares:
            seen = {key: value.to(self.device) for key, value in share.items()}
            self.policy.observe(seen, seen["valid"])

    @torch.no_grad()
    def _require_equal_policies(self, rollout: Trajectories) -> None:
        """Before the first update, this policy must score actions as the one did that chose them."""
        valid = rollout.valid.any(-1)
        some = slice(self.config.algorithm.micro_batch or PARITY_BATCH)
        take = lambda x: x[valid][some].to(self.device)  # noqa: E731
        observation = {key: take(value) for key, value in rollout.observation.items()}
        logprob, _, _ = self.policy.evaluate(observation, take(rollout.token))
        slots = valid.nonzero()[some]
        slots = torch.stack([slots[:, 0], rollout.env_ids[slots[:, 1]]], dim=1)
        if problem := disagreement(logprob, take(rollout.logprob), take(rollout.valid), slots, Limit.of(self.policy)):
            raise RuntimeError(problem)

    def _set_learning_rate(self, iteration: int, risen: float = 1.0) -> None:
        """By the schedule; that of all but the critic is multiplied by `risen` too."""
        algorithm = self.config.algorithm
        left = 1.0 if algorithm.lr_schedule == "constant" else 1.0 - iteration / self.config.train.iterations
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * left * (1.0 if group.get("is_critic") else risen)

    def _risen(self, iteration: int) -> float:
        """How far the learning rate has risen. Adam knows no scale of the gradients at first: its first steps would be
        the largest of all, just when a cloned policy has most to lose."""
        algorithm = self.config.algorithm
        learned = max(iteration - algorithm.critic_warmup, 0) + 1
        return min(1.0, learned / (algorithm.lr_warmup + 1))

    def _optimise(self, batch: Batch, sums: Sums) -> None:
        algorithm = self.config.algorithm
        for _ in range(algorithm.epochs):
            order = torch.randperm(len(batch), generator=self.generator)
            for index in order.tensor_split(algorithm.minibatches):
                if not self._step(batch.rows(index), sums):
                    return

    def _step(self, minibatch: Batch, sums: Sums) -> bool:
        """One optimiser step; False, without a step, once the divergence is beyond the target."""
        algorithm = self.config.algorithm
        if algorithm.normalise_advantage == "minibatch":
            minibatch.advantage = self._normalise(minibatch.advantage, minibatch.counts)
        totals = self._normalisers(minibatch)
        if not totals["elements"]:  # fewer decisions than minibatches
            return True
        sums.begin_minibatch()
        self.optimizer.zero_grad()
        kl = torch.zeros((), device=self.device)
        for rows in torch.arange(len(minibatch)).split(algorithm.micro_batch or max(len(minibatch), 1)):
            loss, divergence = self._loss(minibatch.rows(rows, self.device), totals, sums)
            loss.backward()
            kl += divergence
        if self.gap is not None:
            for name, value in self.gap.metrics(self._total, self._largest).items():
                sums.add(name, value)
            self.gap = None
        kl = self._total(kl)
        if algorithm.target_kl is not None and float(kl) > algorithm.target_kl:
            return False
        sums.add("losses/grad_norm", float(self._reduce_and_clip_gradients()))
        self.optimizer.step()
        return True

    def _normalisers(self, minibatch: Batch) -> dict[str, Tensor]:
        """Global denominators: of the policy's terms at ratio level and by tokens, and of the value's."""
        algorithm = self.config.algorithm
        zero = torch.zeros_like(minibatch.logprob)
        _, mask = rl.log_ratio(zero, zero, minibatch.valid, algorithm.ratio_level)
        _, tokens = rl.log_ratio(zero, zero, minibatch.valid, "token")
        _, entropies = rl.log_ratio(zero, zero, minibatch.valid, algorithm.entropy_level)
        longest = lambda mask: int(mask[0].numel()) if len(mask) else 1  # noqa: E731
        counts = {
            "policy": rl.normaliser(mask, algorithm.aggregation, longest(mask)),
            "elements": mask.sum().float(),
            "tokens": rl.normaliser(tokens, algorithm.aggregation, longest(tokens)),
            "entropy": entropies.sum().float(),
            "value": minibatch.counts.sum().float(),
        }
        return {name: self._total(count.to(self.device)) for name, count in counts.items()}

    def _loss(self, micro: Batch, totals: dict[str, Tensor], sums: Sums) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss, and of the mean divergence."""
        algorithm = self.config.algorithm
        logprob, entropy, value = self.policy.evaluate(micro.observation, micro.token)
        if self.gap is not None:
            self.gap.add(logprob, micro.logprob, micro.valid)
        ratio, mask = rl.log_ratio(logprob, micro.logprob, micro.valid, algorithm.ratio_level)
        policy = rl.policy_loss(
            ratio, micro.advantage, mask, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
        )
        policy_loss = rl.reduce(policy.loss, mask, algorithm.aggregation, totals["policy"])
        tokens = micro.valid[..., None].expand_as(entropy)
        entropy_mean = torch.where(tokens, entropy, 0.0).sum() / totals["entropy"]
        loss = policy_loss - algorithm.entropy_coef * entropy_mean
        if micro.reference is not None:
            per_token = rl.kl_penalty(logprob, micro.reference, algorithm.kl_kind, tokens)
            kl_mean = rl.reduce(per_token, tokens, algorithm.aggregation, totals["tokens"])
            loss = loss + algorithm.kl_coef * kl_mean
            sums.add_part("losses/kl_reference", kl_mean)
        if algorithm.name == "ppo":
            per_value, value_clipped = rl.value_loss(
                value,
                micro.value,
                micro.returns,
                algorithm.value_clip,
                algorithm.value_loss,
                algorithm.huber_delta,
                micro.counts,
            )
            value_loss = per_value.sum() / totals["value"]
            loss = loss + algorithm.value_coef * value_loss
            sums.add_part("losses/value", value_loss)
            sums.add_part("losses/value_clip_fraction", value_clipped.float().sum() / totals["value"])
        divergence = policy.approx_kl.sum() / totals["elements"]
        sums.add_part("losses/policy", policy_loss)
        sums.add_part("losses/entropy", entropy_mean)
        sums.add_part("losses/approx_kl", divergence)
        sums.add_part("losses/clip_fraction", policy.clipped.float().sum() / totals["elements"])
        return loss, divergence

    # ------------------------------------------------------------------------------------------ over ranks

    def _total(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.world_size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def _largest(self, x: Tensor) -> Tensor:
        """The maximum over ranks."""
        if self.world_size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def _normalise(self, advantage: Tensor, mask: Tensor) -> Tensor:
        count, total, squares = (self._total(moment) for moment in rl.masked_moments(advantage, mask))
        mean, std = rl.mean_and_std(count, total, squares)
        return rl.normalise(advantage, mask, mean, std)

    def _explained_variance(self, value: Tensor, returns: Tensor, mask: Tensor) -> float:
        """`1 - Var(returns - value) / Var(returns)`; NaN where all returns are equal."""
        spread = []
        for x in (returns - value, returns):
            count, total, squares = (self._total(moment) for moment in rl.masked_moments(x, mask))
            spread.append(float(rl.mean_and_std(count, total, squares)[1]) ** 2)
        return 1.0 - spread[0] / spread[1] if spread[1] > 0 else float("nan")

    def _reduce_and_clip_gradients(self) -> Tensor:
        """In a warm-up of the critic nothing else has gradients afterwards, so that the policy stays what it was."""
        named = [(name, parameter) for name, parameter in self.policy.named_parameters() if parameter.requires_grad]
        parameters = [parameter for name, parameter in named if not self.warms_up or name.startswith(CRITIC)]
        if self.warms_up:
            for name, parameter in named:
                parameter.grad = parameter.grad if name.startswith(CRITIC) else None
        if self.world_size > 1:
            for parameter in parameters:  # a rank whose share was empty takes part with zeros
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
        return torch.nn.utils.clip_grad_norm_(parameters, self.config.algorithm.max_grad_norm)

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self, run_dir: Path, step: int, state: dict[str, Any], envs: list[dict[str, Any]]) -> Path | None:
        """Write a checkpoint (rank 0 does), with the driver's and the env workers' state beside our own."""
        generators: list[Any] = [self.generator.get_state()] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(generators, self.generator.get_state())
        if self.rank > 0:
            return None
        parts = {
            "policy": self.policy.learned_state(),
            "optimizer": self.optimizer.state_dict(),
            "generators": generators,
            "envs": envs,
        }
        if isinstance(self.spec, EnvSpec):  # a policy server builds the policy from it, without an env
            state = {**state, "env": plain_spec(self.spec)}
        config = self.config.model_dump(mode="json")
        return save_checkpoint(run_dir, step, parts, state, config, self.config.train.keep_checkpoints)

    def export(self, directory: Path) -> None:
        """Write the policy in the published format, adapters merged (rank 0 does); replaces what is there."""
        if self.rank == 0:
            temporary = directory.with_name(f".{directory.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            self.policy.save_pretrained(temporary)  # type: ignore[operator]
            shutil.rmtree(directory, ignore_errors=True)
            temporary.rename(directory)

    def state(self) -> dict[str, Any]:
        return {
            "spec": self.spec,
            "policy": self.policy.learned_state(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "gathered": self.gathered,
        }

    def restore(self, states: list[Any]) -> None:
        self.build(states[0]["spec"])
        self.policy.load_learned_state(states[0]["policy"])
        self.optimizer.load_state_dict(states[0]["optimizer"])
        self.generator.set_state(states[self.rank % len(states)]["generator"])
        self.gathered = Gathered.dealt([state["gathered"] for state in states], self.rank, self.world_size)

    def load_policy(self, checkpoint: Path) -> None:
        """Take the parameters of a checkpoint and nothing else."""
        self.policy.load_learned_state(load_checkpoint(checkpoint).parts["policy"])

    def load(self, checkpoint: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Go on from a checkpoint; returns the driver's and the env workers' state stored in it."""
        saved = load_checkpoint(checkpoint)
        self.policy.load_learned_state(saved.parts["policy"])
        self.optimizer.load_state_dict(saved.parts["optimizer"])
        self.generator.set_state(saved.parts["generators"][self.rank])
        return saved.state, saved.parts["envs"]
