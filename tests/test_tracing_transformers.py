"""Real transformers with every kind of attention mask: nobody is blamed while all is well, the right one when it is not."""

from __future__ import annotations

import pytest
import torch
from extent import chosen
from torch import nn

import bitwitness as bw

SMALL = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
HEALTHY_STEPS = 2
CHECKPOINTED = {"whole": None, "reentrant": True, "not reentrant": False}
ALL = [(name, dtype) for name in CHECKPOINTED for dtype in (torch.float32, torch.bfloat16, torch.float16)]
SHORT = [one for one in ALL if torch.float16 not in one or "whole" in one]


class Struck(nn.Module):
    """An activation that takes the logarithm of zero once it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + (x * 0).log() if self.on else y


def gpt2(attention: str) -> tuple[nn.Module, Struck, str]:
    from transformers import GPT2Config, GPT2LMHeadModel  # here: each of pytest's workers imports each file

    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=24, attn_implementation=attention, **SMALL)
    model = GPT2LMHeadModel(config)
    model.transformer.h[1].mlp.act = struck = Struck(model.transformer.h[1].mlp.act)
    return model, struck, "transformer.h.1.mlp.act"


def llama(attention: str) -> tuple[nn.Module, Struck, str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=32,
        intermediate_size=48,
        attn_implementation=attention,
        **SMALL,
    )
    model = LlamaForCausalLM(config)
    model.model.layers[1].mlp.act_fn = struck = Struck(model.model.layers[1].mlp.act_fn)
    return model, struck, "model.layers.1.mlp.act_fn"


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(("checkpointed", "dtype"), chosen(ALL, SHORT), ids=str)
@pytest.mark.parametrize(
    ("family", "attention"),
    [(gpt2, "sdpa"), (llama, "eager"), *chosen([(gpt2, "eager"), (llama, "sdpa")], [])],
)
def test_masks_are_not_blamed_and_the_operator_is(
    family, attention: str, dtype: torch.dtype, checkpointed: str
) -> None:
    torch.manual_seed(0)
    model, struck, path = family(attention)
    model.train()
    if (reentrant := CHECKPOINTED[checkpointed]) is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is torch.float16)
    ids = torch.randint(3, 96, (3, 12))
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0  # padded on the left: some rows of the attention are masked whole
    with bw.trace_nonfinite(model, optimizer) as trace:
        for step in range(HEALTHY_STEPS + 1):
            struck.on = step == HEALTHY_STEPS
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step < HEALTHY_STEPS:
                assert trace.findings == []
    (finding,) = trace.findings
    assert (finding.site.op, finding.site.module, finding.site.phase) == ("log", path, "forward")
    assert "test_tracing_transformers.py:" in finding.evidence["line"]
