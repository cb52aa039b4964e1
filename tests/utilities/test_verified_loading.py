"""No damaged checkpoint is taken for a whole one: bytes all over a small one are changed, and it is cut everywhere."""

from __future__ import annotations

import re

import pytest
import torch

from pl_grouprl.utilities.checkpoint_files import (
    commit,
    load_verified,
    manifest_of,
    unfinished_path,
    verify_checkpoint,
)


def save(path, manifest):
    content = {"state_dict": {"weight": torch.arange(40.0)}, "global_step": 3}
    unfinished = unfinished_path(path) if manifest else path
    torch.save(content, unfinished)
    if manifest:
        commit(unfinished, path, {"step": 3})
    return path.read_bytes()


def same_weights(path):
    return torch.equal(load_verified(path)["state_dict"]["weight"], torch.arange(40.0))


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "own sums"])
def test_a_flipped_byte_never_changes_what_is_loaded(tmp_path, manifest, record_property):
    path = tmp_path / "own.ckpt"
    content = save(path, manifest)
    refused = 0
    places = range(0, len(content), 5 if manifest else 2)
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
        try:
            same = same_weights(path)  # padding and dates, where there is no manifest
        except ValueError:
            refused += 1
        else:
            assert same
    assert refused == len(places) if manifest else refused > 0.3 * len(places)
    record_property("figure", f"{refused} of {len(places)} flipped bytes refused, 0 changed weights taken")


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "own sums"])
def test_a_file_that_is_cut_short_is_refused(tmp_path, manifest):
    path = tmp_path / "own.ckpt"
    content = save(path, manifest)
    for length in range(0, len(content), 13):
        path.write_bytes(content[:length])
        with pytest.raises(
            ValueError, match=rf"^checkpoint {re.escape(str(path))} is damaged: it|own.ckpt has \d+ byt"
        ):
            load_verified(path)


def test_the_manifest_itself_may_be_damaged(tmp_path):
    path = tmp_path / "own.ckpt"
    save(path, manifest=True)
    manifest_of(path).write_text("{")
    with pytest.raises(ValueError, match=r"own\.ckpt is damaged"):
        verify_checkpoint(path)


def test_a_link_to_nothing_and_a_missing_shard(tmp_path):
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged: it is a link to .*gone\.ckpt, which does not exist"):
        verify_checkpoint(tmp_path / "last.ckpt")
    folder = unfinished_path(tmp_path / "shards.ckpt")
    folder.mkdir()
    for name in ("0.distcp", "1.distcp"):
        (folder / name).write_bytes(b"shard")
    commit(folder, tmp_path / "shards.ckpt", {})
    verify_checkpoint(tmp_path / "shards.ckpt")
    (tmp_path / "shards.ckpt" / "1.distcp").unlink()
    with pytest.raises(ValueError, match=r"shards\.ckpt is damaged: its file 1\.distcp is missing"):
        verify_checkpoint(tmp_path / "shards.ckpt")


def test_a_folder_without_a_manifest_is_loaded_with_a_warning(tmp_path):
    (tmp_path / "shards.ckpt").mkdir()
    (tmp_path / "shards.ckpt" / "0.distcp").write_bytes(b"shard")
    with pytest.warns(UserWarning, match=r"shards\.ckpt is a folder without a manifest"):
        verify_checkpoint(tmp_path / "shards.ckpt")


def test_code_is_never_run(tmp_path):
    torch.save({"state_dict": {}, "function": print}, tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match=r"own\.ckpt has more than tensors and plain values"):
        load_verified(tmp_path / "own.ckpt")


def test_what_is_not_local_is_loaded_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"checkpoint s3://bucket/x\.ckpt is not a local file .*without being verified"
    ):
        verify_checkpoint("s3://bucket/x.ckpt")
