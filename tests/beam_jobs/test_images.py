"""Folders of images: pixels exact for every sort, classes numbered rightly, bad files told apart."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import zlib

import numpy as np
import PIL
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import tfpipe
from beam_jobs import convert
from beam_jobs.sources import ImageOptions, SourceOptions, Wishes, image_pixels, images
from beam_jobs.sources.find import find_files, open_source, sniff
from beam_jobs.sources.image_files import orientation
from beam_jobs.sources.image_pixels import BadImage, take_image, write_png
from tests.beam_jobs.test_round_trip import IN_MEMORY, in_order, records, run
from tfpipe.errors import RecordError, UsageError
from tfpipe.schema import Feature

tf = pytest.importorskip("tensorflow")
RANDOM = np.random.default_rng(0)
RGB = RANDOM.integers(0, 256, (6, 5, 3), np.uint8)
RGBA = RANDOM.integers(0, 256, (6, 5, 4), np.uint8)
GREY = RGB[:, :, 0]
DEEP = np.arange(300, 330, dtype=np.uint16).reshape(6, 5) * 100


def encoded(image, kind, **options):
    out = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(out, kind, **options)
    return out.getvalue()


def exif(turn):
    data = Image.Exif()
    data[0x0112] = turn
    return data.tobytes()


def palette(**options):
    image = Image.fromarray(GREY % 4).convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 8, 7])
    return encoded(image, **options)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_chunk(png, name, data, at=33):
    """A PNG with a chunk more, by default behind its header."""
    return png[:at] + chunk(name, data) + png[at:]


def deep_png(channels):
    return write_png(RANDOM.integers(0, 1 << 16, (4, 3, channels)).astype(np.uint16))


JPEG = encoded(RGB, "JPEG", quality=95)
PNG = encoded(RGB, "PNG")
COPIED = {
    "JPEG": JPEG,
    "grey JPEG": encoded(GREY, "JPEG"),
    "progressive JPEG": encoded(RGB, "JPEG", progressive=True),
    "JPEG, not turned": encoded(RGB, "JPEG", exif=exif(1)),
    "RGB JPEG": encoded(RGB, "JPEG", keep_rgb=True),
    "PNG": PNG,
    "grey PNG": encoded(GREY, "PNG"),
    "RGBA PNG": encoded(RGBA, "PNG"),
    "LA PNG": encoded(Image.fromarray(RGBA).convert("LA"), "PNG"),
    "16-bit PNG": encoded(DEEP, "PNG"),
    "16-bit RGB PNG": deep_png(3),
    "16-bit RGBA PNG": deep_png(4),
    "PNG with a transparent colour": encoded(RGB, "PNG", transparency=(1, 2, 3)),
}  # fmt: skip
# The file, and the mode of the pixels that it must give, as Pillow gives them.
CONVERTED = {
    "CMYK JPEG became RGB PNG": (encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG"), "RGB"),
    "palette PNG became RGB PNG": (palette(kind="PNG"), "RGB"),
    "palette PNG became RGBA PNG": (palette(kind="PNG", transparency=b"\0\x80\xff\xff"), "RGBA"),
    "1-bit PNG became grey PNG": (encoded(Image.fromarray(GREY > 99), "PNG"), "L"),
    "1-bit TIFF": (encoded(Image.fromarray(GREY > 99), "TIFF", compression="group4"), "L"),
    "GIF became RGB PNG": (palette(kind="GIF"), "RGB"),
    "BMP became RGB PNG": (encoded(RGB, "BMP"), "RGB"),
    "BMP of a palette": (palette(kind="BMP"), "RGB"),
    "grey BMP": (encoded(GREY, "BMP"), "L"),
    "WebP became RGB PNG": (encoded(RGB, "WEBP"), "RGB"),
    "WebP became RGBA PNG": (encoded(RGBA, "WEBP", lossless=True, exact=True), "RGBA"),
    "TIFF became RGB PNG": (encoded(RGB, "TIFF", compression="tiff_lzw"), "RGB"),
    "TIFF became RGBA PNG": (encoded(RGBA, "TIFF"), "RGBA"),
    "CMYK TIFF": (encoded(Image.fromarray(RGB).convert("CMYK"), "TIFF"), "RGB"),
}
ENCODED = ImageOptions()
RAW = ImageOptions(form="raw")


def pillow(data, mode):
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode)).reshape(6, 5, -1)


def decoded(data, dtype=tf.uint8):
    """As TensorFlow decodes what was stored, whatever it is."""
    return tf.io.decode_image(data, dtype=dtype, expand_animations=False).numpy()


def write(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def opened(path, **options):
    return open_source([str(path)], SourceOptions(images=ImageOptions(**options)))[0]


def fails(tmp_path, capfd, *options, code=1):
    """What a conversion that must fail says."""
    given = [option for option in options if option != "--no-input"]
    source = [] if "--input" in given else ["--input", str(tmp_path / "in")]
    assert convert.main([*source, "--output", str(tmp_path / "bad"), *given, *IN_MEMORY]) == code
    assert not (tmp_path / "bad").exists()
    err = capfd.readouterr().err
    assert "Traceback" not in err
    return err


# Pixels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("check", [True, False], ids=["checked", "not checked"])
def test_what_every_decoder_takes_is_copied(name, check):
    taken = take_image(COPIED[name], ENCODED, check)
    assert taken.data == COPIED[name]
    assert "copied byte by byte" in taken.notes[0]
    dtype = tf.uint16 if "16-bit" in name else tf.uint8
    assert decoded(taken.data, dtype).ndim == 3  # and TensorFlow decodes it


@pytest.mark.parametrize("name", CONVERTED)
def test_what_is_converted_keeps_its_pixels(name):
    data, mode = CONVERTED[name]
    taken = take_image(data, ENCODED, check=False)
    assert Image.open(io.BytesIO(taken.data)).format == "PNG"
    np.testing.assert_array_equal(decoded(taken.data), pillow(data, mode))
    raw = take_image(data, RAW, check=True).data
    assert raw.dtype == np.uint8
    np.testing.assert_array_equal(raw, pillow(data, mode))
    if "became" in name:
        assert taken.notes == (name,)


@pytest.mark.parametrize("make", [
    lambda: encoded(DEEP, "TIFF"),
    lambda: encoded(DEEP, "TIFF", big_tiff=True),
    lambda: encoded(Image.frombytes("I;16B", (5, 6), DEEP.astype(">u2").tobytes()), "TIFF"),
    lambda: encoded(DEEP, "PNG"),
], ids=["TIFF", "BigTIFF", "big-endian TIFF", "PNG"])  # fmt: skip
def test_grey_of_16_bits_keeps_all_of_them(make):
    """A16: the value 300 stays 300."""
    data = make()
    stored = take_image(data, ENCODED, check=True)
    np.testing.assert_array_equal(decoded(stored.data, tf.uint16)[:, :, 0], DEEP)
    raw = take_image(data, RAW, check=True)
    assert raw.data.dtype == np.uint16
    np.testing.assert_array_equal(raw.data[:, :, 0], DEEP)
    small = take_image(data, ImageOptions(form="raw", size=(3, 5), channels=1), check=True).data
    assert small.dtype == np.uint16 and 300 * 100 <= small.min() < small.max() <= 329 * 100
    with pytest.raises(BadImage, match="16 bits for --image-channels 3"):
        take_image(data, ImageOptions(channels=3), check=True)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_turns_pixels(kind, turn):
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(RGB, kind, exif=exif(turn), **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert expected.shape[:2] == ((5, 6) if turn >= 5 else (6, 5))
    taken = take_image(data, ENCODED, check=True)
    if turn == 1 and kind in ("JPEG", "PNG"):
        assert taken.data == data
    else:
        np.testing.assert_array_equal(decoded(taken.data), expected)
        assert ("turned as their EXIF says" in taken.notes) == (turn != 1 and kind != "TIFF")
    np.testing.assert_array_equal(take_image(data, RAW, check=True).data, expected)


@given(
    st.binary(max_size=60).flatmap(lambda tail: st.sampled_from([tail, b"Exif\0\0II*\0\x08\0\0\0" + tail]))
)
def test_malformed_exif_turns_nothing_or_says_a_number_there_is(data):
    assert 1 <= orientation(data) <= 8


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_of_either_byte_order(order):
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, 8, 2)
    other = struct.pack(order + "HHII", 0x010F, 4, 1, 6)
    for kind, value, right in ((3, 6, 6), (3, 9, 1), (3, 0, 1), (4, 6, 1)):
        entry = struct.pack(order + "HHIHH", 0x0112, kind, 1, value, 0)
        assert orientation(b"Exif\0\0" + head + other + entry) == right


def test_of_several_frames_the_first_is_taken_and_counted():
    frames = [Image.fromarray(np.full((6, 5), value, np.uint8)) for value in (10, 200)]
    for kind in ("GIF", "TIFF"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        taken = take_image(data, ENCODED, check=True)
        assert decoded(taken.data).shape[:2] == (6, 5) and (decoded(taken.data) == 10).all()
        assert "had several frames or pages: the first was taken" in taken.notes
        assert len(take_image(encoded(frames[0], kind), ENCODED, check=True).notes) == 1
    webp = encoded(frames[0].convert("RGB"), "WEBP", lossless=True, save_all=True, append_images=[frames[1].convert("RGB")])  # fmt: skip
    taken = take_image(webp, ENCODED, check=True)
    assert (decoded(taken.data) == 10).all() and "several" in taken.notes[1]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["uint8", "uint16"]),
    st.randoms(),
)
def test_the_png_encoder_loses_nothing(height, width, channels, dtype, rng):
    pixels = np.frombuffer(rng.randbytes(height * width * channels * 2), "uint16").astype(dtype)
    pixels = pixels.reshape(height, width, channels)
    data = write_png(pixels)
    assert data == write_png(pixels.copy())
    np.testing.assert_array_equal(tf.io.decode_png(data, dtype=dtype).numpy(), pixels)
    Image.open(io.BytesIO(data)).load()


def test_channels_and_size():
    def pixels(data, **options):
        taken = take_image(data, ImageOptions(form="raw", **options), check=True)
        return taken.data, taken.notes

    image = Image.fromarray(RGB)
    grey, notes = pixels(PNG, channels=1)
    np.testing.assert_array_equal(grey[:, :, 0], np.asarray(image.convert("L")))
    assert notes[1:] == ("had colours and became grey (--image-channels)",)
    rgba, notes = pixels(PNG, channels=4)
    assert (rgba[:, :, :3] == RGB).all() and (rgba[:, :, 3] == 255).all() and len(notes) == 1
    rgb, notes = pixels(encoded(RGBA, "PNG"), channels=3)  # left out, not blended: as TensorFlow does
    np.testing.assert_array_equal(rgb, RGBA[:, :, :3])
    assert notes[1:] == ("lost their alpha channel (--image-channels)",)
    opaque = RGBA.copy()
    opaque[:, :, 3] = 255
    assert len(pixels(encoded(opaque, "PNG"), channels=3)[1]) == 1  # nothing is lost
    small, notes = pixels(PNG, size=(3, 10))
    np.testing.assert_array_equal(small, np.asarray(image.resize((10, 3), Image.Resampling.BILINEAR)))
    assert notes == ("PNG became RGB tensors", "resized to 3x10")
    keyed = COPIED["PNG with a transparent colour"]
    assert pixels(keyed)[0].shape == (6, 5, 4) and pixels(keyed, channels=3)[0].shape == (6, 5, 3)
    # What has the channels and size already is copied.
    for options in ({"channels": 3}, {"size": (6, 5)}, {"channels": 3, "size": (6, 5)}):
        assert take_image(JPEG, ImageOptions(**options), check=True).data == JPEG
    assert decoded(take_image(JPEG, ImageOptions(channels=1), check=True).data).shape == (6, 5, 1)


# Files that can't be taken ---------------------------------------------------------------------


def tiff(mode_and_array, **tags):
    return encoded(mode_and_array, "TIFF", **tags)


def raw_tiff(bits, samples, extra=(), sample_format=1, photometric=2, subfile=0, width=2):
    """A little TIFF of one strip that Pillow would not write."""
    size = width * samples * bits // 8
    entries = [(254, 4, [subfile]), (256, 3, [width]), (257, 3, [1]), (258, 3, [bits] * samples), (259, 3, [1]),
               (262, 3, [photometric]), (273, 4, [8]), (277, 3, [samples]), (278, 3, [1]), (279, 4, [size])]  # fmt: skip
    if extra:
        entries.append((338, 3, list(extra)))
    entries.append((339, 3, [sample_format] * samples))
    data = bytearray(size + size % 2)
    start = 8 + len(data)
    after = bytearray()
    directory = struct.pack("<H", len(entries))
    for tag, kind, values in entries:
        packed = struct.pack(f"<{len(values)}{'H' if kind == 3 else 'I'}", *values)
        if len(packed) > 4:
            at = start + 2 + 12 * len(entries) + 4 + len(after)
            after += packed
            packed = struct.pack("<I", at)
        directory += struct.pack("<HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", start) + bytes(data) + directory + bytes(4) + bytes(after)


REFUSED = {
    "empty": (b"", "an empty file"),
    "text": (b"<html>not found</html>", "JPEG, PNG, GIF, BMP, WebP or TIFF do, got a beginning of b'<html>not fo'"),
    "JPEG truncated": (JPEG[:400], "readable to its end, got"),
    "PNG truncated": (PNG[:-20], "its end"),
    "PNG of a wrong checksum": (PNG[:-17] + bytes([PNG[-17] ^ 1]) + PNG[-16:], "wrong checksum in the chunk b'IDAT'"),
    "GIF truncated": (encoded(RANDOM.integers(0, 256, (90, 90), np.uint8), "GIF")[:3000], "readable to its end"),
    "WebP truncated": (encoded(RANDOM.integers(0, 256, (90, 90, 3), np.uint8), "WEBP")[:900], "readable to its end"),
    "BMP truncated": (encoded(RGB, "BMP")[:-40], "readable to its end"),
    "TIFF truncated": (encoded(RANDOM.integers(0, 256, (90, 90), np.uint8), "TIFF")[:3000], "readable to its end"),
    "F": (encoded(GREY.astype(np.float32), "TIFF"), "floats|mode F"),
    "I": (encoded(GREY.astype(np.int32), "TIFF"), "32 bits a sample and 1 samples a pixel .mode I"),
    "LAB": (encoded(Image.fromarray(RGB).convert("LAB"), "TIFF"), "mode LAB"),
    "16-bit RGB TIFF": (raw_tiff(16, 3), "16 bits a sample and 3 samples a pixel .mode RGB"),
    "TIFF with infrared": (raw_tiff(8, 4, extra=(0,)), "4 samples a pixel"),
    "TIFF of signed numbers": (raw_tiff(8, 1, sample_format=2, photometric=1), "signed"),
    "TIFF with 0 for white": (raw_tiff(16, 1, photometric=0), "0 for white"),
    "a camera's raw file": (raw_tiff(8, 3, subfile=1), "preview"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_taken_is_refused_with_the_reason(name):
    data, said = REFUSED[name]
    with pytest.raises(BadImage, match=said) as caught:
        take_image(data, ENCODED, check=True)
    assert caught.value.remedy.endswith("leave it out.")


def test_raw_tiff_itself_is_sound():
    """So that the files above are refused for what is said, not for a fault of the helper's."""
    for options in ({"bits": 8, "samples": 3}, {"bits": 8, "samples": 4, "extra": (2,)},
                    {"bits": 8, "samples": 1, "photometric": 1}, {"bits": 16, "samples": 1, "photometric": 1}):  # fmt: skip
        data = take_image(raw_tiff(**options), RAW, check=True).data
        assert data.shape == (1, 2, options["samples"]) and not data.any()


