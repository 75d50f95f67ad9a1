"""A plain torch twin of a training run: whole tables as tensors, no hostdev code."""

import torch
import torch.nn.functional as F


class Twin:
    """Wide & Deep with FTRL on the wide table, lazy Adam on the deep one, Adam on the rest."""

    def __init__(self, wide, deep, dense, l2):
        self.W, self.E = (torch.tensor(table, requires_grad=True) for table in (wide, deep))
        self.n, self.z = torch.ones_like(self.W), torch.zeros_like(self.W)
        self.m, self.v = torch.zeros_like(self.E), torch.zeros_like(self.E)
        self.dense = {name: torch.tensor(value, requires_grad=True) for name, value in dense.items()}
        self.adam = torch.optim.Adam(self.dense.values(), lr=3.5e-4, eps=1e-8)
        self.l2 = l2
        self.t = 0

    def step(self, ids, mask, label):
        """Return (wide_loss, deep_loss) before the update."""
        self.t += 1
        hidden = (self.E[ids] * mask[:, :, None]).reshape(len(ids), -1)
        layers = sorted({name.split(".")[1] for name in self.dense if "." in name}, key=int)
        for i, layer in enumerate(layers):
            hidden = F.linear(hidden, self.dense[f"deep.{layer}.weight"], self.dense[f"deep.{layer}.bias"])
            hidden = hidden if i == len(layers) - 1 else hidden.relu()
        logits = (self.W[ids].squeeze(2) * mask).sum(1) + self.dense["bias"] + hidden.squeeze(1)
        wide = F.binary_cross_entropy_with_logits(logits, label)
        deep = wide
        if self.l2 == "batch":
            deep = wide + 8e-5 / 2 * self.E[ids].square().sum()
        elif self.l2 == "table":
            deep = wide + 8e-5 / 2 * self.E.square().sum()
        for parameter in (self.W, self.E, *self.dense.values()):
            parameter.grad = None
        deep.backward()
        self.adam.step()
        rows = torch.unique(ids)
        with torch.no_grad():
            self.ftrl(rows, self.W.grad[rows])
            self.lazy_adam(rows, self.E.grad[rows])
        return float(wide.detach()), float(deep.detach())

    def ftrl(self, rows, g, lr=5e-2, l1=1e-8, l2=1e-8):
        old, w = self.n[rows], self.W[rows]
        n = old + g * g
        z = self.z[rows] + g - (n.sqrt() - old.sqrt()) / lr * w
        new = (torch.sign(z) * l1 - z) / (n.sqrt() / lr + 2 * l2)
        self.W[rows] = torch.where(z.abs() > l1, new, torch.zeros_like(new))
        self.n[rows], self.z[rows] = n, z

    def lazy_adam(self, rows, g, lr=3.5e-4, beta1=0.9, beta2=0.999, eps=1e-8):
        lr_t = lr * (1 - beta2**self.t) ** 0.5 / (1 - beta1**self.t)
        self.m[rows] = beta1 * self.m[rows] + (1 - beta1) * g
        self.v[rows] = beta2 * self.v[rows] + (1 - beta2) * g * g
        self.E[rows] -= lr_t * self.m[rows] / (self.v[rows].sqrt() + eps)
