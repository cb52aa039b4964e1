"""The diagram of how sharing works shows the layout's positions and attention."""

import sys
from pathlib import Path

import torch

from pl_grouprl.packing import SharedPrefixLayout

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import sharing_diagram


def test_the_diagram_is_the_tools_and_shows_a_layout():
    assert sharing_diagram.PATH.read_text(encoding="utf-8") == sharing_diagram.svg()
    lengths = [len(rollout) for rollout in sharing_diagram.ROLLOUTS]
    layout = SharedPrefixLayout.from_groups([(len(sharing_diagram.PROMPT), lengths)])
    assert sharing_diagram.positions() == layout.position_ids.tolist()
    place = torch.arange(layout.num_tokens)
    seen = layout.visibility(place.device)(place[:, None], place)
    calls = sharing_diagram.attention_pairs()
    assert calls["A"] | calls["B"] == {tuple(pair) for pair in seen.nonzero().tolist()}
    assert not calls["A"] & calls["B"]
