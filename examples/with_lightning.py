"""Lightning's Trainer with Penstock in DDP's place: one argument of it.

torchrun --nproc-per-node 2 examples/with_lightning.py     # or plainly: the Trainer starts the other worker
"""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from penstock.integrations.lightning import PenstockStrategy


class Classifier(L.LightningModule):
    """Which of four numbers is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Lightning calls it for each batch."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Penstock finds it at its first step."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


L.seed_everything(0)
x = torch.randn(512, 16)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=32)
model = Classifier()
trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=PenstockStrategy(),
    max_epochs=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, loader)  # each worker has its share of the samples
if trainer.is_global_zero:
    print(f"loss {float(trainer.callback_metrics['loss']):.4f}; {ps.report()['bytes_sent']} bytes sent")
    if sys.argv[1:]:
        torch.save(model.net.state_dict(), sys.argv[1])
