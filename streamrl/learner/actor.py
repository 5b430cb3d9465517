"""The actor: the causal language model that is trained, with streaming accumulation of gradients (sharded.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from streamrl.config import RunConfig
from streamrl.learner.batch import Microbatch, TrainSample
from streamrl.learner.export import write_model
from streamrl.learner.losses import TOKEN_SUMS, TokenSums, decoupled_ppo
from streamrl.learner.model import LogProbModel, row_limits
from streamrl.learner.ranks import Ranks
from streamrl.learner.results import LogProbs, MicroStats, UpdateStats
from streamrl.learner.sharded import Sharded
from streamrl.learner.sharding import SMALL, load_model, shard


class Actor(Sharded):
    """A causal language model in training, sharded over the ranks of the learner.

    Args:
        config: the run. Float32 matmul precision and CPU threads of this process are set from it.
        ranks: the ranks of this learner; every rank makes an actor with the same configuration.
        small: models with fewer parameters than this are one FSDP unit.

    Raises:
        ConfigError: the model is missing, is no causal language model, or computes logits in a way we do not know.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, *, small: int = SMALL) -> None:
        self.config = config
        learner = config.learner
        if learner.threads is not None:
            torch.set_num_threads(learner.threads)
        model = LogProbModel(
            load_model(config.model), temperature=config.sampling.temperature, chunk=learner.logprob_chunk
        )
        model.check()
        limits = row_limits(config, model)
        # After the two trials above, which compare numbers and want them exact.
        torch.set_float32_matmul_precision(learner.matmul_precision)
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        whole = shard(model, ranks.mesh, dtype, small=small)
        self._sums = torch.zeros(len(TOKEN_SUMS), dtype=torch.float64, device=ranks.device)
        super().__init__(model, learner, ranks, limits, vocabulary=model.vocabulary, dtype=dtype, whole=whole)
        self._model = model

    def compute_log_prob(self, batch: Sequence[TrainSample], calculate_entropy: bool = False) -> LogProbs:
        """Return log-probabilities of the sampled tokens under the present weights. Collective, without gradients.

        Args:
            batch: this rank's samples, possibly none; advantages and behaviour log-probs are not used.
            calculate_entropy: also return the entropy at each sampled token.

        Raises:
            ValueError: a sample does not fit the model; the other ranks get a StreamrlError.
        """
        logprobs = [np.zeros(0, dtype=np.float32) for _ in batch]
        entropy = [np.zeros(0, dtype=np.float32) for _ in batch]
        for part in self._agree(batch):
            with torch.no_grad():
                logprob, spread = self._forward(part, entropy=calculate_entropy)
            for target, values in ((logprobs, logprob), (entropy, spread)):
                if values is not None:
                    part.deal_out(values.cpu().numpy(), target)
        return LogProbs(logprobs=logprobs, entropy=entropy if calculate_entropy else None)

    def accumulate(self, batch: Sequence[TrainSample]) -> MicroStats:
        """Add the gradient of the loss of these samples, summed over tokens. Collective; one all-reduce of our own.

        Samples with zero advantage are skipped, which is exact: their loss has no gradient. Their tokens still count
        in what is given to `apply_update`. The proximal policy is the present one, since there is one update per step,
        so no extra pass is made for it.

        Args:
            batch: this rank's samples, possibly none.

        Returns:
            What was done on this rank, from numbers known to the host: nothing waits for the device.

        Raises:
            ValueError: a sample does not fit the model; the other ranks get a StreamrlError. No gradient was added.
        """
        live = [sample for sample in batch if sample.has_advantage]
        parts = self._agree(live)
        self._backward(parts, self._loss)
        return MicroStats(
            samples=sum(len(part.samples) for part in parts),
            skipped=len(batch) - len(live),
            tokens=sum(int(part.counts.sum()) for part in parts),
            computed=sum(part.input_ids.size for part in parts),
            passes=len(parts),
        )

    def apply_update(self, tokens: int) -> UpdateStats:
        """Update the weights with the accumulated gradient and forget it. Collective, one all-reduce.

        The gradient is that of the mean loss per token, clipped to `learner.clip_norm`. When its norm is not finite,
        the update is skipped and reported. Without any accumulated gradient the gradient is zero, and AdamW moves on
        its momentum as it would have if every zero-advantage sample had been computed.

        Args:
            tokens: sampled tokens of the whole step over all ranks, those of zero-advantage samples included; at
                least 1 and the same on all ranks.
        """
        if tokens < 1:
            raise ValueError(f"an update needs the token count of its step, got {tokens}")
        applied = self._update(tokens, self._sums)
        trained = TokenSums.from_tensor(applied.sums)
        self._sums.zero_()
        return UpdateStats(
            update=applied.update,
            loss=trained.loss / tokens,
            grad_norm=applied.grad_norm,
            lr=applied.lr,
            skipped=applied.skipped,
            trained=trained,
        )

    def update_policy(self, batch: Sequence[TrainSample]) -> tuple[MicroStats, UpdateStats]:
        """One whole step: `accumulate` and `apply_update` with the tokens of all ranks' batches. Collective."""
        stats = self.accumulate(batch)
        count = torch.tensor([sum(len(sample.tokens) for sample in batch)], device=self.ranks.device)
        return stats, self.apply_update(max(1, int(self.ranks.all_sum(count))))

    def discard(self) -> None:
        """Forget the accumulated gradient and its statistics."""
        super().discard()
        self._sums.zero_()

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory with its tokenizer. Collective; rank 0 writes."""
        tensors = self.full_tensors(self._dtype)
        if self.ranks.rank:
            for _ in tensors:
                pass
            return
        tokenizer = self.config.model.tokenizer or self.config.model.path
        write_model(folder, self._model.model, dict(tensors), tokenizer, self._dtype)

    def _loss(self, part: Microbatch) -> torch.Tensor:
        logprobs, _ = self._forward(part)
        if not len(part.samples):
            return logprobs.sum() * 0
        loss = decoupled_ppo(
            logprobs,
            logprobs.detach(),
            self._to_device(part.behaviour),
            self._to_device(part.advantages),
            **self.config.learner.loss.args,
        )
        self._sums += loss.sums
        total: torch.Tensor = loss.per_token.sum()
        return total
