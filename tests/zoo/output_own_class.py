import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Prediction:
    def __init__(self, boxes, scores):
        self.boxes = boxes
        self.scores = scores

    def loss(self, target_boxes, target_scores):
        return F.smooth_l1_loss(self.boxes, target_boxes) + F.binary_cross_entropy_with_logits(
            self.scores, target_scores
        )


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.box, self.score = nn.Linear(24, 4), nn.Linear(24, 1)

    def forward(self, image):
        f = self.stem(image)
        return Prediction(self.box(f).sigmoid(), self.score(f))


detector = Detector()
opt = torch.optim.Adam(detector.parameters(), lr=3e-3)
losses = []
for i in range(20 * times):
    images = torch.rand(8, 1, 8, 8)
    pred = detector(images)
    loss = pred.loss(images.flatten(1)[:, :4], (images.mean((1, 2, 3)) > 0.5).float()[:, None])
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(detector, opt, losses))
