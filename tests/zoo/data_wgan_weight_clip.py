import os

import torch
from bits import fingerprint
from torch import nn
from torch.optim import RMSprop

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


netG = nn.Sequential(nn.Linear(4, 24), nn.ReLU(True), nn.Linear(24, 2))
netD = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2, True), nn.Linear(24, 1))
optG, optD = RMSprop(netG.parameters(), lr=5e-4), RMSprop(netD.parameters(), lr=5e-4)
one = torch.tensor(1.0)
mone = one * -1
log = []
for gen_it in range(8 * times):
    for p in netD.parameters():
        p.requires_grad = True
    for _ in range(3):
        for p in netD.parameters():
            p.data.clamp_(-0.05, 0.05)
        netD.zero_grad()
        real = torch.randn(32, 2) * 0.3 + 1
        errD_real = netD(real).mean(0).view(())
        errD_real.backward(one)
        with torch.no_grad():
            fake = netG(torch.randn(32, 4))
        errD_fake = netD(fake).mean(0).view(())
        errD_fake.backward(mone)
        optD.step()
        log.append((errD_real - errD_fake).item())
    for p in netD.parameters():
        p.requires_grad = False
    netG.zero_grad()
    errG = netD(netG(torch.randn(32, 4))).mean()
    errG.backward(one)
    optG.step()
    log.append(errG.item())
print("BITS", fingerprint(netG, netD, optG, optD, log))
