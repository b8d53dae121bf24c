"""A rank of JAX on GPU 0: sums over all processes, which XLA does by NCCL. Its truth: how often it called the sum."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

# Two processes share the GPU, and a command buffer would hide operations in a graph.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")

from lines import here_is_no, serve

try:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
except ImportError as e:
    here_is_no(f"jax: {e}")


class Rank:
    """Everything that the commands work on."""

    def init(self) -> dict[str, Any]:
        self.rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        jax.distributed.initialize(
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", size, self.rank, local_device_ids=[0]
        )
        mesh = jax.make_mesh((size,), ("ranks",))
        self.sharding = NamedSharding(mesh, PartitionSpec("ranks"))
        whole = NamedSharding(mesh, PartitionSpec())
        self.sum = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)
        return {"jax": jax.__version__, "devices": len(jax.devices())}

    def warm(self) -> dict[str, Any]:
        self._sums(1, 1)
        return {}

    def burst(self, times: str, count: str) -> dict[str, Any]:
        """Sums ``count`` numbers of each rank so many times, compiled before."""
        self._sums(1, int(count))
        begun = time.time_ns()
        self._sums(int(times), int(count))
        made = [{"op": "all_reduce", "count": int(count), "root": None, "peer": None}] * int(times)
        return {"begun": begun, "calls": made}

    def _sums(self, times: int, count: int) -> None:
        local = jnp.ones((1, count), dtype=jnp.float32)
        data = jax.make_array_from_process_local_data(self.sharding, local)
        for _ in range(times):
            self.sum(data).block_until_ready()


def main() -> None:
    if not any(Path("/dev").glob("nvidia*")):
        here_is_no("there is no device file of an NVIDIA GPU")
    rank = Rank()
    serve({name: getattr(rank, name) for name in ("init", "warm", "burst")})


if __name__ == "__main__":
    main()
