import copy
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class TinyLM(nn.Module):
    def __init__(self, v=16, d=16):
        super().__init__()
        self.emb, self.gru, self.out = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)

    def forward(self, ids):
        return self.out(self.gru(self.emb(ids))[0])


def sequence_logp(model, ids, prompt_len):
    logp = model(ids[:, :-1]).log_softmax(-1)
    token = logp.gather(2, ids[:, 1:, None]).squeeze(2)
    return token[:, prompt_len - 1 :].sum(1)


policy = TinyLM()
reference = copy.deepcopy(policy).eval()
opt = torch.optim.RMSprop(policy.parameters(), lr=1e-3)
log = []
for step in range(15 * times):
    prompt = torch.randint(0, 16, (8, 4))
    chosen = torch.cat([prompt, prompt.flip(1)], 1)
    rejected = torch.cat([prompt, torch.randint(0, 16, (8, 4))], 1)
    both = torch.cat([chosen, rejected])
    pc, pr = sequence_logp(policy, both, 4).chunk(2)
    with torch.no_grad():
        rc, rr = sequence_logp(reference, both, 4).chunk(2)
    margin = 0.1 * ((pc - pr) - (rc - rr))
    loss = -F.logsigmoid(margin).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    log += [loss.item(), (margin > 0).float().mean().item()]
print("BITS", fingerprint(policy, reference, opt, log))
