"""Photographs: cut from real footage, or read from a folder of the user's."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from forebay.bench import photos
from forebay.bench.photos import (
    Clip,
    ImageFolderError,
    PhotoDataset,
    PhotosUnavailable,
    UnreadableImageError,
    cut_corners,
    make_photos,
    random_box,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three noisy pictures, one of them grey, one deeper down."""
    noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    (tmp_path / "deep").mkdir()
    Image.fromarray(noise).save(tmp_path / "a.jpg")
    Image.fromarray(noise[:, :, 0]).save(tmp_path / "b.PNG")
    Image.fromarray(noise).save(tmp_path / "deep" / "c.jpeg")
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def test_images_are_found_at_any_depth_and_nothing_else(folder: Path) -> None:
    assert len(PhotoDataset(folder)) == 3


def test_an_item_is_pixels_and_quarter_turns(folder: Path) -> None:
    pixels, turns = PhotoDataset(folder, size_px=32)[0]
    assert (pixels.shape, pixels.dtype) == ((3, 32, 32), torch.float32)
    assert 0 <= turns < 4


def test_a_grey_picture_has_three_channels_too(folder: Path) -> None:
    assert PhotoDataset(folder, size_px=32)[1][0].shape == (3, 32, 32)


def test_the_global_generators_decide(folder: Path) -> None:
    dataset = PhotoDataset(folder, size_px=32)

    def draw() -> torch.Tensor:
        random.seed(5)
        torch.manual_seed(5)
        return dataset[0][0]

    assert torch.equal(draw(), draw())


def test_two_draws_differ(folder: Path) -> None:
    dataset = PhotoDataset(folder, size_px=32)
    assert not torch.equal(dataset[0][0], dataset[0][0])


def test_the_label_is_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ramp = np.tile(np.arange(0, 240, 2, dtype=np.uint8)[:, None, None], (1, 120, 3))
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    monkeypatch.setattr(photos, "random_box", lambda width, height: (0, 0, width, height))
    dataset = PhotoDataset(tmp_path, size_px=32)
    for _ in range(20):
        pixels, turns = dataset[0]
        upright = pixels.rot90(-turns, (1, 2))
        assert upright[0, 0].mean() < upright[0, -1].mean()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageFolderError, match=r"nowhere does not exist\. Name a folder"):
        PhotoDataset(tmp_path / "nowhere")


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ImageFolderError, match=r"a\.jpg is a file, not a folder"):
        PhotoDataset(folder / "a.jpg")


def test_a_folder_without_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageFolderError, match=r"holds no \.jpg, \.jpeg or \.png"):
        PhotoDataset(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no picture at all", b"\xff\xd8\xff\xe0 cut off"])
def test_a_file_that_is_no_picture_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.jpg").write_bytes(content)
    with pytest.raises(UnreadableImageError, match=r"broken\.jpg cannot be read as an image"):
        PhotoDataset(tmp_path)[0]


def test_a_picture_that_ends_early_is_named(folder: Path) -> None:
    whole = (folder / "a.jpg").read_bytes()
    (folder / "a.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableImageError, match=r"a\.jpg cannot be read"):
        PhotoDataset(folder)[0]


def test_boxes_lie_inside_the_picture() -> None:
    for _ in range(1000):
        left, top, right, bottom = random_box(50, 40)
        assert 0 <= left < right <= 50.001
        assert 0 <= top < bottom <= 40.001


@pytest.mark.parametrize(
    ("size", "corners"),
    [
        ((500, 375), [(0, 0)]),
        ((882, 375), [(191, 0)]),
        ((1280, 720), [(0, 172), (780, 172)]),
        ((1000, 750), [(0, 0), (500, 0), (0, 375), (500, 375)]),
    ],
)
def test_cuts_do_not_overlap_and_are_spread(
    size: tuple[int, int], corners: list[tuple[int, int]]
) -> None:
    assert cut_corners(*size) == corners


@pytest.fixture
def one_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut only the smallest clip: the real carrier and decoder, a tenth of the work."""
    pytest.importorskip("av", reason="needs the extra `demo` (av)")
    try:
        photos.find_clips()
    except PhotosUnavailable as unavailable:
        pytest.skip(str(unavailable))
    monkeypatch.setattr(photos, "CLIPS", (Clip("carphone_pristine.mp4", frames=120, every=40),))


def test_photographs_are_cut_from_real_footage(one_clip: None, tmp_path: Path) -> None:
    cut = sorted(make_photos(tmp_path).rglob("*.jpg"))
    assert len(cut) == 3
    with Image.open(cut[0]) as picture:
        assert picture.size == (500, 375)


def test_the_second_time_nothing_is_cut(one_clip: None, tmp_path: Path) -> None:
    first = make_photos(tmp_path)
    (first / "mark").touch()
    assert (make_photos(tmp_path) / "mark").exists()


def test_progress_ends_at_the_last_frame(one_clip: None, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_photos(tmp_path, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (120, 120)


def test_an_interrupted_cut_leaves_nothing(
    one_clip: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_photos(tmp_path, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_carrier_is_a_sentence_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "CARRIER", "no-such-package")
    with pytest.raises(PhotosUnavailable, match=r'pip install "forebay\[demo\]"'):
        photos.find_clips()


def test_the_cache_follows_the_users_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert photos.default_cache_dir() == tmp_path / "forebay"
