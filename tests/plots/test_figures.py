"""Figures of a response: what they show, read off their artists."""

import math
import subprocess
import sys

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from pl_grouprl.functional.token_groups import find_token_groups
from pl_grouprl.plots import CAUSES, DARK, LESS_LIKELY, LIGHT, LIKELIER, UNTRAINED, plot_advantages, plot_token_groups

TOKENS = ["It", " is", " four", ".\n", "#", " 4"]
ADVANTAGES = [0.5, -0.25, 1.0, 0.0, -1.0, 2.0]


def bars(figure):
    """Height and color of each bar."""
    return [
        (bar.get_height(), to_hex(bar.get_facecolor()))
        for axes in figure.axes
        for container in axes.containers
        for bar in container
    ]


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def points(figure):
    """Heights of the points of all lines, without the zero line."""
    return [y for axes in figure.axes for line in axes.lines if line.get_marker() != "None" for y in line.get_ydata()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def backgrounds(figure):
    return [
        to_hex(patch.get_facecolor(), keep_alpha=True)
        for axes in figure.axes
        for patch in axes.patches
        if patch not in [bar for container in axes.containers for bar in container]
    ]


def groups_of_six(**options):
    errors = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    return find_token_groups(errors, torch.ones(1, 6), torch.ones(1, 6, dtype=torch.bool), **options)


def test_a_bar_for_each_token_colored_by_its_sign():
    figure = plot_advantages(TOKENS, torch.tensor(ADVANTAGES, requires_grad=True), title="One response")
    assert isinstance(figure, Figure)
    heights, colors = zip(*bars(figure), strict=True)
    assert heights == pytest.approx(ADVANTAGES)
    expected = [LIKELIER, LESS_LIKELY, LIKELIER, LESS_LIKELY, LESS_LIKELY, LIKELIER]
    pairs = zip(colors, expected, heights, strict=True)
    assert all(color == wanted for color, wanted, height in pairs if height)
    assert texts(figure) == ["It", " is", " four", ".↵", "1", "#", " 4", "5"]  # a line, and where it begins
    assert [text.get_text() for text in figure.texts] == ["One response", "advantage"]
    assert legend(figure) == ["more likely", "less likely"]


def test_tokens_that_are_not_trained_have_no_bar():
    figure = plot_advantages(TOKENS, [0.5, math.nan, *ADVANTAGES[2:]])
    assert len(bars(figure)) == 5
    assert backgrounds(figure).count(UNTRAINED + "ff") == 1
    assert legend(figure)[-1] == "not trained"


def test_further_kinds_of_advantages_are_points_on_the_same_scale():
    figure = plot_advantages(TOKENS, {"own": ADVANTAGES, "GRPO": [3.0] * 6})
    assert points(figure) == [3.0] * 6
    assert legend(figure)[-2:] == ["own", "GRPO"]
    (low, high), *others = [axes.get_ylim() for axes in figure.axes]
    assert low < -1.0
    assert high > 3.0
    assert others == [(low, high)]


def test_a_long_response_is_cut_and_says_so():
    figure = plot_advantages(TOKENS, ADVANTAGES, title="One", max_tokens=3)
    assert figure.texts[0].get_text() == "One, the first 3 of 6 tokens"
    assert len(bars(figure)) == 3


def test_equal_advantages_of_zero_can_be_drawn():
    assert plot_advantages(TOKENS, [0.0] * 6).axes[0].get_ylim() == (-1, 1)


def test_dollars_are_no_formulas(tmp_path):
    plot_advantages(["$x_", "{", "$"], {"$a_{": [1, 2, 3], "$b$$": [0, 0, 0]}, title="$}$").savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_token_groups_have_colors_and_the_causes_of_their_ends():
    figure = plot_token_groups(TOKENS, groups_of_six(threshold=9.0, max_size=4), ADVANTAGES)
    assert [color for _, color in bars(figure)] == [DARK[0]] * 4 + [DARK[1]] * 2
    assert backgrounds(figure) == [LIGHT[0] + "ff"] * 4 + [LIGHT[1] + "ff"] * 2
    assert legend(figure) == ["ended by its size", "ended by the end of the response or turn"]
    ends = [to_hex(line.get_color()) for axes in figure.axes for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert ends == [CAUSES[2][1], CAUSES[3][1]]


def test_a_group_for_each_token_ends_by_the_variance():
    figure = plot_token_groups(TOKENS, groups_of_six(), {"group": ADVANTAGES, "token": ADVANTAGES})
    assert [color for _, color in bars(figure)] == [*DARK]
    assert legend(figure) == ["ended by the variance rule", "group", "token"]
    assert points(figure) == pytest.approx(ADVANTAGES)


def test_groups_without_causes_have_no_marks():
    groups = groups_of_six(threshold=2.0)._replace(causes=None)
    assert not plot_token_groups(TOKENS, groups, ADVANTAGES).legends


def test_tokens_outside_of_groups_are_grey_and_the_row_is_chosen():
    mask = torch.tensor([[True] * 6, [True, False, True, False, False, False]])
    groups = find_token_groups(torch.ones(2, 6), torch.ones(2, 6), mask)
    figure = plot_token_groups(TOKENS[:3], groups, ADVANTAGES[:3], row=1)
    assert backgrounds(figure) == [LIGHT[0] + "ff", UNTRAINED + "ff", LIGHT[1] + "ff"]


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (r"own has shape \(5,\); there are 6", lambda: plot_advantages(TOKENS, {"own": ADVANTAGES[1:]})),
        (r"6 series .* at most 5", lambda: plot_advantages(TOKENS, dict.fromkeys("abcdef", ADVANTAGES))),
        (r"tokens has 5 .* row 0", lambda: plot_token_groups(TOKENS[1:], groups_of_six(), ADVANTAGES[1:])),
        (r"tokens has 7 .* row 0", lambda: plot_token_groups([*TOKENS, "x"], groups_of_six(), [*ADVANTAGES, 0])),
    ],
)
def test_what_cannot_be_drawn_is_refused(error, call):
    with pytest.raises(ValueError, match=error):
        call()


def test_a_notebook_shows_the_figure():
    assert plot_advantages(TOKENS, ADVANTAGES)._repr_png_().startswith(b"\x89PNG")


def test_pyplot_is_not_touched():
    code = (
        "import sys; from pl_grouprl.plots import plot_advantages; assert 'matplotlib' not in sys.modules; "
        "plot_advantages(['a'], [1.0]); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
