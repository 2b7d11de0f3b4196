"""A model of tokens: an embedding, layers, and a head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class TokenModel(nn.Module):
    """Maps tokens ``[batch, time]`` below 32 to logits; ``make`` makes each of its layers, which map 16 features to 16."""

    def __init__(self, make: Callable[[], nn.Module], layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