def test_16_bits_of_colour_are_copied_but_never_shortened():
    for channels in (2, 3, 4):
        data = deep_png(channels)
        assert take_image(data, ENCODED, check=True).data == data
        for options in (RAW, ImageOptions(size=(2, 2)), ImageOptions(channels=1)):
            with pytest.raises(BadImage, match="16 bits"):
                take_image(data, options, check=True)


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch):
    bomb = PNG[:16] + struct.pack(">II", 30_000, 30_000) + PNG[24:]
    bomb = bomb[:29] + struct.pack(">I", zlib.crc32(bomb[12:29])) + bomb[33:]
    with pytest.raises(BadImage, match=r"89478485 pixels .*got 30000x30000"):
        take_image(bomb, ENCODED, check=True)
    monkeypatch.setattr(image_pixels, "MAX_PIXELS", 29)
    with pytest.raises(BadImage, match=r"29 pixels .*got 6x5"):
        take_image(JPEG, ENCODED, check=False)


BIG = encoded(RANDOM.integers(0, 256, (40, 40, 3), np.uint8), "JPEG")


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, len(BIG)), kind=st.sampled_from(["JPEG", "PNG"]))
@example(cut=len(BIG) - 2, kind="JPEG")
@example(cut=len(BIG) - 1, kind="JPEG")
def test_a_truncated_file_is_bad_or_tensorflow_takes_it_whole(cut, kind):
    whole = BIG if kind == "JPEG" else encoded(RGB, "PNG")
    try:
        data = take_image(whole[:cut], ENCODED, check=True).data
    except BadImage:
        assert cut < len(whole)
    else:
        np.testing.assert_array_equal(decoded(data), decoded(whole))


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(BIG) - 1), bit=st.integers(0, 7), kind=st.sampled_from(["JPEG", "PNG", "grey"]))
def test_what_is_taken_can_always_be_decoded(at, bit, kind):
    """A flipped bit makes a bad file, or one that TensorFlow decodes to the same shape as Pillow."""
    data = bytearray({"JPEG": BIG, "PNG": PNG, "grey": COPIED["grey JPEG"]}[kind])
    data[at % len(data)] ^= 1 << bit
    try:
        taken = take_image(bytes(data), ENCODED, check=True).data
    except BadImage:
        return
    assert decoded(taken).shape[:2] == Image.open(io.BytesIO(data)).size[::-1]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_reading_again_without_the_check_gives_the_same(data):
    """The write pass must store what the scan counted."""
    name = data.draw(st.sampled_from([*COPIED, *CONVERTED]))
    content = bytearray(COPIED[name] if name in COPIED else CONVERTED[name][0])
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    options = data.draw(st.sampled_from([ENCODED, ImageOptions(channels=3), ImageOptions(size=(4, 4))]))
    try:
        first = take_image(bytes(content), options, check=True)
    except BadImage:
        return
    assert take_image(bytes(content), options, check=False) == first


