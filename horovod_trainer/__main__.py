"""`python -m horovod_trainer`."""

from horovod_trainer.cli import main

main()
