"""Images and labels as arrays.

``digits`` are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. A directory holds either image files by class
or Parquet files::

    DIR/train/<class>/*.png    DIR/test/<class>/*.png
    DIR/train-*.parquet        DIR/test-*.parquet      columns img{bytes,path} and label

This module imports no torch: the launcher reads the data once, and hands it to its processes as one NumPy archive.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.demo.failures import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Pixels: TypeAlias = NDArray[np.uint8]
    Labels: TypeAlias = NDArray[np.int64]

DIGITS_TRAIN_COUNT = 1152
"""18 batches of 64; the other 645 digits are held out."""

IMAGE_EDGE_MAX = 32
"""Pixels. Larger images are scaled down, so that the demo stays one of seconds."""

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}


@dataclass(frozen=True)
class Dataset:
    """Pixels are uint8 of shape (count, channels, height, width); labels int64, below ``class_count``."""

    train_x: Pixels
    train_y: Labels
    test_x: Pixels
    test_y: Labels
    white: int
    """The largest value that a pixel can have."""
    class_count: int

    def save(self, path: Path) -> None:
        """Write a NumPy archive."""
        import numpy as np

        np.savez(
            path,
            train_x=self.train_x,
            train_y=self.train_y,
            test_x=self.test_x,
            test_y=self.test_y,
            white=np.int64(self.white),
            class_count=np.int64(self.class_count),
        )

    @staticmethod
    def load(path: Path) -> Dataset:
        """Read what ``save`` wrote."""
        import numpy as np

        with np.load(path, allow_pickle=False) as archive:
            return Dataset(
                train_x=archive["train_x"],
                train_y=archive["train_y"],
                test_x=archive["test_x"],
                test_y=archive["test_y"],
                white=int(archive["white"]),
                class_count=int(archive["class_count"]),
            )


def load(source: str) -> Dataset:
    """The dataset that ``--data`` names.

    Raises:
        DataError: nothing usable there, or a package that reads it is missing; the message says what to do.
    """
    if importlib.util.find_spec("numpy") is None:
        raise DataError("the demo needs NumPy, which the package itself does not: pip install 'penstock[demo]'")
    if source == "digits":
        return _digits()
    directory = Path(source)
    if not directory.is_dir():
        raise DataError(f"--data {source}: no such directory (give a directory, or the word digits)")
    if any(directory.glob("train*.parquet")):
        return _from_samples(directory, _parquet_samples)
    if (directory / "train").is_dir():
        return _from_samples(directory, _file_samples)
    raise DataError(f"--data {source}: neither train-*.parquet nor train/<class>/*.png in this directory")


def _digits() -> Dataset:
    import numpy as np

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn: pip install 'penstock[demo]'") from None
    bunch: Any = load_digits()
    # The file is ordered by writer; a fixed shuffle gives both parts every hand. It does not depend on --seed.
    order = np.random.default_rng(1797).permutation(len(bunch.target))
    x = bunch.images[order].astype(np.uint8)[:, None]
    y = bunch.target[order].astype(np.int64)
    cut = DIGITS_TRAIN_COUNT
    return Dataset(x[:cut], y[:cut], x[cut:], y[cut:], white=16, class_count=10)


def _from_samples(directory: Path, samples: Any) -> Dataset:
    import numpy as np

    train, edge, names = _decoded(directory, "train", samples, None)
    train_x, train_y = train
    try:
        (test_x, test_y), _, test_names = _decoded(directory, "test", samples, edge)
        unknown = set(test_names) - set(names)
        if unknown:
            raise DataError(f"{directory}: class {min(unknown)} is in test but not in train")
        place = np.array([names.index(name) for name in test_names])
        test_y = place[test_y]
    except FileNotFoundError:
        # A fixed fifth is held out.
        order = np.random.default_rng(5).permutation(len(train_y))
        held_out, kept = order[: len(order) // 5], order[len(order) // 5 :]
        test_x, test_y = train_x[held_out], train_y[held_out]
        train_x, train_y = train_x[kept], train_y[kept]
    if len(test_y) == 0 or len(names) < 2:
        raise DataError(f"{directory}: needs at least two classes and some held-out images")
    return Dataset(train_x, train_y, test_x, test_y, white=255, class_count=len(names))


def _decoded(
    directory: Path, split: str, samples: Any, edge: tuple[int, int] | None
) -> tuple[tuple[Pixels, Labels], tuple[int, int], list[str]]:
    """All images of a split in one array; their (width, height); the classes' names in order."""
    import numpy as np

    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("images are read with Pillow: pip install 'penstock[demo]'") from None
    pixels: list[Any] = []
    classes: list[str] = []
    for where, content, name in samples(directory, split):
        try:
            with Image.open(io.BytesIO(content)) as image:
                if edge is None:
                    edge = (min(image.width, IMAGE_EDGE_MAX), min(image.height, IMAGE_EDGE_MAX))
                colour = image.convert("RGB")
                pixels.append(np.asarray(colour if colour.size == edge else colour.resize(edge)))
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"{where}: not an image that Pillow reads ({error})") from None
        classes.append(name)
    if not pixels or edge is None:
        raise DataError(f"{directory}: no images for {split}")
    if min(edge) < 4:
        raise DataError(f"{directory}: images of {edge[0]} x {edge[1]} pixels are too small, at least 4 x 4 are needed")
    names = sorted(set(classes), key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    place = {name: index for index, name in enumerate(names)}
    x = np.stack(pixels).transpose(0, 3, 1, 2)
    return (np.ascontiguousarray(x), np.array([place[name] for name in classes], dtype=np.int64)), edge, names


def _file_samples(directory: Path, split: str) -> Iterator[tuple[str, bytes, str]]:
    root = directory / split
    if not root.is_dir():
        raise FileNotFoundError(root)
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        for file in sorted(folder.iterdir()):
            if file.suffix.lower() in SUFFIXES:
                yield str(file), file.read_bytes(), folder.name


def _parquet_samples(directory: Path, split: str) -> Iterator[tuple[str, bytes, str]]:
    files = sorted(directory.glob(f"{split}*.parquet"))
    if not files:
        raise FileNotFoundError(directory / f"{split}*.parquet")
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError("Parquet files are read with pyarrow: pip install 'penstock[demo]'") from None
    for file in files:
        try:
            missing = {"img", "label"} - set(pq.read_schema(file).names)
            if missing:
                raise DataError(f"{file}: no column {min(missing)}; needs img{{bytes,path}} and label")
            table = pq.read_table(file, columns=["img", "label"])
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable Parquet file ({error})") from None
        rows: Iterable[Any] = zip(table.column("img").to_pylist(), table.column("label").to_pylist(), strict=True)
        for index, (image, label) in enumerate(rows):
            if not isinstance(image, dict) or not isinstance(image.get("bytes"), bytes):
                raise DataError(f"{file}: row {index} has no image bytes in column img")
            yield f"{file}, row {index}", image["bytes"], str(label)