# Folders ---------------------------------------------------------------------------------------


def test_folders_become_classes(tmp_path):
    """A17, A18: by code point, hidden ones left out, any case of a suffix, nested ones by their path."""
    files = {
        "10/x.JPG": JPEG, "2/y.jpeg": JPEG, "2/z.jpe": JPEG, "a b/ü ü.png": PNG, "ß/日本.png": PNG,
        "deep/er/1.png": PNG, "deep/2.png": PNG,
        ".ipynb_checkpoints/x.jpg": JPEG, "2/.hidden.jpg": JPEG, "2/.DS_Store": b"x", "2/Thumbs.db": b"x",
    }  # fmt: skip
    source = write(tmp_path / "in", files)
    manifest = run(tmp_path, "--no-shuffle", inputs=[source])
    classes = ("10", "2", "a b", "deep", "deep/er", "ß")
    assert manifest.schema.features == {
        "image": Feature(dtype="bytes"),
        "label": Feature(dtype="int64", labels=classes),
        "path": Feature(dtype="string"),
    }
    shown = [name for name in files if "/." not in name and name[0] != "." and not name.endswith(".db")]
    assert in_order(records(manifest), "path") == [
        {"image": files[name], "label": classes.index(os.path.dirname(name)), "path": name}
        for name in sorted(shown)
    ]
    assert manifest.source == {
        "format": "images", "num_files": 7, "num_bytes": 3 * len(JPEG) + 4 * len(PNG),
        "decoder": f"pillow {PIL.__version__}",
        "classes": {"10": 1, "2": 2, "a b": 1, "deep": 1, "deep/er": 1, "ß": 1},
        "stored": {"JPEG copied byte by byte": 3, "PNG copied byte by byte": 4},
        "ignored_files": {".DS_Store": 1, ".db": 1, ".jpg": 1},
    }  # fmt: skip
    assert manifest.statistics["image"]["max_bytes"] == max(len(JPEG), len(PNG))


