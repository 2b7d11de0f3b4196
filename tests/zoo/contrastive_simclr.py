import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from bits import fingerprint

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def info_nce(features, n_views=2, temperature=0.2):
    batch = features.shape[0] // n_views
    labels = torch.cat([torch.arange(batch) for _ in range(n_views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity = similarity[~mask].view(similarity.shape[0], -1)
    positives = similarity[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    return logits / temperature, torch.zeros(logits.shape[0], dtype=torch.long)


class ResNetSimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.backbone_fc = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.backbone_fc(self.backbone(x))


model = ResNetSimCLR()
opt = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()
losses = []
for _ in range(15 * times):
    x = torch.rand(8, 3, 8, 8)
    images = torch.cat([x.flip(-1) + 0.05 * torch.randn_like(x), x * (0.8 + 0.4 * torch.rand(8, 1, 1, 1))])
    logits, labels = info_nce(model(images))
    loss = criterion(logits, labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
