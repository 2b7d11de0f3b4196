import os

import torch
from bits import fingerprint
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


config = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(12 * times):
    opt.zero_grad()
    for micro in range(2):
        ids = torch.randint(0, 40, (4, 10))
        out = model(input_ids=ids, labels=ids)
        loss = out["loss"]
        loss *= 0.5
        loss.backward()
        losses.append(loss.item())
    opt.step()
print("BITS", fingerprint(model, opt, losses))
