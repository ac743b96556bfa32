"""Build scripts: the environment, the Horovod wheel, and later the images."""
