"""PEFT's LoRA under a budget: ``fit`` after ``get_peft_model``, then train, save and merge as ever. Run by hand::

python examples/integrations/lora.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from side_by_side import Comparison, Meter, Run, batches, compare, tiny_gpt2

import budgetopt


def train(budget: int | None, **options: Any) -> Run:
    """Four steps of the adapters; what comes of saving, loading and merging them is the last loss."""
    settings = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_gpt2(), settings)
    *data, unseen = batches(5)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    if budget is not None:
        options = {"optimizer": optimizer, "allow": ("keep", "recompute")} | options
        budgetopt.fit(model, data[0], budget, **options)
    torch.manual_seed(2)
    losses = []
    with Meter(model) as meter:
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.detach())
            del loss
            optimizer.step()
            optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(tiny_gpt2(), folder).eval()
    merged = model.merge_and_unload().eval()
    with torch.no_grad():
        losses += [loaded(**unseen).loss, merged(**unseen).loss]
    return Run.of(torch.nn.ModuleDict({"loaded": loaded, "merged": merged}), losses, meter)


def main(**options: Any) -> Comparison:
    """Plain and planned, side by side."""
    return compare("PEFT LoRA", lambda budget: train(budget, **options))


if __name__ == "__main__":
    main()
