"""The parts of examples/parallel: files of images read, written and made, and the networks."""

import gzip
import struct
import sys

import numpy as np
import pytest
import torch
from torch import nn

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.ext.parallel.pieces import get_pieces
from tests.conftest import ROOT

with pytest.MonkeyPatch.context() as patch:  # as in a script beside them
    patch.syspath_prepend(ROOT / "examples" / "parallel")
    import cifar10
    import generate
    import mnist
    import networks


def cifar_images(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3, 32, 32), np.uint8), rng.integers(0, 10, count)


def mnist_images(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count)


def equal(one, other):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def cifar(tmp_path):
    """A folder with two files for training and one for tests, and what is in them."""
    train, test = cifar_images(7), cifar_images(3, seed=1)
    cifar10.write(tmp_path / "data_batch_1.bin", train[0][:4], train[1][:4])
    cifar10.write(tmp_path / "data_batch_2.bin", train[0][4:], train[1][4:])
    cifar10.write(tmp_path / "test_batch.bin", *test)
    return tmp_path, train, test


@pytest.fixture
def idx(tmp_path):
    """A folder with MNIST's files of 5 and 3 images, and what is in them."""
    train, test = mnist_images(5), mnist_images(3, seed=1)
    mnist.write(tmp_path, "train", *train)
    mnist.write(tmp_path, "test", *test)
    return tmp_path, train, test


@pytest.fixture
def threads():
    """Set how many threads torch has."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def run(capsys):
    """Run generate.py's command in this process; return its code and what it printed."""
    return lambda *arguments: (cli.run("generate", generate.main, list(map(str, arguments))), *capsys.readouterr())


