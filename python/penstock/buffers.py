"""What memory is behind an object: torch tensors, NumPy arrays, buffers, and whatever exports DLPack.

No framework is imported: whoever passes a tensor has imported its own.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock.errors import ConfigError

__all__ = ["DTYPES", "Buffer", "view"]

# By the engine's name: the bytes of an element.
DTYPES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1}

_TORCH_DTYPES = {
    "torch.float32": "f32",
    "torch.float64": "f64",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.int16": "i16",
    "torch.int8": "i8",
    "torch.uint8": "u8",
}
_TYPE_STRINGS = {
    "<f4": "f32",
    "<f8": "f64",
    "<f2": "f16",
    "<i8": "i64",
    "<i4": "i32",
    "<i2": "i16",
    "|i1": "i8",
    "|u1": "u8",
}
_FORMATS = {"f": "f32", "d": "f64", "e": "f16", "q": "i64", "l": "i64", "i": "i32", "h": "i16", "b": "i8", "B": "u8"}


@dataclass(slots=True)
class Buffer:
    """Contiguous memory.

    Attributes:
        address: Where it starts.
        nbytes: Its length.
        dtype: The engine's name for its elements; ``bytes`` for what can be moved and not summed.
        name: The dtype as its owner calls it, for messages.
        keep: What keeps it allocated.
        on_device: The same bytes as a flat tensor of an accelerator, whose address it is; none: in main memory.
    """

    address: int
    nbytes: int
    dtype: str
    name: str
    keep: object
    on_device: Any = None

    def part(self, begin: int, nbytes: int) -> Buffer:
        """Some of its bytes."""
        there = None if self.on_device is None else self.on_device[begin : begin + nbytes]
        return Buffer(self.address + begin, nbytes, self.dtype, self.name, self.keep, there)


def _refuse(caller: str, what: str) -> ConfigError:
    return ConfigError(f"penstock.{caller}: {what}")


def view(value: Any, caller: str, *, written: bool, on_device: bool = False) -> Buffer:
    """The memory behind a tensor, an array or a buffer.

    What is written must be the object's own memory, or the result would be lost without a word: values that only look
    like arrays, such as ``numpy.float32(1)``, and copies are refused. They may be given where they are only read.

    Args:
        value: A torch tensor in main memory, a NumPy array, an object with the buffer protocol, one with DLPack, or
            what this has returned.
        caller: The public function, for messages.
        written: Whether the result goes there.
        on_device: Whether a torch tensor may be on an accelerator.

    Raises:
        ConfigError: It is none of these, not contiguous, not in main memory, or to be written and read-only or a copy.
    """
    if isinstance(value, Buffer):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value, caller, on_device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _of_array(value, caller, written)
    if numpy is not None and isinstance(value, numpy.generic):
        return _of_array(_constant(value, caller, written), caller, written)
    try:
        exported = memoryview(value)
    except TypeError:
        pass
    else:
        return _of_memory(value, exported, caller, written)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(value, caller, written)
    if hasattr(value, "__array_interface__"):
        return _of_array(_constant(value, caller, written), caller, written)
    raise _refuse(
        caller,
        f"a {type(value).__name__} is no memory; give a torch tensor, a NumPy array, or anything with the buffer "
        "protocol or DLPack",
    )


def _of_tensor(tensor: Any, caller: str, on_device: bool) -> Buffer:
    in_main_memory = tensor.device.type == "cpu"
    if not in_main_memory and (not on_device or tensor.device.type == "meta"):
        raise _refuse(caller, f"the tensor is on {tensor.device}; only main memory can be sent, call .cpu()")
    if str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
        raise _refuse(caller, "the tensor is not contiguous; call .contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise _refuse(
            caller,
            "the tensor is a conjugated or negated view, whose memory holds other values; call "
            ".resolve_conj().resolve_neg()",
        )
    name, nbytes = str(tensor.dtype), tensor.numel() * tensor.element_size()
    address = tensor.data_ptr()
    if nbytes and not address:
        raise _refuse(caller, f"the {type(tensor).__name__} has no memory of its own; give the tensor that it wraps")
    # Its `data`: what is written counts as no change, as in main memory.
    there = None if in_main_memory else tensor.data.view(-1).view(sys.modules["torch"].uint8)
    return Buffer(address, nbytes, _TORCH_DTYPES.get(name, "bytes"), name, tensor, there)


def _constant(value: Any, caller: str, written: bool) -> Any:
    """A copy, to be read, of what has no memory that others can write: NumPy makes an array each time it is asked.

    ``__array_interface__`` says where an array is and not whose: a result that is written there may be nobody's.
    """
    kind = type(value).__name__
    if written:
        raise _refuse(
            caller,
            f"the result is to be written, and a {kind} gives away a copy of its value, or memory of which nobody "
            "knows whose it is; keep an array, array = numpy.asarray(value), and give that",
        )
    try:
        import numpy
    except ImportError as error:
        raise _refuse(caller, f"reading the array of a {kind} takes NumPy, which is missing") from error
    return numpy.array(value)


def _of_array(array: Any, caller: str, written: bool) -> Buffer:
    if not array.flags.c_contiguous:
        raise _refuse(caller, "the array is not contiguous; call numpy.ascontiguousarray")
    if written and not array.flags.writeable:
        raise _refuse(caller, "the array is read-only, and the result is to be written to it")
    dtype, name = _array_dtype(array.dtype)
    if array.dtype.hasobject:
        raise _refuse(caller, "the array holds Python objects, which cannot be sent")
    return Buffer(int(array.ctypes.data), int(array.nbytes), dtype, name, array)


@lru_cache
def _array_dtype(dtype: Any) -> tuple[str, str]:
    """The engine's name of NumPy's dtype, and NumPy's, which takes it longer to find than all else here."""
    return _TYPE_STRINGS.get(str(dtype.str), "bytes"), str(dtype)


def _of_memory(value: Any, exported: memoryview, caller: str, written: bool) -> Buffer:
    if not exported.c_contiguous:
        raise _refuse(caller, "the memory is not contiguous")
    dtype = _FORMATS.get(exported.format.lstrip("@=<"), "bytes")
    if DTYPES.get(dtype, exported.itemsize) != exported.itemsize:
        dtype = "bytes"
    if not exported.readonly:
        start = (ctypes.c_char * exported.nbytes).from_buffer(exported)  # keeps the export alive
        return Buffer(ctypes.addressof(start), exported.nbytes, dtype, exported.format, (value, start))
    if written:
        raise _refuse(caller, f"a {type(value).__name__} is read-only, and the result is to be written to it")
    constant = bytes(exported)
    address = ctypes.cast(ctypes.c_char_p(constant), ctypes.c_void_p).value or 0
    return Buffer(address, len(constant), dtype, exported.format, constant)


def _of_dlpack(value: Any, caller: str, written: bool) -> Buffer:
    try:
        import numpy
    except ImportError as error:
        raise _refuse(
            caller, f"reading the DLPack of a {type(value).__name__} takes NumPy, which is missing"
        ) from error
    try:
        try:
            array = numpy.from_dlpack(value, copy=False)  # a copy would keep the result for itself
        except TypeError:  # NumPy or the object knows nothing of copies, and makes none
            array = numpy.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _refuse(caller, f"the DLPack of a {type(value).__name__} cannot be used: {error}") from error
    if not array.flags.c_contiguous:
        raise _refuse(caller, "the memory is not contiguous")
    return _of_array(array, caller, written)
