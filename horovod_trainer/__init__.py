"""Data-parallel GraphSAGE link prediction on Horovod."""

__version__ = "0.1.0"
