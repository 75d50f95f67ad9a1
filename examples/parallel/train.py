"""Train the networks of the parallel examples, in one process or in the processes that a launcher started.

    python examples/parallel/train.py mnist DIR
    torchrun --nproc-per-node 2 examples/parallel/train.py resnet50 DIR --width 8 --parallel semi --plan fc=colwise

README.md lists the modes.
"""

import hostdev.core.environment  # isort: skip

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import hostdev
from hostdev.core import cli
from hostdev.distributed.world import SCHEDULES
from hostdev.runtime.digest import state_sha256

sys.path.insert(0, str(Path(__file__).parent))
import cifar10
import mnist
from by_hand import slice_by_hand
from networks import mnist_net, resnet50

PARALLEL = ("none", "data", "hybrid", "semi", "auto")
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Task(NamedTuple):
    """A network, and functions that read and transform its images."""

    network: nn.Module
    last: str  # name of the last layer, which --parallel hybrid slices
    read: Any
    transform: Any  # images [n, ...], numbers, epoch, train -> float32 [n, ...]


def task_of(options: Any) -> Task:
    """Return the network that the options name, and its images."""
    torch.manual_seed(options.seed)
    if options.network == "mnist":
        network = mnist_net(options.hidden, bias=options.bias)
        last = [name for name, one in network.named_modules() if isinstance(one, nn.Linear)][-1]
        return Task(network, last, mnist.read, lambda images, *_: mnist.transform(images))

    def transform(images: Any, numbers: Numbers, epoch: int, train: bool) -> Tensor:
        how = {"seed": options.seed, "epoch": epoch, "train": train, "size": options.image_size}
        return cifar10.transform(images, numbers, **how)

    made = resnet50(options.width, blocks=tuple(options.blocks), small_images=options.image_size <= 64)
    return Task(made, "fc", cifar10.read, transform)


def batches(count: int, size: int, seed: int, epoch: int) -> Iterator[Numbers]:
    """Yield the numbers of each batch's samples, shuffled anew in each epoch; the last batch may be smaller."""
    order = np.random.default_rng([seed, epoch]).permutation(count)
    for start in range(0, count, size):
        yield order[start : start + size]


def parse_mesh(options: Any, world: int) -> str | None:
    """Set `options.parallel` and return the mesh; UserError if options contradict each other."""
    parallel = options.parallel or ("none" if world == 1 else "semi" if options.mesh or options.plan else "data")
    axis = {"none": None, "data": "data", "hybrid": "model", "semi": "model", "auto": None}[parallel]
    if parallel == "none" and world > 1:
        raise hostdev.UserError(f"--parallel none is for one process, and {world} were started")
    if parallel == "none" and options.mesh:
        raise hostdev.UserError("--mesh has no effect with --parallel none; leave one of them out")
    if parallel == "data" and (options.plan or (options.mesh and ("model" in options.mesh or "pipe" in options.mesh))):
        raise hostdev.UserError(
            "--parallel data splits only samples; omit --plan and other axes of --mesh, or use semi"
        )
    if parallel == "hybrid" and options.plan:
        raise hostdev.UserError("--parallel hybrid slices by hand; omit --plan, or use semi")
    options.parallel = parallel
    return options.mesh or (f"{axis}={world}" if axis and world > 1 else None)


