"""Images by class and Parquet files are read alike; what cannot be used is named."""

import io

import numpy as np
import pytest

from penstock.demo import data
from penstock.demo.failures import DataError

Image = pytest.importorskip("PIL.Image")


def picture(seed, edge=12):
    """As smooth as pictures are: in noise rounding decides now and then which neighbour is the largest."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((edge, edge), Image.Resampling.BICUBIC)


def encoded(seed, edge=12):
    buffer = io.BytesIO()
    picture(seed, edge).save(buffer, "png")
    return buffer.getvalue()


def write_folders(root, split, count, classes=("cat", "dog")):
    for index in range(count):
        folder = root / split / classes[index % len(classes)]
        folder.mkdir(parents=True, exist_ok=True)
        picture(index).save(folder / f"{index:03}.png")


def write_parquet(path, labels, edge=12):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"bytes": encoded(index, edge), "path": f"{index}.png"} for index in range(len(labels))]
    pq.write_table(pa.table({"img": rows, "label": labels}), path)


def test_digits_are_split_the_same_way_every_time():
    first, second = data.load("digits"), data.load("digits")
    assert first.train_x.shape == (1152, 1, 8, 8)
    assert first.test_x.shape == (645, 1, 8, 8)
    assert (first.train_x == second.train_x).all()
    assert set(first.test_y) == set(range(10))
    assert first.train_x.max() == first.white == 16


def test_a_dataset_survives_its_file(tmp_path):
    before = data.load("digits")
    before.save(tmp_path / "data.npz")
    after = data.Dataset.load(tmp_path / "data.npz")
    assert (before.train_x == after.train_x).all()
    assert (before.test_y == after.test_y).all()
    assert (before.white, before.class_count) == (after.white, after.class_count)


def test_folders_of_images(tmp_path):
    write_folders(tmp_path, "train", 10)
    write_folders(tmp_path, "test", 4)
    loaded = data.load(str(tmp_path))
    assert loaded.train_x.shape == (10, 3, 12, 12)
    assert list(loaded.train_y) == [0] * 5 + [1] * 5
    assert (loaded.train_x[0].transpose(1, 2, 0) == np.asarray(picture(0))).all()
    assert len(loaded.test_y) == 4


def test_a_fifth_is_held_out_where_no_test_folder_is(tmp_path):
    write_folders(tmp_path, "train", 20)
    loaded = data.load(str(tmp_path))
    assert (len(loaded.train_y), len(loaded.test_y)) == (16, 4)


def test_parquet(tmp_path):
    write_parquet(tmp_path / "train-0.parquet", [3, 10, 3, 10])
    write_parquet(tmp_path / "test-0.parquet", [10, 10])
    loaded = data.load(str(tmp_path))
    assert list(loaded.train_y) == [0, 1, 0, 1]  # in the order of the numbers, not of their digits
    assert list(loaded.test_y) == [1, 1]


def test_large_images_are_scaled_down(tmp_path):
    write_parquet(tmp_path / "train-0.parquet", [0, 1] * 5, edge=80)
    assert data.load(str(tmp_path)).train_x.shape[1:] == (3, 32, 32)


def no_such_directory(path):
    return path / "nowhere", "no such directory"


def empty_directory(path):
    return path, r"neither train-\*\.parquet nor train/"


def no_images(path):
    (path / "train" / "cat").mkdir(parents=True)
    return path, "no images for train"


def one_class(path):
    write_folders(path, "train", 6, classes=("cat",))
    return path, "at least two classes"


def broken_image(path):
    write_folders(path, "train", 4)
    (path / "train" / "cat" / "000.png").write_bytes(b"not a picture")
    return path, r"000\.png: not an image"


def class_only_in_test(path):
    write_folders(path, "train", 4)
    write_folders(path, "test", 2, classes=("fox",))
    return path, "class fox is in test but not in train"


def broken_parquet(path):
    (path / "train-0.parquet").write_bytes(b"not a table")
    return path, "not a readable Parquet file"


def tiny_images(path):
    write_parquet(path / "train-0.parquet", [0, 1], edge=2)
    return path, "too small"


def other_columns(path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": [b"x"], "label": [1]}), path / "train-0.parquet")
    return path, r"no column img; needs img\{bytes,path\} and label"


@pytest.mark.parametrize(
    "case",
    [
        no_such_directory,
        empty_directory,
        no_images,
        one_class,
        broken_image,
        class_only_in_test,
        broken_parquet,
        tiny_images,
        other_columns,
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, case):
    path, message = case(tmp_path)
    with pytest.raises(DataError, match=message):
        data.load(str(path))
