import os

import torch
from bits import fingerprint
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


config = BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
)
model = BertForSequenceClassification(config)
no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(k in n for k in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if any(k in n for k in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=2e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 4, 16)
losses = []
model.train()
for step in range(16 * times):
    ids = torch.randint(1, 60, (6, 10))
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    outputs = model(input_ids=ids, attention_mask=mask, labels=ids[:, 0] % 3)
    loss = outputs.loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("BITS", fingerprint(model, optimizer, losses))
