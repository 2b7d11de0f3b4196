"""Trainers of other people's under ``bitwitness run``: prints the final weights' bits and what was logged, as one line."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def batches() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(48, 4, generator=generator), torch.randint(0, 6, (48,), generator=generator))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def lightning(folder: Path):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _index):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="mean")
            self.log("count", torch.ones(()), on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_epochs=2,
        default_root_dir=folder,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches(), batch_size=4))
    logged = {key: float(value).hex() for key, value in trainer.callback_metrics.items()}
    text = [path.read_text() for path in sorted(folder.rglob("metrics.csv"))]
    return module, [logged, text]


def transformers(folder: Path):
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
        logging_steps=1,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    timed = ("runtime", "per_second")
    return model, [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]


def accelerate(folder: Path):
    from accelerate import Accelerator

    del folder
    accelerator = Accelerator(cpu=True)
    raw, logged = Net(), []
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(raw, optimizer, DataLoader(batches(), batch_size=4))
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(accelerator.gather(loss.detach()).mean().item())
    return raw, logged


def main(trainer: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if trainer == "accelerate":
        os.environ["ACCELERATE_USE_CPU"] = "1"
    torch.manual_seed(3)
    model, logged = globals()[trainer](folder / f"rank{os.environ.get('RANK', '0')}")
    values = [value.detach().double().sum().item().hex() for value in model.parameters()]
    print(json.dumps({"trainer": trainer, "values": values, "logged": logged}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
