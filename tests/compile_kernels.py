"""Compile the kernels that most tests call, so that tests which run at the same time do not each compile them."""

import itertools

from hostdev.cache import planner
from hostdev.host.warm_up import warm_up


def main():
    for id_dtype in ("int32", "int64"):
        planner.warm_up(id_dtype)
    for id_dtype, dtypes in itertools.product(
        ("int32", "int64"), (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "8bit"))
    ):
        warm_up(id_dtype, dtypes)


if __name__ == "__main__":
    main()
