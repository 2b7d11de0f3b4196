"""Distil a 4-layer BERT into a 2-layer one: hidden states collected by forward hooks, a memory-mapped temporal
ensemble of the student's outputs, a CSV written in forward, layers thawed (and given to the optimizer) on the way."""

import csv
import hashlib
import os
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel

torch.set_num_threads(1)
torch.manual_seed(31 + int(os.environ.get("ZOO_SEED", "0")))
np.random.seed(31)
V, L, N, C, D = 50, 10, 96, 4, 32


def bert(layers):
    return BertModel(
        BertConfig(
            vocab_size=V,
            hidden_size=D,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
        ),
        add_pooling_layer=False,
    )


class Classifier(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.bert, self.out = bert(layers), nn.Linear(D, C)

    def forward(self, ids):
        return self.out(self.bert(ids).last_hidden_state[:, 0])


class Student(Classifier):
    def __init__(self, layers, log):
        super().__init__(layers)
        self.bank = np.memmap("bank.f32", dtype=np.float32, mode="w+", shape=(N, C))
        self.seen = np.zeros(N, dtype=np.int64)
        self.log = csv.writer(log)
        self.agree = None

    def forward(self, ids, rows):
        logits = super().forward(ids)
        prob = logits.softmax(-1)
        if self.training:
            r = rows.numpy()
            old = torch.from_numpy(self.bank[r] / (1 - 0.6 ** np.maximum(self.seen[r], 1))[:, None]).float()
            known = torch.from_numpy(self.seen[r] > 0)
            self.agree = ((prob - old).square().sum(-1) * known).mean()
            self.bank[r] = 0.6 * self.bank[r] + 0.4 * prob.detach().numpy()
            self.seen[r] += 1
            self.log.writerow([int(self.seen.sum()), f"{self.agree.item():.6f}"])
        return logits


def first(o):
    return o[0] if isinstance(o, tuple) else o


def main():
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as tmp:
        os.chdir(tmp)
        log = open("agreement.csv", "w", newline="")
        ids = torch.from_numpy(np.random.randint(2, V, (N, L)))
        ids[:, 0] = 1
        y = ids[:, 1:].sum(1) % C
        teacher, student = Classifier(4).eval().requires_grad_(False), Student(2, log)
        acts = {"t": [], "s": []}
        for m, key, layers in ((teacher, "t", (1, 3)), (student, "s", (0, 1))):
            for i in layers:
                m.bert.encoder.layer[i].register_forward_hook(lambda mod, a, o, key=key: acts[key].append(first(o)))
        proj = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(2))
        student.bert.embeddings.requires_grad_(False)
        student.bert.encoder.layer[0].requires_grad_(False)
        student.out.register_full_backward_pre_hook(lambda m, go: (go[0].clamp(-0.02, 0.02),))
        opt = torch.optim.AdamW(
            [
                {"params": [p for p in student.parameters() if p.requires_grad]},
                {"params": proj.parameters(), "lr": 1e-3},
            ],
            lr=2e-3,
        )
        losses, step = [], 0
        for epoch in range(5):
            if epoch == 1:
                opt.add_param_group({"params": student.bert.encoder.layer[0].requires_grad_().parameters(), "lr": 5e-4})
            if epoch == 3:
                opt.add_param_group({"params": student.bert.embeddings.requires_grad_().parameters(), "lr": 1e-4})
            student.train()
            for rows in torch.randperm(N).split(24):
                with torch.no_grad():
                    t = teacher(ids[rows])
                s = student(ids[rows], rows)
                T = 2.0 + 0.5 * (step % 3)
                kd = F.kl_div((s / T).log_softmax(-1), (t / T).softmax(-1), reduction="batchmean") * T * T
                hid = sum(F.mse_loss(pr(a), b) for pr, a, b in zip(proj, acts["s"], acts["t"]))
                loss = 0.5 * F.cross_entropy(s, y[rows]) + 0.5 * kd + 0.2 * hid + min(1.0, step / 8) * student.agree
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 2.0)
                opt.step()
                acts["t"].clear(), acts["s"].clear()
                losses.append(loss.item())
                step += 1
            student.eval()
            with torch.no_grad():
                acc = (student(ids, torch.arange(N)).argmax(-1) == y).float().mean().item()
            acts["s"].clear()
            print(f"epoch {epoch} loss {losses[-1]:.4f} accuracy {acc:.3f}")
        log.close()
        h = hashlib.sha256()
        for m in (student, proj, teacher):
            for v in m.state_dict().values():
                h.update(v.contiguous().numpy().tobytes())
        for g in opt.param_groups:
            for p in g["params"]:
                for k, v in sorted(opt.state.get(p, {}).items()):
                    h.update(v.numpy().tobytes())
        h.update(np.asarray(student.bank).tobytes() + open("agreement.csv", "rb").read() + repr(losses).encode())
        os.chdir(here)
    print("BITS", h.hexdigest())


if __name__ == "__main__":
    main()