def test_images_without_folders_have_no_label(tmp_path):
    source = write(tmp_path / "in", {"a.png": PNG, "b.jpg": JPEG})
    manifest = run(tmp_path, "--no-shuffle", inputs=[source])
    assert records(manifest) == [{"image": PNG, "path": "a.png"}, {"image": JPEG, "path": "b.jpg"}]
    assert "classes" not in manifest.source


def test_a_pattern_names_classes_as_its_folder_does(tmp_path):
    source = write(tmp_path / "in", {"cat/a.png": PNG, "dog/b.jpg": JPEG, "dog/c.png": PNG})
    expected = {"cat/a.png", "dog/c.png"}
    for pattern in ("*/*.png", "**/*.png"):
        found = opened(source / pattern)
        assert found.classes == ("cat", "dog")
        assert {images._relative(file) for file in found.files} == expected
    assert opened(source / "*").classes == ("cat", "dog")
    assert opened(source / "dog").classes == ()
    assert opened(f"{source}/").classes == ("cat", "dog")
    two, _ = open_source([str(source / "cat"), str(source / "dog")], SourceOptions())
    assert two.classes == () and len(two.files) == 3


def test_images_in_folders_and_not_are_refused(tmp_path, capfd):
    write(tmp_path / "in", {"stray.png": PNG, "cat/a.png": PNG})
    err = fails(tmp_path, capfd)
    assert "class folders, or none" in err and "stray.png" in err and "cat/a.png" in err


