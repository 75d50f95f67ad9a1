"""The models as in their papers, in plain torch: loops over columns and pairs, no hostdev code.

p maps names to parameters; dense is [B, nd]; lists have an entry per column of ids: its rows [B, D].
"""

import torch


def linear(p, name, x):
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def network(p, name, x, relu_at_the_end):
    """Apply layers name.0, name.2, ... with a ReLU after each, or after each but the last."""
    numbers = sorted({int(key[len(name) + 1 :].split(".")[0]) for key in p if key.startswith(f"{name}.")})
    for number in numbers:
        x = linear(p, f"{name}.{number}", x)
        if relu_at_the_end or number != numbers[-1]:
            x = torch.maximum(x, torch.zeros(()))
    return x


def wide_deep(p, dense, wide, deep):
    """Cheng et al. 2016, figure 1: both parts are added before the sigmoid. Dense columns are fields."""
    logit = p["bias"] + network(p, "deep", torch.cat(deep, 1), False)[:, 0]
    for weight in wide:
        logit = logit + weight[:, 0]
    return logit


def deepfm(p, dense, first_order, vectors):
    """Guo et al. 2017, equations 1 to 4; the value of a dense column times its own weight and vector."""
    logit = p["bias"]
    for weight in first_order:
        logit = logit + weight[:, 0]
    for i in range(dense.shape[1]):
        logit = logit + p["dense_first_order"][i] * dense[:, i]
    v = [dense[:, i, None] * p["dense_vectors"][i] for i in range(dense.shape[1])] + vectors
    for i in range(len(v)):
        for j in range(i + 1, len(v)):
            logit = logit + (v[i] * v[j]).sum(1)
    return logit + network(p, "deep", torch.cat(v, 1), False)[:, 0]


def dlrm(p, dense, vectors):
    """Naumov et al. 2019, section 2.1: the bottom MLP's output next to the dot products of all pairs of vectors."""
    v = list(vectors)
    given = []
    if dense.shape[1]:
        given = [network(p, "bottom", dense, True)]
        v = given + v
    pairs = [(v[i] * v[j]).sum(1, keepdim=True) for i in range(len(v)) for j in range(i)]
    return network(p, "top", torch.cat(given + pairs, 1), False)[:, 0]


def dcn(p, dense, vectors, structure="stacked"):
    """Wang et al. 2021, equations 1 and 4 and figure 1."""
    x0 = torch.cat([dense, *vectors], 1)
    x = x0
    for number in range(len({key.split(".")[1] for key in p if key.startswith("cross.")})):
        name = f"cross.{number}"
        if f"{name}.weight" in p:
            y = linear(p, name, x)
        else:
            y = linear(p, f"{name}.1", linear(p, f"{name}.0", x))
        x = x0 * y + x
    if structure == "stacked":
        return linear(p, "last", network(p, "deep", x, True))[:, 0]
    return linear(p, "last", torch.cat([x, network(p, "deep", x0, True)], 1))[:, 0]


def towers(p, inputs):
    """A tower's output for each label [B, labels], or [B] for one; `inputs` has each tower's input."""
    found = torch.stack([network(p, f"towers.{k}", x, False)[:, 0] for k, x in enumerate(inputs)], 1)
    return found[:, 0] if found.shape[1] == 1 else found


def count(p, name):
    return len({key.split(".")[1] for key in p if key.startswith(f"{name}.")})


def shared_bottom(p, dense, vectors):
    """Ma et al. 2018, equation 1: y_k = h_k(f(x))."""
    x = network(p, "bottom", torch.cat([dense, *vectors], 1), True)
    return towers(p, [x] * count(p, "towers"))


def mmoe(p, dense, vectors):
    """Ma et al. 2018, equations 5 to 7."""
    x = torch.cat([dense, *vectors], 1)
    experts = [network(p, f"experts.{e}", x, True) for e in range(count(p, "experts"))]
    mixed = []
    for k in range(count(p, "gates")):
        scores = torch.exp(x @ p[f"gates.{k}.weight"].T)
        gate = scores / scores.sum(1, keepdim=True)
        mixed.append(sum(gate[:, e, None] * expert for e, expert in enumerate(experts)))
    return towers(p, mixed)


NETWORKS = {
    "wide_deep": wide_deep,
    "deepfm": deepfm,
    "dlrm": dlrm,
    "dcn": dcn,
    "shared_bottom": shared_bottom,
    "mmoe": mmoe,
}
