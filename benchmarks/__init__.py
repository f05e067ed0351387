"""What Penstock costs and gains, measured on one machine. Run as modules: ``python -m benchmarks.wire``."""