def test_links_are_followed(tmp_path, capfd):
    elsewhere = write(tmp_path / "elsewhere", {"dog/b.jpg": JPEG, "c.png": PNG})
    source = write(tmp_path / "in", {"cat/a.png": PNG})
    (source / "dog").symlink_to(elsewhere / "dog")
    (source / "cat" / "c.png").symlink_to(elsewhere / "c.png")
    manifest = run(tmp_path, inputs=[source])
    assert [(row["path"], row["label"]) for row in in_order(records(manifest), "path")] == [
        ("cat/a.png", 0), ("cat/c.png", 0), ("dog/b.jpg", 1),
    ]  # fmt: skip
    (source / "cat" / "again.png").symlink_to(source / "cat" / "a.png")
    assert "named once" in fails(tmp_path, capfd, code=2)
    (source / "cat" / "again.png").unlink()
    (source / "cat" / "up").symlink_to(source)
    assert "not lie within itself" in fails(tmp_path, capfd, code=2)
    (source / "cat" / "up").unlink()
    (source / "cat" / "gone.png").symlink_to(source / "nothing")
    assert "a link must lead to a file" in fails(tmp_path, capfd)


def test_a_folder_that_can_not_be_read_is_an_error(tmp_path, monkeypatch):
    source = write(tmp_path / "in", {"cat/a.png": PNG, "dog/b.png": PNG})
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RecordError, match=r"a directory must be readable, got Permission denied \(.*dog\)"):
        find_files([str(source)], "auto")


def test_a_name_that_is_no_utf8_is_refused(tmp_path, capfd):
    source = write(tmp_path / "in", {"cat/a.png": PNG})
    try:
        (source / "cat" / os.fsdecode(b"b\xff.png")).write_bytes(PNG)
    except OSError:
        pytest.skip("the file system refuses such names")
    err = fails(tmp_path, capfd)
    assert "must be UTF-8" in err and "b\\\\xff.png" in err and "Rename it" in err


def test_content_tells_the_format_and_the_name_only_where_it_does_not(tmp_path):
    contents = {"a.txt": JPEG, "b": PNG, "c.csv": encoded(RGB, "BMP"), "d.bin": CONVERTED["WebP became RGB PNG"][0],
                "e.jpg": b"no image", "f.PNG": b"", "g.tiff": encoded(DEEP, "TIFF"), "h.dat": palette(kind="GIF")}  # fmt: skip
    folder = write(tmp_path / "in", contents)
    assert {name: sniff(str(folder / name)) for name in contents} == dict.fromkeys(contents, "images")
    write(folder, {"bmi.csv": b"BMI,age\n21,30\n18,40\n"})
    assert sniff(str(folder / "bmi.csv")) == "csv"


def test_compressed_files_are_images_too(tmp_path):
    bmp = encoded(RGB, "BMP")
    manifest = run(tmp_path, inputs=[write(tmp_path / "in", {"a.bmp.gz": gzip.compress(bmp)})])
    (row,) = records(manifest)
    np.testing.assert_array_equal(decoded(row["image"]), RGB)
    assert row["path"] == "a.bmp.gz"


# Conversions -----------------------------------------------------------------------------------

