"""Obvious NumPy twins of every kernel, in float32, in the stated order of operations: equal to the bit."""

import math
import re
from itertools import chain, pairwise

import numpy as np
import torch

from hostdev.core.history import History

f32 = np.float32


def unique(ids):
    """Distinct ids in order of first occurrence, and each id's position among them."""
    order = list(dict.fromkeys(ids.tolist()))
    position = {value: i for i, value in enumerate(order)}
    return np.array(order, ids.dtype), np.array([position[value] for value in ids.tolist()], np.int32)


def segment_sum(grads, inverse, rows):
    out = np.zeros((rows, grads.shape[1]), f32)
    seen = set()
    for i, u in enumerate(inverse.tolist()):
        out[u] = out[u] + grads[i] if u in seen else grads[i]
        seen.add(u)
    return out


def pool(rows, inverse, offsets, weights, mean):
    """Each bag's sum of its uses' rows times their weights, [B, D]; all of a use's own row where there are no bags."""
    terms = rows[inverse] * (f32(1) if weights is None else weights[:, None])
    if offsets is None:
        return terms
    out = np.zeros((len(offsets) - 1, rows.shape[1]), f32)
    for b, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if begin < end:
            out[b] = in_order(terms[begin:end]) / f32(end - begin if mean else 1)
    return out


def terms_of(grads, offsets, weights, mean):
    """What each use adds to its row's gradient, [N, D], from the gradients of the bags."""
    if offsets is not None:
        sizes = np.diff(offsets)
        if mean:
            grads = grads / np.maximum(sizes, 1).astype(f32)[:, None]
        grads = np.repeat(grads, sizes, axis=0)
    return grads * (f32(1) if weights is None else weights[:, None])


def sum_uses(terms, inverse, rows, segment=64):
    """The sum of each row's terms: in order within segments of its uses, then the segments' sums in order."""
    out = np.full((rows, terms.shape[1]), -0.0, f32)
    for u in range(rows):
        uses = np.flatnonzero(inverse == u)
        parts = [in_order(terms[uses[k : k + segment]]) for k in range(0, len(uses), segment)]
        if parts:
            out[u] = in_order(parts)
    return out


