"""The GPT of models/gpt.cpp in Python: the modules of gpt.py with the operations of the C++ program, one by one.

A step of this model from Python and a step of the C++ program differ in the language alone. Trained on the same tokens
from the same values, both have the same bits (python/tests/test_twin.py).
"""

import torch
import torch.nn.functional as F
from gpt import GPT, Block

LOSS_ELEMENTS = 1 << 18  # of logits that are converted to fp32 at a time: models/gpt_config.h


class CrossEntropy(torch.autograd.Function):
    """models/cross_entropy.cpp: computed in fp32, a few rows at a time; the gradient has the dtype of the logits."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        ctx.rows = max(1, LOSS_ELEMENTS // logits.shape[1])
        total = logits.new_zeros((), dtype=torch.float64)
        for part, target in zip(logits.split(ctx.rows), targets.split(ctx.rows)):
            likely = torch.log_softmax(part, -1, torch.float32)
            total -= likely.gather(1, target.unsqueeze(1)).sum(dtype=torch.float64)
        return (total / len(logits)).float()

    @staticmethod
    def backward(ctx, grad):
        logits, targets = ctx.saved_tensors
        factor = grad.float() / len(logits)
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows, part, target in zip(result.split(ctx.rows), logits.split(ctx.rows), targets.split(ctx.rows)):
            slope, target = torch.softmax(part, -1, torch.float32), target.unsqueeze(1)
            slope.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
            rows.copy_(slope.mul_(factor))
        return result, None


class TwinLinear(torch.nn.Linear):
    """torch::nn::Linear of libtorch: for three dimensions it rounds the product before it adds the bias in place."""

    def forward(self, x):
        product = x.matmul(self.weight.t())
        product += self.bias
        return product


class TwinBlock(Block):
    def forward(self, x):
        batch, time, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + self.projection(mixed.transpose(1, 2).reshape(batch, time, hidden))
        return y + self.down(F.gelu(self.up(self.norm2(y)), approximate="tanh"))


class Twin(GPT):
    """Arguments and initial values are those of gpt.GPT, the names of the parameters those of models::Gpt."""

    def __init__(self, layers, hidden, heads, vocabulary, sequence):
        super().__init__(layers, hidden, heads, vocabulary, sequence)
        del self.head  # its weight is the token embedding's, which C++ registers once
        for module in self.modules():
            if isinstance(module, torch.nn.Linear):
                module.__class__ = TwinLinear
            elif isinstance(module, Block):
                module.__class__ = TwinBlock

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight.narrow(0, 0, tokens.shape[1])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return CrossEntropy.apply(logits.flatten(0, 1), targets.flatten())
