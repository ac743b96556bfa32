"""Reading files that torch.save wrote, without trusting them: OGB's splits (dictionaries of numpy arrays)."""

from __future__ import annotations

import pickle
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray

from horovod_trainer.data.unpickle import FOREIGN, load_pickle
from horovod_trainer.errors import InvalidInput, Problem

_NUMBERS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
# the functions are private to numpy, but they are what every pickled array names, by its old or new module
_NUMPY: list[Any] = [
    (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
    (multiarray._reconstruct, "numpy._core.multiarray._reconstruct"),
    (multiarray.scalar, "numpy.core.multiarray.scalar"),
    (multiarray.scalar, "numpy._core.multiarray.scalar"),
    np.ndarray, np.dtype, *(type(np.dtype(name)) for name in _NUMBERS),
]  # fmt: skip
_one_at_a_time = threading.Lock()
_CONTAINER = "data.pkl"  # of the zip format; before torch 1.6 the pickles lay in the file as such


def load_torch_file(file: Path, also: tuple[Any, ...] = ()) -> Any:
    """Return what is in a torch.save file of tensors, numpy arrays of numbers and plain containers.

    Without tensors in it our own allow-list reads it, in a third of torch's memory. Else torch.load(weights_only=
    True) does, with numpy (and the classes in `also`) allowed; it knows pickle protocols up to 3. Raises InvalidInput
    for anything else in the file, before it is called.
    """
    try:
        try:
            return _numpy_only(file)
        except InvalidInput:
            if _protocol(file) >= 4:
                raise
        import torch  # a second and a half that most files do not need

        # both contexts change what the whole process sees
        with _one_at_a_time, torch.serialization.safe_globals([*_NUMPY, *also]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the format's age; what matters is raised
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as failure:
        raise InvalidInput(Problem(str(file), f"refused: {_reason(failure)}")) from None
    except (*FOREIGN, RuntimeError, OSError, zipfile.BadZipFile) as failure:
        if isinstance(failure, OSError) and failure.errno:  # the disk's fault, not the file's
            raise
        raise InvalidInput(Problem(str(file), f"not a readable torch file: {_reason(failure)}")) from None


def _reason(failure: Exception) -> str:
    """Return torch's reason without its advice to load the file unsafely."""
    text = str(failure).rpartition("WeightsUnpickler error:")[2].strip()
    return text.split(". Please use", 1)[0].splitlines()[0] if text else type(failure).__name__


def _protocol(file: Path) -> int:
    """Return the pickle protocol of a torch file's first pickle."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as box, box.open(_pickle_in(box)) as stream:
            head = stream.read(2)
    else:
        with file.open("rb") as stream:
            head = stream.read(2)
    return head[1] if len(head) == 2 and head[:1] == pickle.PROTO else 0


def _numpy_only(file: Path) -> Any:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as box, box.open(_pickle_in(box)) as stream:
            content = load_pickle(str(file), stream, large=True)
            stream.read()  # at its end the checksum is compared
            return content
    with file.open("rb") as stream:
        for _ in ("magic number", "protocol", "system"):
            load_pickle(str(file), stream)
        return load_pickle(str(file), stream, large=True)


def _pickle_in(box: zipfile.ZipFile) -> str:
    names = [name for name in box.namelist() if name.rpartition("/")[2] == _CONTAINER]
    if len(names) != 1:
        raise pickle.UnpicklingError(f"not one {_CONTAINER} in it")
    return names[0]