def in_order(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def lazy_adam(w, slots, rows, g, optimizer, step):
    """Update the rows in place."""
    m, v = slots["m"], slots["v"]
    lr_t = f32(optimizer.lr * np.sqrt(1 - optimizer.beta2**step) / (1 - optimizer.beta1**step))
    b1, b2, eps = f32(optimizer.beta1), f32(optimizer.beta2), f32(optimizer.eps)
    rest1, rest2 = f32(1) - b1, f32(1) - b2
    if getattr(optimizer, "epsilon_hat", None) is False:  # Adam as torch has it
        rest1, rest2 = f32(1 - optimizer.beta1), f32(1 - optimizer.beta2)
        eps = f32(optimizer.eps * np.sqrt(1 - optimizer.beta2**step))
    m[rows] = b1 * m[rows] + rest1 * g
    v[rows] = b2 * v[rows] + rest2 * (g * g)
    numerator = b1 * m[rows] + rest1 * g if getattr(optimizer, "nesterov", False) else m[rows]
    w[rows] = w[rows] - lr_t * numerator / (np.sqrt(v[rows]) + eps)


def ftrl(w, slots, rows, g, optimizer, step):
    """Update the rows in place."""
    accum, linear = slots["accum"], slots["linear"]
    lr, l1, two_l2 = f32(optimizer.lr), f32(optimizer.l1), f32(2 * optimizer.l2)

    def power(n):
        return np.sqrt(n) if optimizer.lr_power == -0.5 else (n.astype(np.float64) ** -optimizer.lr_power).astype(f32)

    n1 = accum[rows] + g * g
    sigma = (power(n1) - power(accum[rows])) / lr
    z = linear[rows] + (g - sigma * w[rows])
    new_w = (np.sign(z) * l1 - z) / (power(n1) / lr + two_l2)
    w[rows] = np.where(np.abs(z) <= l1, f32(0), new_w)
    accum[rows] = n1
    linear[rows] = z


def sgd(w, slots, rows, g, optimizer, step):
    """Update the rows in place."""
    w[rows] = w[rows] - f32(optimizer.lr) * g


def adagrad(w, slots, rows, g, optimizer, step):
    """Update the rows in place."""
    slots["accum"][rows] = slots["accum"][rows] + g * g
    w[rows] = w[rows] - f32(optimizer.lr) * g / (np.sqrt(slots["accum"][rows]) + f32(optimizer.eps))


def mean_square(gradient):
    """Return the mean square of a row: 16 lanes add every 16th square, then the lanes are added in order."""
    lanes = [f32(0)] * 16
    for j, value in enumerate(gradient):
        lanes[j % 16] = lanes[j % 16] + value * value
    total = f32(0)
    for lane in lanes:
        total = total + lane
    return total / f32(len(gradient))


def row_wise_adagrad(w, slots, rows, g, optimizer, step):
    """Update the rows in place."""
    for row, gradient in zip(rows, g, strict=True):
        slots["accum"][row] = slots["accum"][row] + mean_square(gradient)
        w[row] = w[row] - f32(optimizer.lr) * gradient / (np.sqrt(slots["accum"][row]) + f32(optimizer.eps))


def row_wise_adam(w, slots, rows, g, optimizer, step):
    """Update the rows in place."""
    lr_t = f32(optimizer.lr * np.sqrt(1 - optimizer.beta2**step) / (1 - optimizer.beta1**step))
    b1, b2, eps = f32(optimizer.beta1), f32(optimizer.beta2), f32(optimizer.eps)
    for row, gradient in zip(rows, g, strict=True):
        slots["v"][row] = b2 * slots["v"][row] + (f32(1) - b2) * mean_square(gradient)
        slots["m"][row] = b1 * slots["m"][row] + (f32(1) - b1) * gradient
        w[row] = w[row] - lr_t * slots["m"][row] / (np.sqrt(slots["v"][row]) + eps)


def momentum(w, slots, rows, g, optimizer, step):
    """Update the rows in place."""
    decay, buffer = f32(optimizer.momentum), slots["momentum"]
    buffer[rows] = decay * buffer[rows] + g
    w[rows] = w[rows] - f32(optimizer.lr) * (g + decay * buffer[rows] if optimizer.nesterov else buffer[rows])


UPDATES = {
    "FusedSparseAdagrad": adagrad,
    "FusedSparseAdam": lazy_adam,
    "FusedSparseFtrl": ftrl,
    "FusedSparseLazyAdam": lazy_adam,
    "FusedSparseMomentum": momentum,
    "FusedSparseRowWiseAdagrad": row_wise_adagrad,
    "FusedSparseRowWiseAdam": row_wise_adam,
    "FusedSparseSGD": sgd,
}


class Table:
    """A table as three plain arrays; with a rounding, of bfloat16 weights, or of slots in bfloat16 or 8 bits."""

    def __init__(self, weights, optimizer, rounding=None, dtype="bf16", slots="fp32"):
        self.rounding = rounding  # returns the key of a step's rounding
        self.stored = dtype, "fp32" if slots == "8bit" and weights.shape[1] == 1 else slots
        self.weights = weights.copy()
        self.slots = {name: np.full(weights.shape, value, f32) for name, value in optimizer.slots.items()}
        if slots == "bf16":
            self.slots = {name: to_nearest_bfloat16(values) for name, values in self.slots.items()}
        self.slots |= {name: np.full((len(weights), 1), value, f32) for name, value in optimizer.row_slots.items()}
        self.optimizer = optimizer
        self.step = 0
        self.history = None if optimizer.catch_up is None else History(optimizer.catch_up)

    def current(self):
        """Weights and slots by name after the last step."""
        columns = {"weights": self.weights, **self.slots}
        if self.history is None:
            return columns
        return brought(columns, self.history.clock(), moments=self.history.how.betas is not None)

    def apply(self, ids, grads):
        self.step += 1
        rows, inverse = unique(ids)
        if self.history is not None:
            clock = self.history.record(self.optimizer.lr, self.step, "t")
            columns = {name: values[rows] for name, values in {"weights": self.weights, **self.slots}.items()}
            found = brought(columns, clock, moments=self.history.how.betas is not None)
            self.weights[rows] = found.pop("weights")
            for name, values in found.items():
                self.slots[name][rows] = values
            self.slots["last"][rows] = self.step
        if len(rows):
            summed = segment_sum(grads, inverse, len(rows))
            UPDATES[self.optimizer.primitive](self.weights, self.slots, rows, summed, self.optimizer, self.step)
            planes = {"weights": self.weights} | {name: self.slots[name] for name in self.optimizer.slots}
            for plane, (name, values) in enumerate(planes.items()):
                stored = self.stored[plane > 0] if self.rounding is not None else "fp32"
                if stored == "bf16":
                    values[rows] = round_to_bfloat16(values[rows], rows, self.rounding(self.step), plane)
                if stored == "8bit":
                    unsigned = name in self.optimizer.non_negative
                    values[rows] = round_to_eight_bits(values[rows], rows, self.rounding(self.step), plane, unsigned)


def to_nearest_bfloat16(values):
    """float32 values rounded to the nearest bfloat16 numbers, by torch."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def round_to_bfloat16(weights, row_ids, key, plane=0):
    """Weights, or the slot `plane` - 1, [n, D], of rows [n] rounded stochastically; float32."""
    random = random_bits(row_ids, key, plane, weights.shape[1])
    bits = (weights.view(np.uint32).astype(np.uint64) + random) & np.uint64(0xFFFF0000)
    return np.where(np.isnan(weights), np.uint32(0x7FC00000), bits.astype(np.uint32)).view(f32)


def eight_bit_map(unsigned):
    """The values of the codes from 0 up: Dettmers' dynamic map, with the lower end of each interval."""
    parts = []
    for decade in range(7):
        ends = np.linspace(0.1, 1, 2 ** (decade + unsigned) + 1)
        parts.append(float(f"1e{decade - 6}") * ends[:-1])
    return np.concatenate([[0.0], *parts, [1.0]])


def eight_bit_scales(values):
    """The scale of each row of a slot, [n, 1]: its value of largest magnitude, the positive one of two."""
    scales = []
    for row in values:
        best = max(row.tolist(), key=lambda x: (abs(x), x))
        scales.append(0 if abs(best) < 2.0**-90 else best)
    return np.array(scales, f32).reshape(-1, 1)


def round_to_eight_bits(values, row_ids, key, plane, unsigned):
    """The slot `plane` - 1, [n, D], of rows [n], as 8 bits store it: between two codes, a random one."""
    random = random_bits(row_ids, key, plane, values.shape[1])
    scales = eight_bit_scales(values)
    x = values / np.where(scales == 0, f32(1), scales)
    y, s = np.abs(x), np.ones_like(x)
    for below, up, down in [(1e-3, 1e3, 2**-3), (1e-2, 1e2, 2**-2), (1e-1, 1e1, 2**-1)]:
        low = y < f32(below)
        y, s = np.where(low, y * f32(up), y), np.where(low, s * f32(down), s)
    n = 128 if unsigned else 64
    t = (y * f32(n / 0.9) + f32(n * 8 / 9)) * s - f32(unsigned)
    t = np.minimum(np.maximum(t, f32(1)), np.abs(x) * f32(2.0**100 if unsigned else 1e7))
    u = (random >> np.uint64(4)).astype(f32) * f32(2.0**-12) + f32(2.0**-13)
    code = np.floor(t + u).astype(int)
    magnitudes = eight_bit_map(unsigned).astype(f32)[np.where(x < 0, np.minimum(code, 127), code)]
    return np.where(scales == 0, f32(0), np.where(x < 0, -magnitudes, magnitudes) * scales + f32(0))


def random_bits(row_ids, key, plane, dim):
    """16 random bits for each row and column of a plane, uint64 [n, D]."""
    pairs = (dim + 1) // 2
    steps = np.arange(plane * pairs, (plane + 1) * pairs, dtype=np.uint32) * np.uint32(0x9E3779B9)
    hashes = splitmix64(row_ids.astype(np.uint64) ^ np.uint64(key))[:, None]
    low, high = hashes.astype(np.uint32), (hashes >> np.uint64(32)).astype(np.uint32)
    words = mix32(low ^ steps) ^ high
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=2)
    return halves.reshape(len(row_ids), 2 * pairs)[:, :dim].astype(np.uint64)


