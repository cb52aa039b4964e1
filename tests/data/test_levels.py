import pytest

from pl_grouprl.data import TrainPromptLoader
from pl_grouprl.data.loaders import LevelPromptLoader, LevelSchedule
from pl_grouprl.types import Prompt

LEVELS = [0, 1, 0, 1, 0, 2, 0, 1, 0, 2]  # five, three and two prompts


def make(schedule, **options):
    prompts = [Prompt([row + 1], f"row {row}", {"level": level}) for row, level in enumerate(LEVELS)]
    return LevelPromptLoader(prompts, schedule=schedule, column="level", **{"batch_size": 2, "seed": 3, **options})


def rows(prompts):
    return [int(prompt.prompt.split()[1]) for prompt in prompts]


def test_levels_of_rollouts():
    schedule = LevelSchedule()
    assert [schedule.at(number) for number in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert schedule.change_to(1) == 3
    assert [schedule.at(number) for number in (3, 4)] == [(1, 0), (1, 1)]
    assert schedule.change_to(0) == 5
    assert [schedule.at(number) for number in (5, 6)] == [(0, 3), (0, 4)]
    assert [schedule.at(number) for number in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    restored = LevelSchedule()
    restored.load_state_dict(schedule.state_dict())
    assert restored.change_to(2) == 7
    assert restored.at(7) == (2, 0)


def test_a_rollout_that_was_looked_at_keeps_its_level():
    schedule = LevelSchedule()
    loader = make(schedule)
    ahead = rows(loader.peek(1))
    assert schedule.change_to(1) == 2
    assert rows(loader.peek(1)) == ahead
    assert {LEVELS[row] for row in ahead} == {0}
    assert {LEVELS[row] for row in rows(loader.peek(2))} == {1}


def test_each_pass_over_a_level_has_each_prompt_at_most_once():
    schedule = LevelSchedule()
    loader = make(schedule)
    batches = [rows(loader.peek(number)) for number in range(8)]
    assert all(LEVELS[row] == 0 for batch in batches for row in batch)
    passes = [batches[2 * number] + batches[2 * number + 1] for number in range(4)]  # two batches of five prompts
    assert all(len(set(one)) == 4 for one in passes)
    assert len({tuple(one) for one in passes}) > 1


def test_one_level_is_what_a_loader_of_its_prompts_yields():
    schedule = LevelSchedule()
    loader = make(schedule, shuffle=False)
    alone = TrainPromptLoader([p for p in loader.prompts if p.columns["level"] == 0], batch_size=2, shuffle=False)
    assert [rows(loader.peek(n)) for n in range(4)] == [rows(alone.peek(n)) for n in range(4)] == [[0, 2], [4, 6]] * 2


def test_ranks_share_a_batch_and_extra_prompts_have_its_level():
    schedule = LevelSchedule()
    schedule.change_to(1)
    loaders = [make(schedule, num_replicas=2, rank=rank) for rank in range(2)]
    whole = make(schedule)
    assert [rows(loader.peek(0))[0] for loader in loaders] == rows(whole.peek(0))
    extra = rows(whole.draw_extra(8, rollout_number=0))
    assert sorted(extra) == [1, 3, 7]
    assert set(extra[1:]) == set(rows(whole.peek(0)))  # others first, then those of the batch


def test_resumes_in_the_middle_of_a_pass():
    def read(loader, schedule, count, first=0):
        seen = []
        for number, batch in zip(range(first, count), loader, strict=False):
            seen.append(rows(batch.prompts))
            if number % 3 == 2:
                schedule.change_to((number // 3) % 3)
        return seen

    schedule, loader = LevelSchedule(), None
    loader = make(schedule)
    whole = read(loader, schedule, 5)
    for stop in range(1, 5):
        schedule = LevelSchedule()
        loader = make(schedule)
        begun = read(loader, schedule, stop)
        again = LevelSchedule()
        again.load_state_dict(schedule.state_dict())
        resumed = make(again)
        resumed.load_state_dict(loader.state_dict())
        assert begun + read(resumed, again, 5, first=stop) == whole


def test_what_is_refused():
    schedule = LevelSchedule()
    with pytest.raises(ValueError, match=r"\{2: 2\} prompts of these levels, fewer than batch_size=3"):
        make(schedule, batch_size=3)
    with pytest.raises(ValueError, match="drop_last is False"):
        make(schedule, drop_last=False)
    for level in (None, "1", -1, True):
        with pytest.raises(ValueError, match=r"line 7: column 'level' is .*; write the level"):
            LevelPromptLoader(
                [Prompt([1], columns={"level": level}, where="line 7")], schedule=schedule, column="level", batch_size=1
            )
    with pytest.raises(ValueError, match="level_column was 'level' and is None"):
        TrainPromptLoader(make(schedule).prompts, batch_size=2, seed=3).load_state_dict(make(schedule).state_dict())
