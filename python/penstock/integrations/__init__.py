"""What frameworks are told so that they train with Penstock. Each module needs its framework, and nothing imports it.

Accelerate and the Trainer of Hugging Face need none: docs/integrations.md says how they are started.

lightning  `PenstockStrategy` for Lightning's Trainer
ray        `PenstockConfig` for Ray Train's TorchTrainer
fsdp       FSDP2: averages over the replicate dimension of HSDP
"""