def permutation(n, key):
    """range(n) by SplitMix64's hash of each number and the key."""
    return np.argsort(splitmix64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)), kind="stable")


def splitmix64(x):
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def take_lists(values, offsets, rows):
    """Lists by their number over pieces of lists end to end: their values, and how long each is."""
    lists = [some[a:b].tolist() for some, edges in zip(values, offsets, strict=True) for a, b in pairwise(edges)]
    taken = [lists[row] for row in rows]
    return np.array(list(chain(*taken))), np.array([len(found) for found in taken])


def mix32(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def uniform(rows, dim, key, low, high):
    """Initial weights of the rows [n], float32 [n, dim]: 24 bits of the same hashes as those of `normal`."""
    z = splitmix64(rows.astype(np.uint64) ^ np.uint64(key))
    halves = z.astype(np.uint32)[:, None], (z >> np.uint64(32)).astype(np.uint32)[:, None]
    pair = np.arange((dim + 1) // 2, dtype=np.uint32)
    words = [mix32(half ^ (pair * np.uint32(c))) for half, c in zip(halves, (0x9E3779B9, 0x85EBCA6B), strict=True)]
    steps = np.stack(words, axis=2).reshape(len(rows), 2 * len(pair))[:, :dim] >> np.uint32(8)
    return (low + (high - low) * 2.0**-24 * steps).astype(f32)


def largest(values):
    """The largest absolute value; infinite where one is not a number, 0 where there is none."""
    return float(np.max(np.where(np.isnan(values), np.inf, np.abs(values)), initial=0))


def normal(rows, dim, key, std):
    """Initial weights of the rows [n], float32 [n, dim]: hashes, then Box-Muller with Cephes' polynomials."""
    z = splitmix64(rows.astype(np.uint64) ^ np.uint64(key))
    low, high = z.astype(np.uint32)[:, None], (z >> np.uint64(32)).astype(np.uint32)[:, None]
    pair = np.arange((dim + 1) // 2, dtype=np.uint32)
    a, b = mix32(low ^ (pair * np.uint32(0x9E3779B9))), mix32(high ^ (pair * np.uint32(0x85EBCA6B)))

    half, one, scale = f32(0.5), f32(1), f32(2.0**-23)
    u = ((a >> np.uint32(9)).astype(f32) + half) * scale
    mantissa, exponent = np.frexp(u)
    small = mantissa < np.sqrt(f32(0.5))
    x = np.where(small, mantissa * f32(2), mantissa) - one
    e = (exponent - small).astype(f32)
    z = x * x
    y = np.zeros_like(x)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        y = y * x + f32(c)
    y = y * x * z + e * f32(-2.12194440e-4) - half * z
    log_u = (x + y) + e * f32(0.693359375)
    radius = np.sqrt(f32(-2) * log_u) * f32(std)

    t = ((((b >> np.uint32(7)) & np.uint32(0x7FFFFF)).astype(f32) + half) * scale - half) * f32(np.pi / 2)
    tt = t * t
    sin = ((f32(-1.9515295891e-4) * tt + f32(8.3321608736e-3)) * tt + f32(-1.6666654611e-1)) * tt * t + t
    cos = (f32(2.443315711809948e-5) * tt + f32(-1.388731625493765e-3)) * tt + f32(4.166664568298827e-2)
    cos = cos * tt * tt - half * tt + one
    radius = np.where(b & np.uint32(0x40000000), -radius, radius)
    swap = (b & np.uint32(0x80000000)) != 0
    out = np.stack([radius * np.where(swap, sin, cos), radius * np.where(swap, cos, sin)], axis=2)
    return out.reshape(len(rows), -1)[:, :dim]


def partial_squares(weights):
    """Sums of squares by parts of 4096 rows, each column folded in halves."""
    parts = []
    for first in range(0, len(weights), 4096):
        x = np.zeros((4096, weights.shape[1]))
        part = weights[first : first + 4096].astype(np.float64)
        x[: len(part)] = part * part
        while len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        parts.append(x[0])
    return np.stack(parts)


def auc(scores, labels):
    """The fraction of (positive, negative) pairs in the right order; ties count half."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    higher, equal = positive[:, None] > negative[None, :], positive[:, None] == negative[None, :]
    return float(higher.mean() + 0.5 * equal.mean())


def fnv1a(text):
    """The 64-bit FNV-1a hash of bytes."""
    h = 0xCBF29CE484222325
    for byte in text:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


def open_quotes(text, delimiter=","):
    """The line on which quotes begin that the text does not close, or None."""
    start, in_quotes, field_start, i, line = None, False, True, 0, 1
    while i < len(text):
        c = text[i]
        if in_quotes and text[i : i + 2] == '""':
            i += 1
        elif in_quotes and c == '"':
            in_quotes = False
        elif not in_quotes and c == '"' and field_start:
            in_quotes, start = True, line
        line += c == "\n"
        field_start = not in_quotes and c in (delimiter, "\n", "\r")
        i += 1
    return start if in_quotes else None


def criteo_lines(text):
    """The well-formed lines of Criteo's text, as label, numbers and keys, and the numbers of the others, from 1."""
    well, malformed = [], []
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        is_last = number == len(lines) and not text.endswith(b"\n")
        values = (line if is_last else line.removesuffix(b"\r")).split(b"\t")
        rules = [rb"[01]"] + [rb"-?[0-9]{1,18}|"] * 13 + [rb"[0-9a-fA-F]{8}|"] * 26
        if len(values) != 40 or not all(map(re.fullmatch, rules, values)):
            malformed.append(number)
            continue
        numbers = [float(int(value)) if value else math.nan for value in values[1:14]]
        well.append((int(values[0]), numbers, [int(value, 16) if value else 1 << 32 for value in values[14:]]))
    return well, malformed


def brought(columns, clock, *, moments):
    """Columns of rows, brought up to date by a table's clock: its coefficients, but every operation written out."""
    out = {name: values.copy() for name, values in columns.items()}
    w, now = out["weights"], int(clock.now)
    for row, last in enumerate(columns["last"][:, 0].astype(np.int64)):
        k = now - last
        if moments and k:
            *c, e = clock.recent[k] if k < len(clock.recent) else clock.frozen[last]
            m, v = out["m"][row], out["v"][row]
            s = np.sqrt(v)
            r = f32(1) / (s + e)
            x = (s - clock.shift * e) * r
            a = c[-1] * x + c[-2]
            for p in range(len(c) - 3, -1, -1):
                a = a * x + c[p]
            w[row] = w[row] - m * r * a
            b1, b2 = clock.powers[k] if k < len(clock.powers) else np.zeros(2, f32)
            out["m"][row], out["v"][row] = m * b1, v * b2
        w[row] = w[row] * f32(clock.product * clock.inverse[last])
    out["last"][:] = now
    return out


def unmix64(hashes):
    """Return the counters whose `mix64` is `hashes`, uint64 [any]: SplitMix64's finalizer, backwards."""
    z = np.asarray(hashes, np.uint64)
    z = (z ^ (z >> np.uint64(31)) ^ (z >> np.uint64(62))) * np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    z = (z ^ (z >> np.uint64(27)) ^ (z >> np.uint64(54))) * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    return (z ^ (z >> np.uint64(30)) ^ (z >> np.uint64(60))) - np.uint64(0x9E3779B97F4A7C15)


def xxh64(data):
    """XXH64 of bytes with seed 0, from its specification."""
    p1, p2, p3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    p4, p5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

    def rotate(x, n):
        x %= 2**64
        return (x << n | x >> (64 - n)) % 2**64

    def turn(lane, word):
        return rotate(lane + word * p2, 31) * p1 % 2**64

    at, found = 0, p5
    if len(data) >= 32:
        lanes = [p1 + p2, p2, 0, -p1]
        while len(data) - at >= 32:
            words = [int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little") for i in range(4)]
            lanes = [turn(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += 32
        found = sum(rotate(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            found = (found ^ turn(0, lane)) % 2**64 * p1 + p4
    found = (found + len(data)) % 2**64
    while len(data) - at >= 8:
        found = rotate(found ^ turn(0, int.from_bytes(data[at : at + 8], "little")), 27) * p1 + p4
        found, at = found % 2**64, at + 8
    if len(data) - at >= 4:
        found = rotate(found ^ int.from_bytes(data[at : at + 4], "little") * p1 % 2**64, 23) * p2 + p3
        found, at = found % 2**64, at + 4
    for byte in data[at:]:
        found = rotate(found ^ byte * p5 % 2**64, 11) * p1 % 2**64
    found = (found ^ found >> 33) * p2 % 2**64
    found = (found ^ found >> 29) * p3 % 2**64
    return found ^ found >> 32
