"""Images and videos in the forms that data sets have them in, and the broken ones."""

import io

import numpy as np
import pytest
from helpers.tiny_vision import tiny_image
from PIL import Image

from pl_grouprl.media.rows import as_list, check_image, check_video, read_image, read_video


@pytest.fixture
def png(tmp_path):
    path = tmp_path / "image.png"
    tiny_image(0).save(path)
    return path


def test_every_form_is_the_same_image(png):
    expected = np.asarray(tiny_image(0))
    data = png.read_bytes()
    columns = [
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(png)},
        {"bytes": data, "path": "elsewhere.png"},
    ]
    for form in [tiny_image(0), str(png), png, f"file://{png}", data, *columns, {"image": str(png)}]:
        check_image(form)
        assert np.array_equal(np.asarray(read_image(form)), expected)


def test_images_are_turned_upright_and_have_three_colours():
    rotated = Image.new("L", (4, 2), 7)
    exif = rotated.getexif()
    exif[0x0112] = 6  # the camera was held upright
    stream = io.BytesIO()
    rotated.save(stream, "jpeg", exif=exif)
    image = read_image(stream.getvalue())
    assert (image.mode, image.size) == ("RGB", (2, 4))


def test_one_image_is_a_list_of_one():
    assert as_list(None) == []
    assert as_list("x.png") == ["x.png"]
    assert as_list({"bytes": b""}) == [{"bytes": b""}]
    assert as_list(("x", "y")) == ["x", "y"]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("missing.png", "missing.png"),
        (b"no image", "cannot be read"),
        ({"bytes": None}, "'bytes'"),
        (3, "cannot be read"),
        ("https://example.com/x.png", "another machine"),
    ],
)
def test_what_is_no_image_is_refused_without_decoding(image, message):
    for function in (check_image, read_image):
        with pytest.raises(ValueError, match=message):
            function(image)


def test_a_cut_off_image_is_refused(png):
    cut = png.read_bytes()[:-40]
    for function in (check_image, read_image):
        with pytest.raises(ValueError, match="cannot be read"):
            function(cut)


def test_videos_are_frames_arrays_or_files(png):
    for form in ([str(png), tiny_image(1)], {"video": [str(png), tiny_image(1)]}):
        check_video(form)
        assert [frame.size for frame in read_video(form)] == [(16, 16), (16, 16)]
    array = np.zeros((2, 4, 4, 3), np.uint8)
    check_video(array)
    assert read_video(array) is array
    check_video(str(png))
    assert read_video(f"file://{png}") == str(png)  # the processor's to decode
    wrong = (("missing.mp4", "no file 'missing.mp4'"), (["missing.png"], "cannot be read"), (3, "type int"))
    for form, message in wrong:
        with pytest.raises(ValueError, match=message):
            check_video(form)
