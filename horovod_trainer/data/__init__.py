"""The graph store, its sources, sampling and batches."""
