"""The Trainer of Hugging Face: `penstock run` puts Penstock in the place of the DDP that it wraps the model in.

penstock run --nproc-per-node 2 examples/with_trainer.py
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    """Which of four numbers is the largest; any model of transformers is as good."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """What the Trainer asks of a model: the loss first."""
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


dist.init_process_group("gloo")  # before the Trainer, which takes the group that is there: "penstock" does, too
torch.manual_seed(0)
x = torch.randn(512, 16)
samples: Any = [{"x": row, "labels": row[:4].argmax()} for row in x]
model = Classifier()
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        optim="adamw_torch",
        learning_rate=0.01,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples)
    result = trainer.train()
if trainer.is_world_process_zero():
    print(f"loss {result.training_loss:.4f} after {result.global_step} steps")
    if sys.argv[1:]:
        torch.save(model.state_dict(), sys.argv[1])
dist.destroy_process_group()