MIXED = {
    "dog/a.jpg": PNG, "dog/b.jpg": encoded(RGB, "BMP"), "dog/c.jpg": BIG[:900], "dog/d.jpg": b"",
    "dog/e.jpg": b"<html>", "cat/f.png": PNG, "cat/g.jpg": JPEG,
}  # fmt: skip


def test_files_that_are_no_images_stop_the_conversion_by_name(tmp_path, capfd):
    """A13."""
    write(tmp_path / "in", MIXED)
    err = fails(tmp_path, capfd)
    assert "in/dog/c.jpg" in err and "readable to its end" in err and "leave it out" in err


def test_or_are_left_out_and_counted(tmp_path, capfd):
    source = write(tmp_path / "in", MIXED)
    manifest = run(tmp_path, "--on-error", "quarantine", "--max-rejected", "50%", inputs=[source])
    assert manifest.num_rejected == 3
    rows = in_order(records(manifest), "path")
    assert [(row["path"], row["label"]) for row in rows] == [
        ("cat/f.png", 0), ("cat/g.jpg", 0), ("dog/a.jpg", 1), ("dog/b.jpg", 1),
    ]  # fmt: skip
    assert rows[2]["image"] == PNG
    np.testing.assert_array_equal(decoded(rows[3]["image"]), RGB)
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [row["origin"] for row in rejected] == [str(source / f"dog/{name}.jpg") for name in "cde"]
    assert "readable to its end" in rejected[0]["reason"] and "an empty file" in rejected[1]["reason"]
    assert rejected[2]["raw"] == "6 bytes, beginning 3c 68 74 6d 6c 3e"
    assert manifest.source["stored"] == {
        "BMP became RGB PNG": 1, "JPEG copied byte by byte": 1, "PNG copied byte by byte": 2,
    }  # fmt: skip
    out = capfd.readouterr().out
    assert "reading 7 image files" in out
    assert "note: images: 1 BMP became RGB PNG" in out
    assert {name: (source / name).read_bytes() for name in MIXED} == MIXED  # never touched
    capfd.readouterr()
    assert "at most 2 rows may be rejected" in fails(
        tmp_path, capfd, "--on-error", "quarantine", "--max-rejected", "2"
    )


def test_without_the_decode_check_only_the_beginning_is_looked_at(tmp_path, capfd):
    write(tmp_path / "in", {"a.jpg": BIG[:900], "b.jpg": JPEG})
    assert "a.jpg" in fails(tmp_path, capfd)
    manifest = run(tmp_path, "--no-decode-check", "--no-shuffle", inputs=[tmp_path / "in"])
    assert [row["image"] for row in records(manifest)] == [BIG[:900], JPEG]


def test_jpeg_is_not_compressed_again(tmp_path):
    tiny = {f"{i}.jpg": JPEG for i in range(30)}
    assert run(tmp_path, inputs=[write(tmp_path / "in", tiny)]).compression == ""
    assert run(tmp_path, "--compression", "gzip", inputs=[tmp_path / "in"], output="o3").compression == "GZIP"
    black = {f"{i}.png": write_png(np.zeros((100, 100, 3), np.uint8)) for i in range(9)}
    raw = run(tmp_path, "--image-as", "raw", inputs=[write(tmp_path / "raw", black)], output="o2")
    assert raw.compression == "GZIP"


def many(folder, count=60):
    rng = np.random.default_rng(7)
    for i in range(count):
        data = rng.integers(0, 256, (8, 8, 3), np.uint8)
        write(folder, {f"{i % 3}/{i:03}.png": encoded(data, "PNG") if i % 2 else encoded(data, "BMP")})
    return folder


def test_the_same_bytes_with_any_split_and_order_of_names(tmp_path, monkeypatch):
    source = many(tmp_path / "in")
    first = run(tmp_path, "--num-shards", "4", inputs=[source])
    copy = tmp_path / "copy"
    for path in sorted(source.rglob("*.png"), reverse=True):
        (copy / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / path.parent.name / path.name)
    monkeypatch.setattr(images, "SPLIT_FILES", 7)
    monkeypatch.setattr(images, "BATCH_BYTES", 500)
    assert len(opened(copy).plan()) == 9
    second = run(tmp_path, "--num-shards", "4", inputs=[copy], output="second")
    assert second.splits == first.splits
    assert second.source == first.source and second.schema == first.schema


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    limit=st.integers(1, 60),
    most=st.integers(1, 5),
)
def test_splits_hold_every_file_once_in_order(sizes, limit, most):
    files = tuple(images.InputFile(path=f"{i}.png", num_bytes=n, modified_ns=0) for i, n in enumerate(sizes))
    source = images.ImageSource(files=files, columns=(), how=ENCODED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "SPLIT_BYTES", limit)
        patch.setattr(images, "SPLIT_FILES", most)
        splits = source.plan()
    assert [i for split in splits for i in range(split.start, split.stop)] == list(range(len(sizes)))
    for index, split in enumerate(splits):
        count = split.stop - split.start
        assert split.index == index and 1 <= count <= most
        assert count == 1 or sum(sizes[split.start : split.stop]) <= limit
        assert source.origin(split, 1) == f"{split.start}.png"


