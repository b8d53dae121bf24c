"""Lightning, which starts the other ranks itself: ``lightning_fit.py FOLDER``. Rank 0 sets its variables in itself."""

import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from common import STEP_S, count_when_asked, download_shard

FOLDER = Path(sys.argv[1])


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(23, 7)

    def on_fit_start(self) -> None:
        count_when_asked(FOLDER, self.global_rank)

    def training_step(self, batch: Any, _: int) -> Any:
        time.sleep(STEP_S)
        download_shard(FOLDER, self.global_rank)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    batches = torch.utils.data.DataLoader(torch.ones(1_000_000, 23), batch_size=5)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1000, **quiet)
    trainer.fit(Model(), batches)