class TestCifar10:
    def test_what_is_written_is_read(self, cifar):
        folder, train, test = cifar
        assert equal(cifar10.read(folder, "train"), train)
        assert equal(cifar10.read(folder, "test"), test)

    def test_a_record_is_label_red_green_blue(self, tmp_path):
        image = bytes([1]) * 1024 + bytes([2]) * 1024 + bytes(range(32)) * 32
        (tmp_path / "test_batch.bin").write_bytes(bytes([9]) + image)
        images, labels = cifar10.read(tmp_path, "test")
        assert labels.tolist() == [9]
        assert images[0, :, 5, 7].tolist() == [1, 2, 7]

    def test_the_folder_may_be_the_one_around_it(self, cifar, tmp_path):
        folder, train, _ = cifar
        inside = tmp_path / "above" / "cifar-10-batches-bin"
        inside.mkdir(parents=True)
        for file in folder.glob("*.bin"):
            file.rename(inside / file.name)
        assert equal(cifar10.read(inside.parent, "train"), train)

    def test_errors(self, cifar, tmp_path):
        folder, _, _ = cifar
        with pytest.raises(UserError, match=r"none: no such folder; give the folder of data_batch_1.bin, ... "):
            cifar10.read(tmp_path / "none", "train")
        file = folder / "data_batch_2.bin"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(UserError, match=r"data_batch_2.bin is truncated: 9,218 bytes are not a multiple of 3,073"):
            cifar10.read(folder, "train")
        file.write_bytes(b"")
        with pytest.raises(UserError, match=r"data_batch_2.bin: the file is empty; download it again"):
            cifar10.read(folder, "train")
        file.write_bytes(whole[:3073] + bytes([10]) + whole[3074:])
        with pytest.raises(UserError, match=r"data_batch_2.bin: record 2 of 3 has the label 10, not one of 0 to 9; is"):
            cifar10.read(folder, "train")

    def test_files_may_be_absent_at_the_end_only(self, cifar):
        folder, _, _ = cifar
        (folder / "data_batch_2.bin").rename(folder / "data_batch_4.bin")
        with pytest.raises(UserError, match=r"data_batch_2.bin: no such file; download CIFAR-10's binary files, or"):
            cifar10.read(folder, "train")
        (folder / "data_batch_4.bin").unlink()
        assert len(cifar10.read(folder, "train")[0]) == 4
        (folder / "data_batch_1.bin").unlink()
        with pytest.raises(UserError, match=r"data_batch_1.bin: no such file"):
            cifar10.read(folder, "train")
        (folder / "test_batch.bin").unlink()
        with pytest.raises(UserError, match=r"test_batch.bin: no such file"):
            cifar10.read(folder, "test")

    def test_each_image_is_cut_out_and_mirrored_as_drawn(self):
        images, _ = cifar_images(40)
        numbers = np.arange(100, 140)
        found = cifar10.transform(images, numbers, seed=3, epoch=2, train=True)
        drawn = list(zip(*cifar10.drawn(numbers, 3, 2), strict=True))
        for image, (top, left, mirrored), one in zip(images, drawn, found, strict=True):
            padded = np.zeros((3, 40, 40), np.float32)
            padded[:, 4:36, 4:36] = image
            expected = padded[:, top : top + 32, left : left + 32]
            if mirrored:
                expected = expected[:, :, ::-1]
            for channel in range(3):
                mean, std = np.float32(cifar10.MEAN[channel]), np.float32(cifar10.STD[channel])
                assert np.array_equal(one[channel].numpy(), (expected[channel] / np.float32(255) - mean) / std)

    def test_every_place_is_drawn_equally_often(self):
        top, left, mirrored = cifar10.drawn(np.arange(16200), 1, 0)
        counts = np.bincount((top * 9 + left) * 2 + mirrored, minlength=162)
        assert (top.min(), top.max(), left.min(), left.max(), len(counts)) == (0, 8, 0, 8, 162)
        assert ((counts - 100) ** 2 / 100).sum() < 230  # chi squared of 161 degrees of freedom: less in 99.97%

    def test_another_seed_or_epoch_draws_something_else(self):
        drawn = [np.array(cifar10.drawn(np.arange(50), *how)) for how in ((1, 0), (1, 1), (2, 0))]
        assert not any(np.array_equal(drawn[a], drawn[b]) for a, b in ((0, 1), (0, 2), (1, 2)))

    @pytest.mark.parametrize("train", [True, False])
    @pytest.mark.parametrize("size", [32, 48, 224])
    def test_an_image_is_the_same_in_any_batch(self, threads, train, size):
        images, _ = cifar_images(12)
        numbers = np.arange(12) + 5
        threads(2)
        how = {"seed": 1, "epoch": 4, "train": train, "size": size}
        whole = cifar10.transform(images, numbers, **how)
        assert whole.shape == (12, 3, size, size)
        assert whole.dtype == torch.float32
        threads(1)
        for part in (slice(3, 4), slice(0, 7), slice(None, None, -1), slice(2, 12, 3)):
            found = cifar10.transform(images[part], numbers[part], **how)
            assert np.array_equal(found.numpy(), whole.numpy()[part])

    def test_for_tests_nothing_is_drawn(self):
        images, _ = cifar_images(4)
        found = cifar10.transform(images, np.arange(4), seed=1, epoch=0, train=False)
        other = cifar10.transform(images, np.arange(4) + 9, seed=2, epoch=1, train=False)
        assert torch.equal(found, other)
        mean, std = (np.array(one, np.float32)[:, None, None] for one in (cifar10.MEAN, cifar10.STD))
        assert np.array_equal(found.numpy(), (images / np.float32(255) - mean) / std)

    @pytest.mark.parametrize("size", [20, 33, 224])
    def test_another_size_is_as_torch_interpolates(self, size):
        images, _ = cifar_images(2)
        found = cifar10.transform(images, np.arange(2), seed=1, epoch=0, train=False, size=size)
        plain = cifar10.transform(images, np.arange(2), seed=1, epoch=0, train=False)
        expected = nn.functional.interpolate(plain, (size, size), mode="bilinear", align_corners=False)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class TestMnist:
    def test_what_is_written_is_read(self, idx):
        folder, train, test = idx
        assert equal(mnist.read(folder, "train"), train)
        assert equal(mnist.read(folder, "test"), test)

    def test_compressed_files_are_read(self, idx):
        folder, train, _ = idx
        for name in mnist.FILES["train"]:
            (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
            (folder / name).unlink()
        assert equal(mnist.read(folder, "train"), train)

    def test_the_layout(self, tmp_path):
        (tmp_path / "t10k-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 1, 2, 3) + bytes(range(6)))
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 1) + bytes([7]))
        images, labels = mnist.read(tmp_path, "test")
        assert images.tolist() == [[[0, 1, 2], [3, 4, 5]]]
        assert labels.tolist() == [7]
        before = content(tmp_path)
        mnist.write(tmp_path, "test", images, labels)
        assert content(tmp_path) == before

    def test_what_is_read_is_ones_own(self, idx):
        images, labels = mnist.read(idx[0], "train")
        images[0], labels[0] = 0, 0
        assert torch.from_numpy(images).sum() > 0

    @pytest.mark.parametrize(
        ("number", "damage", "words"),
        [
            (0, lambda raw: raw[:3], r"train-images-idx3-ubyte is truncated: 3 bytes, but the header has 16; download"),
            (0, lambda raw: b"", r"images-idx3-ubyte is truncated: 0 bytes, but the header has 16; download it again"),
            (0, lambda raw: raw[:-1], r"is truncated: 3,935 bytes instead of 3,936 for the header's 5 x 28 x 28"),
            (1, lambda raw: raw + b"\0", r"idx1-ubyte is too long: 14 bytes instead of 13 for the header's 5 values"),
            (1, lambda raw: b"\0\0\x08\x03" + raw[4:], r"is not an idx file of labels: it begins with 2051, not 2049"),
            (0, lambda raw: b"\0\0\x08\x01" + raw[4:], r"is not an idx file of images: it begins with 2049, not 2051"),
            (0, lambda raw: raw[:4] + bytes(4) + raw[8:16], r"has no values: its sizes are 0 x 28 x 28; download"),
            (1, lambda raw: raw[:10] + bytes([10]) + raw[11:], r"ubyte: label 3 of 5 is 10, not one of 0 to 9; down"),
            (1, lambda raw: raw[:7] + bytes([4]) + raw[8:-1], r"labels-idx1-ubyte: 4 labels, but 5 images in train-im"),
        ],
    )
    def test_damage(self, idx, number, damage, words):
        file = idx[0] / mnist.FILES["train"][number]
        file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(UserError, match=words):
            mnist.read(idx[0], "train")

    @pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"x" + raw, lambda raw: raw[:30] + raw[40:]])
    def test_damage_of_compressed_files(self, idx, damage):
        file = idx[0] / mnist.FILES["train"][0]
        file.with_name(file.name + ".gz").write_bytes(damage(gzip.compress(file.read_bytes())))
        file.unlink()
        with pytest.raises(UserError, match=r"idx3-ubyte.gz is damaged or not a gzip file \(.*\); download it again"):
            mnist.read(idx[0], "train")

    def test_absent_files(self, idx):
        folder, _, _ = idx
        with pytest.raises(UserError, match=r"none: no such folder; give the folder of train-images-idx3-ubyte and"):
            mnist.read(folder / "none", "train")
        (folder / "t10k-labels-idx1-ubyte").unlink()
        with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte: no such file, with or without .gz; download"):
            mnist.read(folder, "test")

    def test_transform(self):
        images, _ = mnist_images(3)
        found = mnist.transform(images)
        assert found.shape == (3, 1, 28, 28)
        expected = (images[:, None] / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081)
        assert np.array_equal(found.numpy(), expected)
        assert np.array_equal(mnist.transform(images[1:2]).numpy(), expected[1:2])


