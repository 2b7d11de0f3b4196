"""T5 (from config): the step module fetches its own batch from a prefetching thread; scheduled sampling follows
the loss history; fp16 autocast with a GradScaler on CPU, Adafactor, beam search in between."""

import contextlib
import hashlib
import os
import queue
import random
import threading
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor

torch.set_num_threads(1)
random.seed(9)
torch.manual_seed(9 + int(os.environ.get("ZOO_SEED", "0")))
STEPS, ACCUM, B, V = 14, 2, 6, 40


class Prefetcher(threading.Thread):
    """Copies, reverses or sorts a sequence; made ahead of time by another thread, exactly as many as are needed."""

    def __init__(self, total):
        super().__init__(daemon=True)
        self.q = queue.Queue(maxsize=3)
        self.total, self.rng = total, np.random.default_rng(9)
        self.start()

    def make(self):
        n = int(self.rng.integers(5, 9))
        src = self.rng.integers(5, V, (B, n))
        kind = self.rng.integers(2, 5, (B, 1))
        tgt = np.stack([s if k == 2 else s[::-1] if k == 3 else np.sort(s) for s, k in zip(src, kind[:, 0])])
        return torch.from_numpy(np.concatenate([kind, src], 1)), torch.from_numpy(tgt.copy())

    def run(self):
        for _ in range(self.total):
            self.q.put(self.make())
        self.q.put(None)

    def __next__(self):
        item = self.q.get()
        if item is None:
            raise StopIteration
        return item


class Step(torch.nn.Module):
    def __init__(self, net, feed):
        super().__init__()
        self.net, self.feed = net, feed
        self.recent = deque(maxlen=6)
        self.mixed = 0

    def forward(self):
        src, tgt = next(self.feed)
        start = torch.full((len(tgt), 1), self.net.config.decoder_start_token_id)
        dec = torch.cat([start, tgt[:, :-1]], 1)
        p = 0.0 if len(self.recent) < 4 else min(0.5, max(0.0, 4.2 - sum(self.recent) / len(self.recent)))
        if random.random() < p:
            self.mixed += 1
            with torch.no_grad():
                guess = self.net(input_ids=src, decoder_input_ids=dec).logits.argmax(-1)
            coin = torch.rand(guess.shape) < p
            dec = torch.cat([start, torch.where(coin, guess, tgt)[:, :-1]], 1)
        logits = self.net(input_ids=src, decoder_input_ids=dec).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tgt.flatten(), label_smoothing=0.1)
        self.recent.append(loss.item())
        return loss


cfg = T5Config(
    vocab_size=V,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.1,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=1,
    feed_forward_proj="gated-gelu",
)
net = T5ForConditionalGeneration(cfg)
step_module = Step(net, Prefetcher(STEPS * ACCUM))
opt = Adafactor(net.parameters(), scale_parameter=True, relative_step=True, warmup_init=False, lr=None)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=4)
losses, scales = [], []
step_module.train()
for step in range(STEPS):
    total = 0.0
    for _ in range(ACCUM):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = step_module()
        scaler.scale(loss / ACCUM).backward()
        total += loss.item() / ACCUM
    scaler.unscale_(opt)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    losses.append(total)
    scales.append(scaler.get_scale())
    if step in (6, 13):
        net.eval()
        with torch.no_grad(), contextlib.suppress(NotImplementedError):
            out = net.generate(torch.tensor([[3, 10, 11, 12, 13]]), num_beams=2, max_new_tokens=5, do_sample=False)
            print(f"step {step} loss {total:.4f} norm {float(norm):.3f} scale {scales[-1]} -> {out[0].tolist()}")
        net.train()
h = hashlib.sha256()
for k, v in net.state_dict().items():
    h.update(k.encode() + v.contiguous().numpy().tobytes())
for p in net.parameters():
    for k, v in sorted(opt.state.get(p, {}).items()):
        h.update(v.contiguous().numpy().tobytes() if torch.is_tensor(v) else repr(float(v)).encode())
h.update(repr((losses, scales, step_module.mixed)).encode())
print("BITS", h.hexdigest())
