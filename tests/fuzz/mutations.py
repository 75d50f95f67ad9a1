"""Seeded changes to bytes and JSON, as damage, another program or an attacker may cause."""

import json
import struct
from copy import deepcopy
from random import Random

INTEGERS = [
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32 - 1,
    2**62,
    2**63 - 1,
    -(2**63),
]
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    10**6,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "..",
    "../outside/x",
    "a/../../outside/x",
    "/etc/passwd",
    "\x1b]0;x\x07",
    "\0",
    "\ud800",
    "ä" * 300,
    "y" * 100_000,
    [],
    [[]],
    {},
    {"": None},
    [1, 2, 3],
    {"a": {"b": []}},
    "weights",
    "id",
    "FTRL",
    "bf16",
]


def change_bytes(content: bytes, draw: Random) -> bytes:
    """Return changed bytes: flipped, overwritten, cut, repeated or inserted, in one to three places."""
    made = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        size = len(made)
        if not size:
            made += draw.randbytes(draw.randrange(1, 64))
            continue
        at, kind = draw.randrange(size), draw.randrange(9)
        if kind == 0:
            made[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            made[at] = draw.choice([0, 1, 9, 10, 34, 44, 127, 128, 255])
        elif kind in (2, 3, 4):  # overwrite an aligned number, as Arrow, Parquet and safetensors write them
            width = draw.choice([4, 8])
            at -= at % width
            value = draw.choice(INTEGERS) + draw.choice([0, 0, 1, -1])
            made[at : at + width] = struct.pack("<Q", value % 2**64)[:width]
        elif kind == 5:
            del made[at : at + draw.choice([1, 2, 8, 64, size])]
        elif kind == 6:
            part = made[at : at + draw.choice([1, 8, 64, 512])]
            made[at:at] = part * draw.choice([1, 2, 50])
        elif kind == 7:
            made[at:at] = draw.randbytes(draw.choice([1, 3, 8, 40]))
        else:
            other = draw.randrange(size)
            width = draw.choice([1, 4, 8, 32])
            made[at : at + width] = made[other : other + width]
    return bytes(made)


def change_json(content, draw: Random):
    """Return a changed JSON value: one to three entries changed, removed, added, renamed or swapped."""
    made = json.loads(json.dumps(content))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = list(_places(made, None, None))
        holder, key = draw.choice(places)
        if holder is None:
            if draw.random() < 0.05:
                return deepcopy(draw.choice(VALUES))
            continue
        kind = draw.randrange(6)
        if kind in (0, 1, 2):
            old = holder[key]
            near = [old + 1, old - 1, -old, old * 2, float(old)] if type(old) is int and abs(old) < 2**60 else []
            holder[key] = draw.choice(near) if near and draw.random() < 0.5 else deepcopy(draw.choice(VALUES))
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            if isinstance(holder, list):
                holder.insert(key, json.loads(json.dumps(holder[key])))
            else:
                copied = json.loads(json.dumps(holder[key]))
                holder[draw.choice(["more", "", "sha256", "\0", key + "x"])] = copied
        else:
            others = [place for place in places if place[0] is not None]
            other, name = draw.choice(others)
            holder[key] = json.loads(json.dumps(other[name])) if _is_there(other, name) else None
    return made


def _places(content, holder, key):
    yield holder, key
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, each in inner:
        yield from _places(each, content, name)


def _is_there(holder, key):
    return key in holder if isinstance(holder, dict) else key < len(holder)
