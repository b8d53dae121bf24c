"""Ray Train: ``ray_train.py FOLDER``. The workers set their ranks in themselves, and train in a thread."""

import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

JOBS = str(Path(__file__).resolve().parent)


def train_loop(config: dict[str, Any]) -> None:
    sys.path.insert(0, JOBS)
    import torch
    from ddp import train

    torch.set_num_threads(1)
    train(Path(config["folder"]))


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=True, configure_logging=False)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"folder": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
    )
    trainer.fit()
