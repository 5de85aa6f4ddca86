"""A model of training on many GPUs: docs/scaling.md."""
