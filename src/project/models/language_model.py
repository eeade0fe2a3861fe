"""A language model of tokens, by default bytes, whatever the net."""

import math
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MetricCollection

from project.models.loggers import takers
from project.models.metrics import SampleMean
from project.models.optimization import configure

Batch = dict[str, Tensor]


class LanguageModel(L.LightningModule):
    """Trained to predict each token from those before it; measured in bits per byte and perplexity.

    Batch: `{"tokens": (B, T + 1) int64}`: the first T are read, the last T predicted.

    At the end of training, and of a test, a text that the model writes goes to TensorBoard.

    The arguments are plain data, so that checkpoints load with `weights_only=True` and rebuild the module.

    Args:
        net: `_target_` and arguments of a module from tokens (B, T) to logits (B, T, vocab_size).
        optimizer: See `project.models.optimization.configure`.
        scheduler: Likewise.
        context: Longest sequence that the net reads.
        compile: Compile the net.
        prompt: How the written text begins.
        sample_bytes: Its length without the prompt; 0 writes none, as tokens that are not bytes require.
    """

    def __init__(
        self,
        net: dict[str, Any],
        optimizer: dict[str, Any],
        scheduler: dict[str, Any] | None = None,
        context: int = 256,
        compile: bool = False,  # noqa: A002
        prompt: str = "\n",
        sample_bytes: int = 200,
    ) -> None:
        super().__init__()
        if not prompt:
            raise ValueError("model.prompt is empty, but the model needs a byte to start from: type model.prompt=x")
        if sample_bytes < 0:
            raise ValueError(f"model.sample_bytes={sample_bytes} must not be negative: type model.sample_bytes=0")
        self.save_hyperparameters(logger=False)
        self.context = context
        self.prompt = prompt
        self.sample_bytes = sample_bytes
        self.net: nn.Module = instantiate(net, _convert_="all")
        if compile:
            self.net.compile()  # in place: torch.compile(net) would rename the weights in checkpoints
        metrics = _evaluation_metrics()
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens)
        return logits

    def tokens_in(self, batch: Batch) -> int:
        """How many tokens of a batch are predicted, which the tracker counts."""
        return batch["tokens"][:, 1:].numel()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._losses(batch).mean()  # train/loss is logged by the tracking callback

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_metrics.update(self._losses(batch))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.test_metrics.update(self._losses(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """`{"loss": (B,), "bits_per_byte": (B,)}`, the means over each sample's tokens."""
        loss = self._losses(batch).mean(dim=1)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}

    # Logged as objects and once an epoch: computed over the tokens of all ranks.
    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics, prog_bar=True)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.test_metrics)
        self._log_sample("test/sample")

    def on_train_end(self) -> None:
        self._log_sample("train/sample")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configure(self, self.hparams["optimizer"], self.hparams["scheduler"])

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `tokens` (B, T) int64, T >= 1, to (B, T + max_new_tokens), each token drawn from those predicted.

        The net reads the last `context` tokens anew for each. Where ranks share one net, all must call this, and
        draw the same.

        Args:
            tokens: The beginnings, on the module's device.
            max_new_tokens: How many to add.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_k: Draw only from this many likeliest tokens.
            generator: Of the CPU. By default a new one with seed 0: the global random state is never touched.

        Raises:
            ValueError: `temperature` is negative or `top_k` below 1.
        """
        if temperature < 0:
            raise ValueError(f"temperature={temperature} must not be negative: 0 takes the likeliest token")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k} must be at least 1, or None for all tokens")
        generator = generator or torch.Generator().manual_seed(0)
        was_training = self.training
        self.eval()
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.context :])[:, -1].float().cpu()  # (B, vocab_size)
            if top_k is not None and top_k < logits.shape[-1]:
                least = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            if temperature == 0:
                drawn = logits.argmax(dim=-1, keepdim=True)
            else:
                drawn = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
        self.train(was_training)
        return tokens

    def _losses(self, batch: Batch) -> Tensor:
        """Cross-entropy in nats of each predicted token, (B, T)."""
        tokens = batch["tokens"]
        logits, targets = self(tokens[:, :-1]), tokens[:, 1:]
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

    def _log_sample(self, tag: str) -> None:
        # Each rank writes the text, since the net may be spread over them, and rank 0 logs it.
        loggers = takers(self.loggers, "add_text")
        if not loggers or not self.sample_bytes:
            return
        prompt = torch.tensor([list(self.prompt.encode())], device=self.device)
        text = bytes(self.generate(prompt, self.sample_bytes, temperature=0.8)[0].tolist()).decode(errors="replace")
        if self.trainer.is_global_zero:
            markdown = "\n".join(f"    {line}" for line in text.splitlines())  # indented: shown as it is
            for logger in loggers:
                logger.add_text(tag, markdown, self.global_step)


class BitsPerByte(SampleMean):
    """The mean loss in bits: the size that the text can be compressed to, where a token is a byte."""

    def compute(self) -> Tensor:
        return super().compute() / math.log(2)


class Perplexity(SampleMean):
    """exp(mean loss): among how many equally likely tokens the model is in doubt."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def _evaluation_metrics() -> MetricCollection:
    return MetricCollection(
        {
            "loss": SampleMean(),
            "bits_per_byte": BitsPerByte(),
            "perplexity": Perplexity(),
        },
        # Three views of one mean, which is updated once.
        compute_groups=[["loss", "bits_per_byte", "perplexity"]],
    )
