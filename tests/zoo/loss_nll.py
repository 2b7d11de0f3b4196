import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from bits import fingerprint

times = int(os.environ.get("ZOO_TIMES", "1"))


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(6 * 3 * 3, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, optimizer, history):
    model.train()
    for batch_idx in range(25 * times):
        data, target = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        history.append(loss.item())


def main():
    torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    history = []
    train(model, optimizer, history)
    print("BITS", fingerprint(model, optimizer, history))


if __name__ == "__main__":
    main()
