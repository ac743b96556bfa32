"""Measurements that CI does not run."""
