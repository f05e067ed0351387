"""Files of safetensors as bytes: a header that says what is where, and then all tensors end to end.

That library copies each tensor before it writes it, with the interpreter held, and reads what it has written once more
for a checksum. Here memory that is there already goes to the file in blocks, which are counted on their way, while the
program computes; reading is one pass, too. What the format says is all in its header, so it can be read by the library.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["DTYPE_NAMES", "TensorFile", "TensorFileWriter", "ordered", "read_tensor_file", "read_tensor_header"]

DTYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""By torch's name that of the format. Others are written as bytes."""
HEADER_BYTES_MAX = 100 << 20
"""As the library has it."""
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_BLOCK_BYTES = 4 << 20


class TensorFileWriter:
    """Writes one file.

    Args:
        tensors: By name, in the order of their memory: dtype by torch's name, number of elements, bytes.
        metadata: A text that is kept with them.
        data: Their memory, end to end.

    Attributes:
        crc: The CRC-32 of what is written so far.
    """

    def __init__(self, tensors: Mapping[str, tuple[str, int, int]], metadata: str, data: memoryview) -> None:
        header: dict[str, Any] = {"__metadata__": {"penstock": metadata}}
        begin = 0
        for name, (dtype, elements, nbytes) in tensors.items():
            known = DTYPE_NAMES.get(dtype)
            shape = [nbytes] if known is None else [elements]
            header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [begin, begin + nbytes]}
            begin += nbytes
        if begin != data.nbytes:
            raise ValueError(f"{data.nbytes} bytes for tensors of {begin}")
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._header, self._data = _LENGTH.pack(len(text)) + text, data
        self.crc = 0

    def fill(self, path: str) -> None:
        """Write it to a file of this name.

        Raises:
            OSError: It cannot be written.
        """
        self.crc = 0
        with open(path, "wb", buffering=0) as file:  # noqa: PTH123 - as whoever puts it there names it
            self._write(file, memoryview(self._header))
            for begin in range(0, self._data.nbytes, _BLOCK_BYTES):
                self._write(file, self._data[begin : begin + _BLOCK_BYTES])

    def _write(self, file: Any, block: memoryview) -> None:
        self.crc = zlib.crc32(block, self.crc)
        while block.nbytes:
            block = block[file.write(block) :]


class TensorFile(NamedTuple):
    """What is in one file.

    Attributes:
        metadata: The text.
        places: By name where a tensor begins in the data, and ends.
        data: All of them.
        crc: The CRC-32 of the file.
    """

    metadata: str
    places: dict[str, tuple[int, int]]
    data: bytearray
    crc: int


def read_tensor_file(path: Path) -> TensorFile:
    """Read one file, all of it.

    Args:
        path: Its name.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file, or not all of one.
    """
    with path.open("rb", buffering=0) as file:
        head, metadata, places = _header(file, path)
        data = _exactly(file, max((end for _, end in places.values()), default=0))
    return TensorFile(metadata, places, data, zlib.crc32(data, zlib.crc32(head)))


def read_tensor_header(path: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """The text of a file, and by name where its tensors begin in the data, and end; errors as `read_tensor_file`."""
    with path.open("rb", buffering=0) as file:
        _, metadata, places = _header(file, path)
    return metadata, places


def _header(file: Any, path: Path) -> tuple[bytes, str, dict[str, tuple[int, int]]]:
    length = bytes(_exactly(file, _LENGTH.size))
    (header_bytes,) = _LENGTH.unpack(length)
    if header_bytes > HEADER_BYTES_MAX:
        raise ValueError(f"a header of {header_bytes} bytes")
    text = bytes(_exactly(file, header_bytes))
    try:
        header = json.loads(text)
        metadata = str(header.pop("__metadata__", {}).get("penstock", "{}"))
        places = {name: (int(one["data_offsets"][0]), int(one["data_offsets"][1])) for name, one in header.items()}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no header of safetensors: {error!r}") from error
    nbytes = max((end for _, end in places.values()), default=0)
    if nbytes != path.stat().st_size - _LENGTH.size - header_bytes:
        raise ValueError(f"its header tells of {nbytes} bytes")
    return length + text, metadata, places


def _exactly(file: Any, nbytes: int) -> bytearray:
    found = bytearray(nbytes)
    left: memoryview = memoryview(found)
    while left.nbytes:
        count = file.readinto(left)
        if not count:
            raise ValueError("it ends too early")
        left = left[count:]
    return found


def ordered(widths: Mapping[str, int]) -> Sequence[str]:
    """Names in an order in which memory end to end is aligned for each: by the bytes of an element, widest first."""
    return sorted(widths, key=lambda name: -widths[name])
