"""ActorWorker: learns from trajectories by PPO or GRPO, and owns parameters, optimiser and checkpoints.

Several ranks share the work by data parallelism: gradients are summed, every mean is taken over global counts.
"""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
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
from envs.base import EnvSpec
from policies import Policy
from scheduler.stage import Output
from scheduler.worker import Worker

PARITY_BATCH = 64  # decisions whose log-probabilities are compared before the first update
PARITY_LIMIT = 0.1  # more than bfloat16 rounds differently in batches of other sizes


@dataclass
class _Batch:
    """One iteration's decisions, flattened: B = the valid ones of T * N."""

    observation: dict[str, Tensor]  # [B, ...]
    token: Tensor  # [B, C, A]
    logprob: Tensor  # [B, C, A]
    valid: Tensor  # [B, C]
    value: Tensor  # [B]
    advantage: Tensor  # [B]
    returns: Tensor  # [B]

    def rows(self, index: Tensor) -> _Batch:
        own = {key: value[index] for key, value in self.__dict__.items() if key != "observation"}
        return _Batch(observation={key: value[index] for key, value in self.observation.items()}, **own)

    def __len__(self) -> int:
        return len(self.token)


def _free_cache() -> None:
    """Give memory that torch keeps for later back to the device, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class ActorWorker(Worker):
    """Holds the policy that learns."""

    policy: Policy
    optimizer: torch.optim.Optimizer

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.device = torch.device("cuda" if self.context.device_kind == "gpu" else "cpu")
        self.generator = torch.Generator().manual_seed(config.seed * 1009 + self.rank)
        self.has_learned = False

    def build(self, spec: EnvSpec) -> None:
        """Build the policy for the envs and its optimiser, and meet the other ranks."""
        self.spec = spec
        self.policy = build_policy(self.config, spec).to(self.device)
        self.optimizer = torch.optim.Adam(self._parameter_groups(), eps=1e-5)
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
                "params": [p for name, p in named if name.startswith("critic") is critic],
                "lr": rate,
                "base_lr": rate,
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
        backend = "nccl" if self.device.type == "cuda" else "gloo"
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
        """Learn from this rank's share of one iteration's streams.

        Gives the new parameters (rank 0 does); reports the metrics, the same on every rank.
        """
        rollout = Trajectories.concatenate(trajectories)
        if not self.has_learned:
            self._require_equal_policies(rollout)
        metrics = self._learn(rollout, self.iteration)
        self.has_learned = True
        return Output(self.weights([]) if self.rank == 0 else [], metrics)

    def _learn(self, rollout: Trajectories, iteration: int) -> dict[str, float]:
        sums = Sums()
        batch = self._prepare(rollout, sums)
        self._set_learning_rate(iteration)
        count = int(self._total(torch.tensor(len(batch))))
        sums.add("losses/samples", count)
        sums.add("losses/learning_rate", self.optimizer.param_groups[0]["lr"])
        if self.config.algorithm.name == "grpo":  # an iteration whose groups were all filtered out says so
            sums.add("grpo/empty_iteration", float(count == 0))
        if count:
            self._optimise(batch, sums)
        self._observe(rollout)
        return sums.means(self._total)

    def _observe(self, rollout: Trajectories) -> None:
        """Let the policy take in the iteration's observations, those of all ranks in the order of ranks."""
        seen = {key: rollout.observation[key].to(self.device) for key in self.policy.statistics_of}
        seen["valid"] = rollout.valid.any(-1).to(self.device)
        for source in range(self.world_size):
            if self.world_size > 1:
                shared = {key: value.clone() for key, value in seen.items()}
                for value in shared.values():
                    dist.broadcast(value, source)
            else:
                shared = seen
            self.policy.observe(shared, shared["valid"])

    @torch.no_grad()
    def _require_equal_policies(self, rollout: Trajectories) -> None:
        """Before the first update, this policy must score actions as the one did that chose them."""
        valid = rollout.valid.any(-1)
        some = slice(self.config.algorithm.micro_batch or PARITY_BATCH)
        take = lambda x: x[valid][some].to(self.device)  # noqa: E731
        observation = {key: take(value) for key, value in rollout.observation.items()}
        logprob, _, _ = self.policy.evaluate(observation, take(rollout.token))
        apart = float((logprob - take(rollout.logprob)).abs()[take(rollout.valid)].mean())
        if apart > PARITY_LIMIT:
            raise RuntimeError(
                f"before the first update, log-probabilities of the actor and of the rollout workers are {apart:.3g} "
                f"apart on average (rounding explains {PARITY_LIMIT} at most): they do not have the same policy"
            )

    def _set_learning_rate(self, iteration: int) -> None:
        algorithm = self.config.algorithm
        left = 1.0 if algorithm.lr_schedule == "constant" else 1.0 - iteration / self.config.train.iterations
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * left

    def _prepare(self, rollout: Trajectories, sums: Sums) -> _Batch:
        """Advantages and returns, and only the decisions that count."""
        valid = rollout.valid.any(-1)
        reward = torch.where(rollout.valid, rollout.reward, 0.0).sum(-1)
        if self.config.algorithm.name == "ppo":
            advantage, returns = rl.gae(
                reward,
                rollout.value,
                rollout.next_value,
                rollout.terminated.any(-1),
                rollout.truncated.any(-1),
                self.config.algorithm.gamma,
                self.config.algorithm.lam,
                valid,
            )
        else:
            advantage, valid = self._group_advantage(rollout, reward, valid, sums)
            returns = rollout.value
        if self.config.algorithm.normalise_advantage == "batch":
            advantage = self._normalise(advantage, valid)
        if self.config.algorithm.name == "ppo":
            sums.add("losses/explained_variance", self._explained_variance(rollout.value, returns, valid))
        device = self.device
        return _Batch(
            observation={key: value[valid].to(device) for key, value in rollout.observation.items()},
            token=rollout.token[valid].to(device),
            logprob=rollout.logprob[valid].to(device),
            valid=rollout.valid[valid].to(device),
            value=rollout.value[valid].to(device),
            advantage=advantage[valid].to(device),
            returns=returns[valid].to(device),
        )

    def _group_advantage(
        self, rollout: Trajectories, reward: Tensor, valid: Tensor, sums: Sums
    ) -> tuple[Tensor, Tensor]:
        """One advantage for each env's episode, repeated over its steps; and the steps that remain."""
        algorithm = self.config.algorithm
        group_id = rollout.env_ids // algorithm.group_size
        intact = ~rollout.lost.any(0)
        success = rollout.success.any(0).float()
        score = success if algorithm.group_score == "success" else torch.where(valid, reward, 0.0).sum(0)
        advantage = rl.group_advantages(score, group_id, algorithm.group_advantage, valid=intact)
        sums.add("grpo/zero_std_fraction", rl.zero_std_fraction(score, group_id, intact))
        kept = intact
        if algorithm.filter_low is not None or algorithm.filter_high is not None:
            low, high = (
                algorithm.filter_low or 0.0,
                1.0 if algorithm.filter_high is None else algorithm.filter_high,
            )
            kept = intact & rl.groups_within(success, group_id, low, high, intact)
            sums.add("grpo/kept_fraction", float(kept.float().mean()))
        return advantage.expand_as(reward), valid & kept

    def _optimise(self, batch: _Batch, sums: Sums) -> None:
        algorithm = self.config.algorithm
        for _ in range(algorithm.epochs):
            order = torch.randperm(len(batch), generator=self.generator)
            for index in order.tensor_split(algorithm.minibatches):
                minibatch = batch.rows(index.to(self.device))
                if not self._step(minibatch, sums):
                    return

    def _step(self, minibatch: _Batch, sums: Sums) -> bool:
        """One optimiser step; False, without a step, once the divergence is beyond the target."""
        algorithm = self.config.algorithm
        if algorithm.normalise_advantage == "minibatch":
            everything = torch.ones_like(minibatch.advantage, dtype=torch.bool)
            minibatch.advantage = self._normalise(minibatch.advantage, everything)
        totals = self._normalisers(minibatch)
        sums.begin_minibatch()
        self.optimizer.zero_grad()
        kl = torch.zeros((), device=self.device)
        size = algorithm.micro_batch or max(len(minibatch), 1)
        for first in range(0, len(minibatch), size):
            micro = minibatch.rows(torch.arange(first, min(first + size, len(minibatch)), device=self.device))
            loss, divergence = self._loss(micro, totals, sums)
            loss.backward()
            kl += divergence
        kl = self._total(kl)
        if algorithm.target_kl is not None and float(kl) > algorithm.target_kl:
            return False
        sums.add("losses/grad_norm", float(self._reduce_and_clip_gradients()))
        self.optimizer.step()
        return True

    def _normalisers(self, minibatch: _Batch) -> dict[str, Tensor]:
        """Global denominators of the policy terms (at ratio level) and of the value terms."""
        algorithm = self.config.algorithm
        _, mask = rl.log_ratio(minibatch.logprob, minibatch.logprob, minibatch.valid, algorithm.ratio_level)
        policy = rl.normaliser(mask, algorithm.aggregation, max_length=int(mask[0].numel()) if len(mask) else 1)
        elements = mask.sum().float()
        decisions = torch.tensor(float(len(minibatch)), device=self.device)
        return {
            "policy": self._total(policy),
            "elements": self._total(elements),
            "value": self._total(decisions),
        }

    def _loss(self, micro: _Batch, totals: dict[str, Tensor], sums: Sums) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss, and of the mean divergence."""
        algorithm = self.config.algorithm
        logprob, entropy, value = self.policy.evaluate(micro.observation, micro.token)
        ratio, mask = rl.log_ratio(logprob, micro.logprob, micro.valid, algorithm.ratio_level)
        policy = rl.policy_loss(
            ratio, micro.advantage, mask, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
        )
        policy_loss = rl.reduce(policy.loss, mask, algorithm.aggregation, totals["policy"])
        steps = torch.where(micro.valid[..., None], entropy, 0.0).sum((-1, -2))
        entropy_mean = steps.sum() / totals["value"]
        loss = policy_loss - algorithm.entropy_coef * entropy_mean
        if algorithm.name == "ppo":
            per_value, value_clipped = rl.value_loss(
                value,
                micro.value,
                micro.returns,
                algorithm.value_clip,
                algorithm.value_loss,
                algorithm.huber_delta,
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
        parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
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
        }

    def restore(self, states: list[Any]) -> None:
        self.build(states[0]["spec"])
        self.policy.load_learned_state(states[0]["policy"])
        self.optimizer.load_state_dict(states[0]["optimizer"])
        self.generator.set_state(states[self.rank % len(states)]["generator"])

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
