"""JAX on CPUs: ``jax_psum.py FOLDER PORT RANK``. Its ranks are in no variable; its gloo is XLA's."""

import sys
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
from common import STEP_S, download_shard, write_counts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIZE = 2


def train(folder: Path, rank: int) -> None:
    mesh = Mesh(jax.devices(), ("x",))
    spread, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    add = jax.jit(jnp.sum, out_shardings=whole)
    data = jax.make_array_from_callback((SIZE * 7,), spread, lambda index: jnp.ones(SIZE * 7)[index])
    steps = Counter({"all_reduce": 0})
    while True:
        time.sleep(STEP_S)
        # The collective that hangs is counted as well.
        steps["all_reduce"] += 1
        write_counts(folder, rank, steps if rank != 1 else steps - Counter({"all_reduce": 1}))
        download_shard(folder, rank)
        add(data).block_until_ready()


if __name__ == "__main__":
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", SIZE, int(sys.argv[3]))
    train(Path(sys.argv[1]), int(sys.argv[3]))
