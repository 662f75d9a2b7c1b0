"""A loop of torch with torch.optim.Muon for matrices and AdamW's rule for the rest, sharded at stage 3.

    zero run -n 2 python examples/python/muon.py

Muon needs whole matrices: each has an owner rank, which gets it for the update and sends it back (docs/optimizers.md).
"""

import torch

import libzero


class MuonWithAdamW(torch.optim.Optimizer):
    """Matrices by Muon's step, other parameters by AdamW's: one optimizer of two groups."""

    def __init__(self, matrices: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        groups = [
            {"params": matrices, "lr": 0.02, "matrix": True},
            {"params": others, "lr": 3e-3, "matrix": False},
        ]
        super().__init__(groups, {"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                (self._muon if group["matrix"] else self._adamw)(group, p, self.state[p])

    def _muon(self, group: dict, p: torch.Tensor, state: dict) -> None:
        mean = state.setdefault("momentum_buffer", torch.zeros_like(p))
        mean.lerp_(p.grad, 1 - group["momentum"])
        x = p.grad.lerp(mean, group["momentum"])
        x = x / x.norm().clamp(min=1e-7)
        if tall := x.size(0) > x.size(1):
            x = x.mT
        for _ in range(5):  # Newton-Schulz, towards the nearest orthogonal matrix
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        p.sub_(x.mT if tall else x, alpha=group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)

    def _adamw(self, group: dict, p: torch.Tensor, state: dict) -> None:
        if "step" not in state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        (beta1, beta2), t = group["betas"], state["step"]
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt().add_(group["eps"])
        p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**t))


def main() -> None:
    comm = libzero.default_communicator()
    torch.manual_seed(0)
    width = 64
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, 1),
    )
    named = list(model.named_parameters())
    optimizer = MuonWithAdamW([p for _, p in named if p.dim() == 2], [p for _, p in named if p.dim() != 2])
    config = {"train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 3}}
    engine = libzero.Engine(model, config, optimizer=optimizer, comm=comm)
    data = torch.Generator().manual_seed(1 + comm.rank)
    for step in range(60):
        x = torch.randn(32, 16, generator=data)
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        loss.backward()
        norm = engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}, norm {norm:.3f}")
    engine.close()


if __name__ == "__main__":
    main()
