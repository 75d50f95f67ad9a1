"""A saved network with an invalid manifest, or one that names files elsewhere, is refused in a line."""

import json

import pytest
import torch

from hostdev.core.errors import UserError
from hostdev.distributed.world import ALONE_WORLD
from hostdev.ext.parallel import state


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["tensors"].update(w=[["../secret.safetensors", None]]),
        lambda content: content["tensors"].update(w=[["/etc/passwd", None]]),
        lambda content: content["tensors"].update(w=[["linked.safetensors", None]]),
        lambda content: content["tensors"].update(w=3),
        lambda content: content.pop("tensors"),
    ],
)
def test_files_elsewhere_are_not_read(tmp_path, change):
    state.save(tmp_path / "net", "state.safetensors", {"w": (torch.ones(2), None)}, {}, ALONE_WORLD)
    found, _ = state.load(tmp_path / "net", lambda name: True)
    assert found["w"].tolist() == [1, 1]
    (tmp_path / "secret.safetensors").write_bytes((tmp_path / "net/state.safetensors").read_bytes())
    (tmp_path / "net/linked.safetensors").symlink_to(tmp_path / "secret.safetensors")
    path = tmp_path / "net" / state.MANIFEST
    content = json.loads(path.read_text())
    more = ["../secret.safetensors", "linked.safetensors"]
    content["files"] |= dict.fromkeys(more, content["files"]["state.safetensors"])
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest.json is broken \("):
        state.load(tmp_path / "net", lambda name: True)
