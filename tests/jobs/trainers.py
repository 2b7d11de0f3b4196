"""Trainers that wrap a model by themselves, on two ranks; plain and under guard."""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bitwitness.config import load_config
from bitwitness.guard.auto import AutoGuard
from bitwitness.stats import bit_hash

warnings.filterwarnings("ignore")


def batches() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(48, 4, generator=generator), torch.randn(48, 2, generator=generator))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def lightning(folder: Path, *, methods: bool = False) -> nn.Module:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x)

        def walk(self, x):
            for part in self.net:
                x = part(x)
            return x

        def training_step(self, batch, _index):
            x, y = batch
            return ((self.walk(x) if methods else self(x)) - y).square().mean()

        def validation_step(self, batch, _index):
            self(batch[0])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches(), batch_size=4), DataLoader(batches(), batch_size=16))
    return module


def lightning_methods(folder: Path) -> nn.Module:
    return lightning(folder, methods=True)


def transformers(folder: Path) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return model


def accelerate(folder: Path) -> nn.Module:
    from accelerate import Accelerator

    del folder
    accelerator = Accelerator(cpu=True)
    raw = network()
    raw(torch.ones(1, 4))
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(raw, optimizer, DataLoader(batches(), batch_size=4))
    for x, y in loader:
        accelerator.backward((model(x) - y).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return raw


def main(trainer: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if trainer == "accelerate":
        os.environ["ACCELERATE_USE_CPU"] = "1"
    dist.init_process_group("gloo")
    results = []
    guarded, ranks = [], []
    for on in (False, True):
        torch.manual_seed(3)
        found = AutoGuard(load_config(None, {"self_test": False}).config) if on else nullcontext()
        with found:
            model = globals()[trainer](folder)
            results.append([int(bit_hash(value.detach())) for value in model.parameters()])
            if on:
                guarded = [type(guard.model).__name__ for guard in found.entered]
                ranks = [guard.watch.ranks.size for guard in found.entered]
    print(
        json.dumps({"trainer": trainer, "guarded": guarded, "ranks": ranks, "same": results[0] == results[1]}),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