def test_a_bad_file_of_a_later_split_keeps_its_path(tmp_path, monkeypatch):
    source = many(tmp_path / "in", 20)
    bad = sorted(source.rglob("*.png"))[17]
    bad.write_bytes(b"")
    monkeypatch.setattr(images, "SPLIT_FILES", 3)
    manifest = run(tmp_path, "--on-error", "quarantine", "--max-rejected", "1", inputs=[source])
    assert sum(1 for _ in records(manifest)) == 19
    assert json.loads((tmp_path / "out" / "rejected.jsonl").read_text())["origin"] == str(bad)


def test_batches_are_bounded_by_bytes(tmp_path, monkeypatch):
    source = opened(many(tmp_path / "in"))
    monkeypatch.setattr(images, "BATCH_BYTES", 1000)
    (split,) = source.plan()
    sizes = [sum(map(len, batch.columns["image"].to_pylist())) for batch in source.batches(split, Wishes())]
    assert len(sizes) > 10 and max(sizes) < 1000 + 600


def test_the_write_pass_decodes_nothing_that_is_copied(tmp_path, monkeypatch):
    source = opened(write(tmp_path / "in", COPIED_FILES))
    (split,) = source.plan()
    expected = [file for _, file in sorted(COPIED_FILES.items())]
    monkeypatch.setattr(Image.Image, "load", None)
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", None)
    found = [row for batch in source.batches(split, Wishes()) for row in batch.columns["image"].to_pylist()]
    assert found == expected
    with pytest.raises(TypeError):  # the patch would show
        Image.open(io.BytesIO(JPEG)).load()


COPIED_FILES = {f"{i}.png": data for i, data in enumerate(COPIED.values(), 10)}


def test_a_source_travels_to_workers(tmp_path):
    source = opened(many(tmp_path / "in"))
    assert pickle.loads(pickle.dumps(source)) == source


# Classes from another dataset ------------------------------------------------------------------


def test_labels_from_another_dataset(tmp_path, capfd):
    """A17: validation data that lacks a class is numbered as the training data is."""
    train = write(tmp_path / "train", {"a/1.png": PNG, "b/2.png": PNG, "c/3.png": PNG})
    write(train, {".ipynb_checkpoints/1.png": PNG})
    known = run(tmp_path, inputs=[train], output="train-data")
    assert known.schema.features["label"].labels == ("a", "b", "c")
    val = write(tmp_path / "in", {"a/1.png": PNG, "c/3.png": PNG})
    capfd.readouterr()
    for index, known_by in enumerate((tmp_path / "train-data", tmp_path / "train-data" / "manifest.json")):
        manifest = run(tmp_path, "--labels-from", str(known_by), inputs=[val], output=f"val{index}")
        assert manifest.schema.features["label"] == known.schema.features["label"]
        assert {row["path"]: row["label"] for row in records(manifest)} == {"a/1.png": 0, "c/3.png": 2}
        assert manifest.source["classes"] == {"a": 1, "b": 0, "c": 1}
    assert "note: 1 of 3 classes have no images here: 'b'" in capfd.readouterr().out
    write(val, {"d/4.png": PNG})
    err = fails(tmp_path, capfd, "--labels-from", str(tmp_path / "train-data"))
    assert "got 'd'" in err and "in/d)" in err and "there are a, b, c" in err
    assert "a dataset directory must exist" in fails(
        tmp_path, capfd, "--labels-from", str(tmp_path / "nothing")
    )
    flat = write(tmp_path / "flat", {"1.png": PNG})
    run(tmp_path, inputs=[flat], output="flat-data")
    err = fails(tmp_path, capfd, "--labels-from", str(tmp_path / "flat-data"))
    assert "whose feature `label` has labels" in err and "image (bytes), path (string)" in err
    options = ["--input", str(flat), "--labels-from", str(tmp_path / "train-data")]
    assert "class folders" in fails(tmp_path, capfd, *options, code=2)


def test_a_declared_schema_keeps_the_labels_or_is_refused(tmp_path, capfd):
    write(tmp_path / "in", {"a/1.png": PNG, "c/3.png": PNG})
    path = tmp_path / "schema.json"

    def declare(**label):
        features = {"label": {"dtype": "int64", **label}, "image": {"dtype": "bytes"}}
        path.write_text(json.dumps({"features": features}))
        return ["--schema", str(path)]

    for number, label in enumerate(({}, {"labels": ["a", "c"]})):
        manifest = run(tmp_path, *declare(**label), inputs=[tmp_path / "in"], output=f"o{number}")
        assert manifest.schema.features["label"].labels == ("a", "c")
        assert [sorted(row) for row in records(manifest)] == [["image", "label"]] * 2
    for label, said in (
        ({"labels": ["a", "b", "c"]}, "got labels a, b, c declared"),
        ({"dtype": "int32"}, "dtype int32"),
    ):
        err = fails(tmp_path, capfd, *declare(**label))
        assert said in err and "--labels-from" in err and "a, c" in err


# Raw tensors, options --------------------------------------------------------------------------