def train(options: Any) -> None:
    """Train, and print the losses, the accuracy and the digest of the final state."""
    from hostdev.distributed.rank_environment import find_rank_environment

    with hostdev.join(parse_mesh(options, find_rank_environment().ranks), timeout=options.timeout) as ranks:
        say = print if ranks is None or ranks.rank == 0 else (lambda *_, **__: None)
        torch.set_num_threads(options.threads)
        task = task_of(options)
        if options.parallel == "hybrid":
            slice_by_hand(task.network, task.last)
        images, labels = task.read(options.folder, "train")
        tests = task.read(options.folder, "test")
        first = np.arange(1)
        network = hostdev.parallel.Network(
            task.network,
            (task.transform(images[:1], first, 0, True),),
            ranks=ranks,
            seed=options.seed,
            micro_batches=options.micro_batches,
            gradients=options.gradients,
            schedule=options.schedule,
            stage_cut=options.stage_cut,
            plan=options.plan,
            auto=options.batch_size if options.parallel == "auto" else None,
        )
        if network.choice is not None:
            say("\n".join(network.choice.lines()))
        say(network.describe() or "the whole network on each process", flush=True)
        sgd = torch.optim.SGD(network.parameters, lr=options.lr, momentum=options.momentum)
        steps = 0
        for epoch in range(options.epochs):
            for step, numbers in enumerate(batches(len(images), options.batch_size, options.seed, epoch)):
                if options.max_steps is not None and steps >= options.max_steps:
                    break

                def inputs(part: slice, numbers: Numbers = numbers, epoch: int = epoch) -> tuple[Tensor]:
                    return (task.transform(images[numbers[part]], numbers[part], epoch, True),)

                def loss(output: Tensor, part: slice, numbers: Numbers = numbers) -> Tensor:
                    return nn.functional.cross_entropy(output, torch.from_numpy(labels[numbers[part]]))

                value = network.step(len(numbers), inputs, loss)
                sgd.step()
                sgd.zero_grad()
                if step % options.print_every == 0:
                    say(f"epoch: {epoch}, step: {step}, loss is {value:.7g}", flush=True)
                steps += 1
        say(f"accuracy {accuracy(network, task, *tests, options):.4f} on {len(tests[1]):,} test images")
        state = network.state(sgd)
        if ranks is None or ranks.rank == 0:
            say(f"state_sha256 {state_sha256([], state)}", flush=True)


def accuracy(network: hostdev.parallel.Network, task: Task, images: Any, labels: Numbers, options: Any) -> float:
    """Return the share of images for which the network's most likely class is the label."""
    right, size = 0.0, max(options.batch_size, 8 * options.micro_batches)
    for start in range(0, len(labels), size):
        numbers = np.arange(start, min(start + size, len(labels)))

        def inputs(part: slice, numbers: Numbers = numbers) -> tuple[Tensor]:
            return (task.transform(images[numbers[part]], numbers[part], 0, False),)

        def count(output: Tensor, part: slice, numbers: Numbers = numbers) -> Tensor:
            return (output.argmax(1) == torch.from_numpy(labels[numbers[part]])).sum()

        [found] = network.evaluate(len(numbers), inputs, count)
        right += found
    return right / len(labels)


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = cli.parser("train.py", "train the networks of the parallel examples")
    parser.add_argument("network", choices=("resnet50", "mnist"))
    parser.add_argument("folder", type=Path, help="folder of CIFAR-10's binary files, or of MNIST's")
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="how processes split the work (default: data, or semi with --mesh or --plan)",
    )
    parser.add_argument("--mesh", help="ranks along each axis, such as data=2,pipe=2")
    parser.add_argument("--plan", help="strategies of layers, such as fc=colwise")
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--stage-cut", help="first pieces of the second and later stages, such as layer3.0")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--gradients", choices=("mean", "sum"), default="mean")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, help="default: 0.9 for resnet50, 0 for mnist")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; some bits depend on their number")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one process waits for another")
    parser.add_argument("--width", type=int, default=64, help="width of ResNet-50's first blocks")
    parser.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3), help="blocks of ResNet-50's four layers")
    parser.add_argument("--image-size", type=int, default=32, help="size to which ResNet-50's images are enlarged")
    parser.add_argument("--hidden", type=int, nargs="*", default=(), help="widths of the MNIST net's hidden layers")
    parser.add_argument("--bias", type=float, default=3.0, help="initial bias of the MNIST net's last layer")
    options = parser.parse_args(arguments)
    if options.momentum is None:
        options.momentum = 0.9 if options.network == "resnet50" else 0.0
    train(options)


if __name__ == "__main__":
    sys.exit(cli.run("train.py", main))
