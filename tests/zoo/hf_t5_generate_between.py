import os

import torch
from bits import fingerprint
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


config = T5Config(
    vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
)
model = T5ForConditionalGeneration(config)
opt = torch.optim.Adafactor(model.parameters(), lr=1e-2)
losses, generated = [], []
for step in range(12 * times):
    src = torch.randint(2, 32, (4, 6))
    labels = src.flip(1)
    loss = model(input_ids=src, labels=labels).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    if step % 5 == 4:
        model.eval()
        generated.append(model.generate(src[:1], max_new_tokens=4, do_sample=False).tolist())
        model.train()
print("BITS", fingerprint(model, opt, losses, generated))