class TestGenerate:
    def test_cifar10(self, run, tmp_path):
        code, out, err = run("cifar10", tmp_path / "new" / "a", "--train", 23, "--test", 10)
        assert (code, err) == (0, "")
        assert out == f"{tmp_path / 'new' / 'a'}: 23 training and 10 test images of 3 x 32 x 32 in CIFAR-10's format\n"
        assert len(content(tmp_path / "new" / "a")) == 6
        images, labels = cifar10.read(tmp_path / "new" / "a", "train")
        assert images.shape == (23, 3, 32, 32)
        assert set(np.bincount(labels)) == {2, 3}
        assert set(cifar10.read(tmp_path / "new" / "a", "test")[1].tolist()) == set(range(10))

    def test_mnist(self, run, tmp_path):
        code, out, err = run("mnist", tmp_path, "--train", 20, "--test", 10)
        assert (code, err) == (0, "")
        assert out == f"{tmp_path}: 20 training and 10 test images of 28 x 28 in MNIST's format\n"
        images, labels = mnist.read(tmp_path, "train")
        assert images.shape == (20, 28, 28)
        assert np.bincount(labels).tolist() == [2] * 10

    def test_digits(self, run, tmp_path):
        code, out, err = run("digits", tmp_path)
        assert (code, err) == (0, "")
        assert out == f"{tmp_path}: 1,437 training and 360 test handwritten digits of 28 x 28 in MNIST's format\n"
        (images, labels), (tests, test_labels) = mnist.read(tmp_path, "train"), mnist.read(tmp_path, "test")
        assert images.shape == (1437, 28, 28)
        assert tests.shape == (360, 28, 28)
        images, labels = np.concatenate([images, tests]), np.concatenate([labels, test_labels])
        assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
        assert images.max() == 255
        small = images[:, 3:26:3, 3:26:3]
        assert np.array_equal(np.pad(np.kron(small, np.ones((1, 3, 3), np.uint8)), ((0, 0), (2, 2), (2, 2))), images)
        from sklearn.datasets import load_digits

        found, expected = np.rint(small / 255 * 16).reshape(1797, 64), load_digits()
        order, other = np.lexsort(found.T), np.lexsort(expected.data.T)
        assert np.array_equal(found[order], expected.data[other])
        assert np.array_equal(labels[order], expected.target[other])

    @pytest.mark.parametrize("kind", ["cifar10", "mnist"])
    def test_a_seed_is_the_same_bytes(self, run, tmp_path, kind):
        for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
            assert run(kind, tmp_path / folder, "--train", 20, "--test", 10, "--seed", seed)[0] == 0
        assert content(tmp_path / "a") == content(tmp_path / "b")
        assert all(content(tmp_path / "a")[name] != raw for name, raw in content(tmp_path / "c").items())

    @pytest.mark.parametrize("draw", [generate.waves, generate.segments])
    def test_an_image_is_no_function_of_the_chunk(self, monkeypatch, draw):
        whole, labels = generate.made(draw, 30, 1, "train")
        monkeypatch.setattr(generate, "CHUNK", 7)
        again, same = generate.made(draw, 30, 1, "train")
        assert equal((whole, labels), (again, same))
        other, _ = generate.made(draw, 30, 1, "test")
        assert not np.array_equal(whole, other)

    @pytest.mark.parametrize(("kind", "name"), [("cifar10", "test_batch.bin"), ("mnist", "t10k-labels-idx1-ubyte")])
    def test_nothing_is_written_over(self, run, tmp_path, kind, name):
        (tmp_path / name).write_text("mine")
        code, out, err = run(kind, tmp_path)
        assert (code, out) == (2, "")
        assert err == f"generate: error: {tmp_path / name}: the file exists; give another folder, or remove it\n"
        assert content(tmp_path) == {name: b"mine"}

    def test_errors(self, run, tmp_path, monkeypatch):
        assert run("mnist", tmp_path / "a", "--test", 0)[2] == "generate: error: --test must be at least 1, not 0\n"
        assert run("digits", tmp_path / "a", "--seed", 3)[::2] == (
            2,
            "generate: error: unrecognized arguments: --seed 3 (see generate --help)\n",
        )
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        code, _, err = run("digits", tmp_path / "a")
        assert code == 2
        assert err == (
            "generate: error: digits come with scikit-learn, which is not installed: pip install scikit-learn\n"
        )
        assert not (tmp_path / "a").exists()

    def test_the_classes_can_be_told_apart(self):
        """By the strongest wave, and by the colour that it is strongest in: what a network has to find out."""
        images, labels = generate.made(generate.waves, 100, 1, "train")
        waves = np.abs(np.fft.fft2(images.astype(np.float64).transpose(0, 2, 3, 1), axes=(1, 2)))
        strength = np.stack([waves[:, y, x] for x, y in generate.TEXTURES], 1)  # [100, textures, channels]
        texture = (strength @ np.abs(generate.COLOURS).sum(0)).argmax(1)
        colour = strength[np.arange(100), texture]
        assert np.mean(texture + 5 * (colour[:, 2] > colour[:, 0]) == labels) > 0.95


