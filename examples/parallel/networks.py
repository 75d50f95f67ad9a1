"""ResNet-50 and a small network for MNIST as nn.Sequential of named parts; stages may be cut between any two parts.

Seed torch's generator first: it draws the weights.

Shapes: B images, H x W pixels.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """relu(x + f(x)), where f is a 1 x 1, a 3 x 3 and a 1 x 1 convolution with BatchNorm, and ReLUs in between.

    Args:
        channels: Number of input channels.
        width: Channels of the 3 x 3 convolution; the output has 4 * width channels.
        stride: Stride of the 3 x 3 convolution, as in ResNet v1.5; in the paper the first convolution has it.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1, self.bn1 = _conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, out, 1), nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        nn.init.zeros_(self.bn3.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(_conv(channels, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 4 * width, H / stride, W / stride] for x [B, channels, H, W]."""
        found = self.relu(self.bn1(self.conv1(x)))
        found = self.relu(self.bn2(self.conv2(found)))
        both: Tensor = self.relu(self.bn3(self.conv3(found)) + self.shortcut(x))
        return both


def resnet50(
    width: int = 64, classes: int = 10, blocks: Sequence[int] = (3, 4, 6, 3), *, small_images: bool = False
) -> nn.Sequential:
    """Return ResNet-50, a network from images [B, 3, H, W] to logits [B, classes].

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. Initial values are those of He et al.,
    ICCV 2015, by fan-out; each block's last scale begins at 0, so that a block begins as its shortcut (Goyal et al.,
    "Accurate, Large Minibatch SGD", 2017). The parts are head.conv, head.bn, head.relu, head.pool, a part for each
    block (layer1.0, layer1.1, ...), pool, flatten and fc.

    Args:
        width: Channels of the head, and of the 3 x 3 convolutions of the first layer; each layer doubles it.
        classes: Number of classes.
        blocks: Number of blocks of each layer.
        small_images: For images such as 32 x 32: a head of 3 x 3 with stride 1 and without pooling, instead of 7 x 7
            with stride 2 and pooling.
    """
    head: OrderedDict[str, nn.Module] = OrderedDict(
        conv=_conv(3, width, 3) if small_images else _conv(3, width, 7, 2), bn=nn.BatchNorm2d(width), relu=nn.ReLU()
    )
    if not small_images:
        head["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    parts: OrderedDict[str, nn.Module] = OrderedDict(head=nn.Sequential(head))
    channels = width
    for number, count in enumerate(blocks):
        inner = width << number
        layer = []
        for block in range(count):
            layer.append(Bottleneck(channels, inner, 2 if number and not block else 1))
            channels = EXPANSION * inner
        parts[f"layer{number + 1}"] = nn.Sequential(*layer)
    parts.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, classes))
    return nn.Sequential(parts)


def mnist_net(hidden: Sequence[int] = (), pixels: int = 784, *, bias: float = 0.0) -> nn.Sequential:
    """Return a network from images [B, 1, H, W] to logits [B, 10], which are not negative.

    The parts are flatten, dense1, relu1 and so on; the last layer has a ReLU, too. The last layer's initial weights are
    N(0, 0.01^2). The other layers' are He's, because a signal would fade through several layers of N(0, 0.01^2).

    Args:
        hidden: Widths of the layers before the last.
        pixels: H * W.
        bias: Initial bias of the last layer, which softmax ignores; that of the other layers is 0. A class whose logit
            is below 0 for all images never learns again: on small data this happens to some classes with a bias of 0,
            and has not been seen with 3.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, (width, out) in enumerate(pairwise([pixels, *hidden, 10]), 1):
        dense = nn.Linear(width, out)
        if number <= len(hidden):
            nn.init.kaiming_normal_(dense.weight, nonlinearity="relu")
            nn.init.zeros_(dense.bias)
        else:
            nn.init.normal_(dense.weight, std=0.01)
            nn.init.constant_(dense.bias, bias)
        parts.update({f"dense{number}": dense, f"relu{number}": nn.ReLU()})
    return nn.Sequential(parts)


def _conv(channels: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    made = nn.Conv2d(channels, out, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made
