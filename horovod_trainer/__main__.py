"""`python -m horovod_trainer`."""

try:
    from horovod_trainer.cli import entry

    entry()
except KeyboardInterrupt:  # while the first modules were loading
    raise SystemExit(130) from None