class TestNetworks:
    def test_resnet50_has_as_many_parameters_as_the_papers(self):
        with torch.device("meta"):
            network = networks.resnet50(classes=1000)
        assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032

    def test_resnet50_is_cut_between_blocks(self):
        network = networks.resnet50(4)
        layers = [f"layer{layer}.{block}" for layer, count in enumerate((3, 4, 6, 3), 1) for block in range(count)]
        head = ["head.conv", "head.bn", "head.relu", "head.pool"]
        assert [piece.name for piece in get_pieces(network)] == [*head, *layers, "pool", "flatten", "fc"]
        assert not any(one.inplace for one in network.modules() if isinstance(one, nn.ReLU))

    @pytest.mark.parametrize(("small", "sides"), [(False, (32, 16, 16, 8, 4, 2)), (True, (64, 64, 64, 32, 16, 8))])
    def test_resnet50_shapes(self, small, sides):
        with torch.device("meta"):
            network, images = networks.resnet50(4, 7, (1, 2, 1, 1), small_images=small), torch.empty(2, 3, 64, 64)
            seen = [network.head[:3](images)]
            for part in (network.head[3:], network.layer1, network.layer2, network.layer3, network.layer4):
                seen.append(part(seen[-1]))
            assert network(images).shape == (2, 7)
        assert [tuple(one.shape[1:]) for one in seen] == [
            (channels, side, side) for channels, side in zip((4, 4, 16, 32, 64, 128), sides, strict=True)
        ]

    def test_a_block_has_its_stride_in_the_middle(self):
        block = networks.Bottleneck(8, 4, 2)
        assert [one.stride for one in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]
        assert isinstance(networks.Bottleneck(16, 4, 1).shortcut, nn.Identity)

    def test_resnet50_begins_with_hes_weights(self):
        torch.manual_seed(0)
        network = networks.resnet50(16, blocks=(1, 1, 1, 1))
        for one in network.modules():
            if isinstance(one, nn.Conv2d):
                assert one.bias is None
                size = one.kernel_size[0]
                assert one.weight.std().item() == pytest.approx((2 / (one.out_channels * size**2)) ** 0.5, rel=0.15)

    def test_a_seed_gives_the_same_network(self):
        made = []
        for _ in range(2):
            torch.manual_seed(5)
            made.append(networks.resnet50(4, blocks=(1, 1, 1, 1), small_images=True).state_dict())
        assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())

    def test_mnist_net(self):
        torch.manual_seed(0)
        network = networks.mnist_net()
        assert [piece.name for piece in get_pieces(network)] == ["flatten", "dense1", "relu1"]
        assert network.dense1.weight.shape == (10, 784)
        assert network.dense1.weight.std().item() == pytest.approx(0.01, rel=0.05)
        assert not network.dense1.bias.any()
        found = network(torch.randn(4, 1, 28, 28))
        assert found.shape == (4, 10)
        assert found.min() == 0

    def test_mnist_net_with_hidden_layers(self):
        torch.manual_seed(0)
        network = networks.mnist_net((300, 200), pixels=64, bias=1.0)
        names = ["flatten", "dense1", "relu1", "dense2", "relu2", "dense3", "relu3"]
        assert [piece.name for piece in get_pieces(network)] == names
        layers = [network.dense1, network.dense2, network.dense3]
        assert [tuple(one.weight.shape) for one in layers] == [(300, 64), (200, 300), (10, 200)]
        stds = [(2 / 64) ** 0.5, (2 / 300) ** 0.5, 0.01]
        assert [one.weight.std().item() for one in layers] == pytest.approx(stds, rel=0.05)
        assert [one.bias.unique().tolist() for one in layers] == [[0], [0], [1]]


def test_digits_are_learned(tmp_path):
    generate.write_digits(tmp_path)
    (images, labels), (tests, test_labels) = mnist.read(tmp_path, "train"), mnist.read(tmp_path, "test")
    values, expected = mnist.transform(images), torch.from_numpy(labels)
    torch.manual_seed(1)
    network = networks.mnist_net(bias=3.0)
    sgd = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(10):
        for numbers in torch.randperm(len(values)).split(32):
            nn.functional.cross_entropy(network(values[numbers]), expected[numbers]).backward()
            sgd.step()
            sgd.zero_grad()
    assert (network(mnist.transform(tests)).argmax(1).numpy() == test_labels).mean() >= 0.95