def test_raw_images_through_a_pipeline(tmp_path):
    pixels = RANDOM.integers(0, 256, (10, 4, 3, 3), np.uint8)
    files = {f"{i % 2}/{i}.png": encoded(array, "PNG" if i % 3 else "BMP") for i, array in enumerate(pixels)}
    manifest = run(tmp_path, "--image-as", "raw", inputs=[write(tmp_path / "in", files)])
    assert manifest.schema.features["image"] == Feature(dtype="uint8", shape=(4, 3, 3))
    assert (
        manifest.statistics["image"]["min"] == pixels.min()
        and manifest.statistics["image"]["max"] == pixels.max()
    )
    config = tfpipe.PipelineConfig(per_worker_batch_size=5)
    seen = {}
    for batch in tfpipe.make_dataset(manifest, config):
        for image, label, path in zip(
            batch["image"].numpy(), batch["label"].numpy(), batch["path"].numpy(), strict=True
        ):
            assert path.decode().startswith(f"{label}/")
            seen[path.decode()] = image
    assert len(seen) == 10 and seen["0/0.png"].dtype == np.uint8
    for i, array in enumerate(pixels):
        np.testing.assert_array_equal(seen[f"{i % 2}/{i}.png"], array)


def test_raw_images_of_16_bits(tmp_path):
    files = {"a.png": encoded(DEEP, "PNG"), "b.png": encoded(DEEP + 1, "TIFF")}
    manifest = run(tmp_path, "--image-as", "raw", "--no-shuffle", inputs=[write(tmp_path / "in", files)])
    assert manifest.schema.features["image"] == Feature(dtype="uint16", shape=(6, 5, 1))
    assert (
        manifest.statistics["image"]["min"] == DEEP.min()
        and manifest.statistics["image"]["max"] == DEEP.max() + 1
    )
    (batch,) = tfpipe.make_dataset(manifest, tfpipe.PipelineConfig(per_worker_batch_size=2))
    assert batch["image"].dtype == tf.uint16
    assert sorted(batch["image"].numpy()[:, 0, 0, 0].tolist()) == [int(DEEP[0, 0]), int(DEEP[0, 0]) + 1]


def test_raw_images_of_two_shapes_are_refused_by_name(tmp_path, capfd):
    write(tmp_path / "in", {"a.png": b"", "b.png": PNG, "c.png": PNG, "d.jpg": encoded(GREY, "JPEG")})
    (tmp_path / "in" / "a.png").unlink()
    err = fails(tmp_path, capfd, "--image-as", "raw")
    assert (
        "got uint8 [6, 5, 1] beside uint8 [6, 5, 3] of" in err and "in/b.png (" in err and "in/d.jpg)" in err
    )
    assert "--image-size HxW and --image-channels" in err
    manifest = run(tmp_path, "--image-as", "raw", "--image-channels", "3", inputs=[tmp_path / "in"])
    assert len(records(manifest)) == 3
    write(tmp_path / "in", {"e.png": encoded(RGB[:3], "PNG"), "f.png": encoded(DEEP, "PNG")})
    options = ["--image-as", "raw", "--image-channels", "1", "--image-size", "2x7"]
    assert "uint16 [2, 7, 1] beside uint8 [2, 7, 1]" in fails(tmp_path, capfd, *options)
    (tmp_path / "in" / "f.png").unlink()
    manifest = run(tmp_path, *options, inputs=[tmp_path / "in"], output="o2")
    assert manifest.schema.features["image"].shape == (2, 7, 1)


def test_raw_images_none_of_which_can_be_read(tmp_path, capfd):
    write(tmp_path / "in", {"a.png": b"", "b.png": b"x"})
    options = ["--image-as", "raw", "--on-error", "quarantine", "--max-rejected", "9"]
    assert "got none, at first: " in (err := fails(tmp_path, capfd, *options)) and "in/a.png" in err
    assert "at least one record" in fails(tmp_path, capfd, *options[2:])


@pytest.mark.parametrize("options, said", [
    (["--image-as", "raw"], "--image-as with csv"),
    (["--image-channels", "3"], "--image-channels with csv"),
    (["--image-size", "3x3"], "--image-size with csv"),
    (["--no-decode-check"], "--no-decode-check with csv"),
    (["--labels-from", "x"], "--labels-from with csv"),
    (["--image-size", "3"], "HEIGHTxWIDTH"),
    (["--image-size", "0x3"], "HEIGHTxWIDTH"),
    (["--image-size", "3x3x3"], "HEIGHTxWIDTH"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(tmp_path, capfd, options, said):
    write(tmp_path, {"in": b"x,y\n1,2\n"})
    assert said in fails(tmp_path, capfd, *options, "--format", "csv", code=2)


def test_other_formats_still_refuse_empty_files(tmp_path):
    write(tmp_path, {"a.csv": b""})
    with pytest.raises(RecordError, match="an empty file"):
        open_source([str(tmp_path / "a.csv")], SourceOptions())
    write(tmp_path, {"b.png": PNG})
    with pytest.raises(UsageError, match="must have one format"):
        open_source([str(tmp_path)], SourceOptions())
    source, ignored = open_source([str(tmp_path)], SourceOptions(format="images"))
    assert len(source.files) == 1 and ignored == {".csv": 1}
