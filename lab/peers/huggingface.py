"""A causal language model of transformers as the peers train it: built from a config.json, with random weights."""

import pathlib

import torch
import torch.nn.functional as F
import transformers


class HuggingFace(torch.nn.Module):
    def __init__(self, config):
        """config: the path of a config.json, as `zero models NAME` prints it."""
        super().__init__()
        settings = transformers.AutoConfig.from_pretrained(pathlib.Path(config).parent)
        settings.use_cache = False
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):  # as in all programs
            if hasattr(settings, name):
                setattr(settings, name, 0.0)
        self.model = transformers.AutoModelForCausalLM.from_config(settings)
        self.config = settings

    @property
    def blocks(self):
        """The layers, which FSDP2 shards one by one."""
        inner = self.model.base_model
        return inner.h if hasattr(inner, "h") else inner.layers

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
