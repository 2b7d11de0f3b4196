import os
import tempfile

import torch
from bits import fingerprint
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SEED = int(os.environ.get("ZOO_SEED", "0"))
torch.manual_seed(SEED)


class Log(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


config = GPT2Config(vocab_size=48, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
ids = torch.randint(0, 48, (48, 12))
dataset = [{"input_ids": row, "labels": row} for row in ids]
log = Log()
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        output_dir=out,
        max_steps=15,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=SEED,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[log])
    trainer.train()
print("BITS", fingerprint(model, log.losses))
