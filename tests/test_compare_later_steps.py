"""By later steps an optimizer has made whole steps of rounding: what differs then is nobody's fault, unless by far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from extent import chosen
from torch import nn

import bitwitness as bw

VOCABULARY = 128
SMALL = {"vocab_size": VOCABULARY, "use_cache": False}
STEPS, STRUCK = 3, 2


class Written(nn.Module):
    """The linear layer of transformers' GPT-2, written as a product and a sum."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def gpt2(*, other: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=64, **none, **SMALL))
    for block in model.transformer.h if other else ():
        for part in (block.attn, block.mlp):
            for name, layer in list(part.named_children()):
                if type(layer).__name__ == "Conv1D":
                    setattr(part, name, Written(layer))
    return model


def llama(*, other: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
    attention = "eager" if other else "sdpa"
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, attn_implementation=attention, **sizes, **SMALL))


def record(out: Path, make: Any, *, other: bool, struck: bool = False) -> Path:
    """Train in bfloat16 at a high rate; ``struck``: from the last step on one layer's results are a hundred times as large."""
    torch.manual_seed(0)
    model = make(other=other)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out) as recorder:
        for step in range(STEPS):
            if struck and step == STRUCK:
                layer = [module for name, module in model.named_modules() if name.endswith("mlp")][-1]
                layer.register_forward_hook(lambda _module, _args, result: 100 * result)
            tokens = torch.randint(VOCABULARY, (4, 24), generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.folder is not None
    return Path(recorder.folder)


@pytest.mark.parametrize("make", chosen([gpt2, llama], [gpt2]))
def test_what_is_written_otherwise_is_nobodys_fault_and_a_fault_is_still_seen(make: Any, tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", make, other=False), record(tmp_path / "b", make, other=True)
    report = bw.compare(a, b)
    assert report.status == "fine", report.conclusion
    report = bw.compare(a, record(tmp_path / "c", make, other=True, struck=True))
    assert report.first is not None
    assert report.first.step == STRUCK, report.conclusion
    assert "/mul#0:forward" in report.first.site, report.conclusion
