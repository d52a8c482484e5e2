"""The module, the data and the trainer of a random fit."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytorch_lightning as pl
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.random_fit.draw import TEXT, Fit


class Samples(Dataset[Any]):
    """Token ids of the fit's lengths, images, or rows of numbers."""

    def __init__(self, fit: Fit, count: int) -> None:
        r = random.Random(fit.seed)
        lengths = [fit.longest if fit.lengths == "fixed" else r.randint(8, fit.longest) for _ in range(count)]
        self.lengths = lengths
        shape = (3, fit.longest, fit.longest) if fit.net in ("conv", "vit") else (256,)
        self.tokens, self.numbers = fit.net in TEXT or fit.net == "lstm", torch.zeros(shape)
        self.ids = torch.arange(fit.longest) % fit.vocabulary

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[: self.lengths[index]] if self.tokens else self.numbers


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Token ids filled up to the longest, and the mask that says which are real."""
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


class Lstm(nn.Module):
    """Predicts the next token."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.embed = nn.Embedding(fit.vocabulary, fit.width)
        self.lstm = nn.LSTM(fit.width, fit.width, fit.layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(fit.width, fit.vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of ids of shape (batch, length)."""
        scores = self.head(self.lstm(self.embed(ids))[0][:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def conv_net(fit: Fit) -> nn.Sequential:
    """Strided blocks of twice the channels each, with batch normalization; ten scores."""
    layers: list[nn.Module] = []
    channels = 3
    for layer in range(fit.layers):
        wider = fit.width << layer
        layers += [nn.Conv2d(channels, wider, 3, 1 + layer % 2, 1), nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]
        channels = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def text_model(fit: Fit) -> nn.Module:
    """BERT with a classifier, or GPT-2 with its loss over the next token; with adapters where the fit has them."""
    model: Any
    if fit.net == "bert":
        bert = transformers.BertConfig(
            vocab_size=fit.vocabulary,
            hidden_size=fit.width,
            num_hidden_layers=fit.layers,
            num_attention_heads=fit.width // 64,
            intermediate_size=4 * fit.width,
        )
        model = transformers.BertForSequenceClassification(bert)
    else:
        gpt2 = transformers.GPT2Config(
            vocab_size=fit.vocabulary,
            n_embd=fit.width,
            n_layer=fit.layers,
            n_head=fit.width // 64,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(gpt2)
    if fit.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if fit.adapter == "qlora":
        import bitsandbytes  # asks for the card

        for parent in list(model.modules()):
            for name, part in list(parent.named_children()):
                if type(part).__name__ in ("Linear", "Conv1D") and name not in ("classifier", "lm_head"):
                    inside, outside = part.weight.shape if type(part).__name__ == "Conv1D" else part.weight.shape[::-1]
                    setattr(parent, name, bitsandbytes.nn.Linear4bit(inside, outside, quant_type="nf4"))
    if fit.adapter:
        import peft  # likewise

        targets = ["query", "value", "dense"] if fit.net == "bert" else ["c_attn", "c_proj", "c_fc"]
        fan_in = fit.net == "gpt2" and fit.adapter == "lora"
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=8, target_modules=targets, lora_dropout=0.05, fan_in_fan_out=fan_in)
        )
    return model


def dense(fit: Fit, outputs: int) -> nn.Sequential:
    """Three wide layers."""
    hidden = [nn.GELU(), nn.Linear(fit.width, fit.width), nn.GELU()]
    return nn.Sequential(nn.Linear(256, fit.width), *hidden, nn.Linear(fit.width, outputs))


class Module(pl.LightningModule):
    """Trains the fit's network."""

    def __init__(self, fit: Fit, batch_size: int) -> None:
        super().__init__()
        self.fit, self.batch_size = fit, batch_size
        self.automatic_optimization = fit.net != "gan"
        self.critic = dense(fit, 1) if fit.net == "gan" else None
        self.network: Any
        if fit.net in TEXT:
            self.network = text_model(fit)
        elif fit.net == "vit":
            vit = transformers.ViTConfig(
                hidden_size=fit.width,
                num_hidden_layers=fit.layers,
                num_attention_heads=fit.width // 64,
                intermediate_size=4 * fit.width,
                image_size=fit.longest,
            )
            self.network = transformers.ViTForImageClassification(vit)
        else:
            self.network = {"lstm": Lstm, "conv": conv_net, "gan": lambda each: dense(each, 256)}[fit.net](fit)
        if fit.compiled:
            self.network = torch.compile(self.network)

    def loss(self, batch: Any) -> torch.Tensor:
        """The mean over the batch."""
        net = self.fit.net
        if net == "lstm":
            return self.network(batch["input_ids"])
        if net in TEXT:
            ids = batch["input_ids"]
            mask = {"attention_mask": batch["attention_mask"]} if self.fit.mask else {}
            return self.network(ids, labels=ids[:, 0] % 2 if net == "bert" else ids, **mask).loss
        scores = self.network(batch)
        scores = scores.logits if net == "vit" else scores
        return scores.square().mean() if net == "gan" else scores.logsumexp(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss; for adversarial networks both steps."""
        if self.critic is None:
            return self.loss(batch)
        of_network, of_critic = self.optimizers()
        for optimizer, sign in ((of_critic, 1), (of_network, -1)):
            optimizer.zero_grad()
            made = self.network(torch.randn_like(batch))
            score = self.critic(made if optimizer is of_network else made.detach()).mean()
            self.manual_backward(sign * (score - self.critic(batch).mean()))
            optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the loss."""
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        """The fit's, for what trains."""

        def made(parameters: Any) -> torch.optim.Optimizer:
            trained = [each for each in parameters if each.requires_grad]
            name = self.fit.optimizer
            if name == "adafactor":
                return transformers.Adafactor(trained)
            if name == "adamw8bit":
                import bitsandbytes

                return bitsandbytes.optim.AdamW8bit(trained, lr=1e-4)
            if name == "sgd":
                return torch.optim.SGD(trained, 1e-4, momentum=0.9)
            return torch.optim.AdamW(trained, 1e-4, fused=True if name == "fused" else None)

        if self.critic is None:
            return made(self.parameters())
        return [made(self.network.parameters()), made(self.critic.parameters())]

    def train_dataloader(self) -> Any:
        """In batches of `batch_size`."""
        fit = self.fit
        samples = Samples(fit, fit.samples)
        return DataLoader(
            samples,
            self.batch_size,
            shuffle=fit.shuffle,
            drop_last=fit.drop_last and self.batch_size <= fit.samples,
            collate_fn=padded if samples.tokens else None,
        )

    def val_dataloader(self) -> Any:
        """Three batches and a smaller one."""
        fit = self.fit
        if fit.validation == "none":
            return []
        samples = Samples(fit, 3 * fit.validation_batch_size + 5)
        return DataLoader(samples, fit.validation_batch_size, collate_fn=padded if samples.tokens else None)


class Average(pl.Callback):
    """Keeps an average of the weights on the card."""

    copy: nn.Module | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the network."""
        self.copy = copy.deepcopy(pl_module.network)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Move it towards the weights."""
        assert self.copy is not None
        torch._foreach_lerp_(list(self.copy.parameters()), list(pl_module.network.parameters()), 0.01)


def trainer(fit: Fit, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    """The fit's trainer on the first card."""
    return pl.Trainer(
        **{
            "accelerator": "gpu",
            "devices": 1,
            "precision": fit.precision,
            "gradient_clip_val": 1.0 if fit.clip else None,
            "accumulate_grad_batches": fit.accumulation,
            "max_epochs": -1,
            "num_sanity_val_steps": 2 if fit.validation == "sanity check" else 0,
            "val_check_interval": 0.5 if fit.validation == "middle" else 1.0,
            "limit_val_batches": 0 if fit.validation == "none" else 1.0,
            "callbacks": [*([Average()] if fit.average else []), *callbacks],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
