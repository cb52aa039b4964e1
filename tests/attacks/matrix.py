"""The fault matrix: what may happen to a run, what must follow, and which tests show it."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One condition.

    Attributes:
        condition: What happens.
        expected: What must follow.
        names: Files or test ids below `tests/`, in one string.
    """

    condition: str
    expected: str
    names: str

    @property
    def tests(self) -> tuple[str, ...]:
        """Files or test ids, from the project's root, as pytest takes them."""
        return tuple(f"tests/{name}" for name in self.names.split())


ROWS: tuple[Row, ...] = (
    Row(
        "kill -9 at a random moment: in saves, rollouts, rewards, updates, in calls of tools and later turns",
        "the newest complete checkpoint loads, and the resumed run ends bit-exact",
        "integration/test_kill_and_resume.py "
        "callbacks/test_safe_checkpoint.py::test_a_save_that_is_killed_anywhere_leaves_a_complete_checkpoint "
        "callbacks/test_safe_checkpoint.py::test_kills_in_a_row_keep_the_checkpoint_that_is_there",
    ),
    Row(
        "resume at every step, between updates of one batch of rollouts, on other ranks",
        "bit-exact",
        "training/test_checkpoint.py algorithms/test_ranks.py "
        "training/test_ahead.py::test_resume_at_every_step_is_exact data/test_prompt_resume.py",
    ),
    Row(
        "SIGTERM, SIGUSR1, Ctrl-C in a rollout, reward, update or save, to one rank",
        "a checkpoint at the next safe point, then the end; no deadlock",
        "callbacks/test_stop_on_signal.py",
    ),
    Row(
        "disk full or read-only under a checkpoint",
        "an error that says so; the former checkpoint still loads",
        "callbacks/test_safe_checkpoint.py::test_a_full_disk_is_an_error_and_the_former_checkpoint_loads "
        "callbacks/test_safe_checkpoint.py::test_the_reason_of_the_file_system_is_told "
        "callbacks/test_safe_checkpoint.py::test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step "
        "callbacks/test_safe_checkpoint.py::test_a_save_without_permission_is_an_error "
        "callbacks/test_safe_checkpoint.py::test_nothing_goes_through_the_folder_for_temporary_files",
    ),
    Row(
        "a reward raises, hangs, gives the wrong length, None, NaN or infinity, takes all memory, forks, floods, exits",
        "retried, its rollout masked and counted, aborted above a set share; the function is named; a hang is killed",
        "training/test_rewarder.py rewards/test_apply_rewards.py rewards/test_reward_workers.py "
        "rewards/test_async_rewards.py rewards/test_hostile_graders.py",
    ),
    Row(
        "control tokens in a prompt, a tool's result or a completion forge a turn",
        "they are encoded as text; only the chat template begins and ends turns",
        "chat/test_control_tokens.py media/test_prompts.py::test_control_tokens_in_messages_are_text "
        "rewards/test_model_reward.py::test_a_completion_cannot_forge_turns_of_the_reward_model",
    ),
    Row(
        "a tool or an environment raises, hangs, exits, returns megabytes, does not know its arguments",
        "the model reads a short error, it is counted, and the run goes on; a worker that is killed is replaced",
        "episodes/test_tools.py episodes/test_runner.py episodes/test_workers.py",
    ),
    Row(
        "ranks whose episodes have different numbers of turns; a sampler lost in a later turn; a reset that raises",
        "the rollouts and gradients of one rank; the episodes of all ranks start again; all ranks end with the reason",
        "episodes/test_episode_ranks.py",
    ),
    Row(
        "equal rewards, groups of one, groups of all sizes, a rank with nothing to train",
        "advantages zero or as the formula says, no NaN, all ranks step together, the gradient of one rank",
        "algorithms/test_grpo.py training/test_collector.py training/test_micro_batches.py functional/test_outcomes.py",
    ),
    Row(
        "empty completions, end tokens at once, padding on either side, prompts over the limit",
        "finite, and equal to the unpadded, unshared result; too long is refused or cut before the rollout",
        "rollout/contract attention/test_transparent.py attention/test_left_padding.py models/test_score.py",
    ),
    Row(
        "malformed rows, missing columns, empty data, less than a batch",
        "an error at setup with the row or column",
        "data/test_broken_data.py data/test_prompt_sources.py data/test_prompt_data_module.py",
    ),
    Row(
        "NaN or infinity in a loss or gradient",
        "all ranks skip the step, nothing moves; the end after some in a row",
        "training/test_update.py::test_a_step_that_is_not_finite_is_skipped "
        "training/test_update.py::test_too_many_steps_that_are_not_finite_end_the_run",
    ),
    Row(
        "the tokens of one rollout change",
        "no log-probability or gradient of another changes by a bit",
        "models/test_score.py::test_one_rollout_does_not_change_others_bitwise "
        "models/test_score.py::test_one_rollout_does_not_change_gradients_of_others_bitwise",
    ),
    Row(
        "a sampling server that is stopped, slow or lying; weights that did not arrive",
        "retried, then an error; checksums after each sync; nothing is trained on stale samples",
        "training/test_sampler.py rollout/server sync",
    ),
    Row(
        "300 steps",
        "memory does not grow; no thread, file or process is left",
        "attacks/test_soak.py",
    ),
    Row(
        "out of memory in a pass, its backward, a rollout, a score",
        "an error that names the option to lower",
        "training/test_update.py",
    ),
    Row(
        "an option that cannot be honored: backend, model, strategy",
        "an error at setup that names argument, value and remedy",
        "algorithms/test_options.py algorithms/test_module.py attention/test_support.py strategies/test_support.py",
    ),
    Row(
        "a folder or file that the run did not write stands where it wants to write",
        "untouched; an error before training",
        "callbacks/test_foreign_files.py callbacks/test_run_folder.py data/test_prepare.py",
    ),
    Row(
        "a checkpoint with one flipped byte, cut short, or of another algorithm, by path",
        "refused with path and cause",
        "training/test_checkpoint.py callbacks/test_end_of_run.py utilities/test_verified_loading.py "
        "integration/test_cli.py::test_a_damaged_checkpoint_is_refused_by_every_command",
    ),
    Row(
        "a reward, engine or callback changes the lists it is handed",
        "training sees the originals",
        "rewards/test_arguments_are_copies.py algorithms/test_module.py utilities/test_copying.py",
    ),
    Row(
        "resumed with other rewards, weights, data rows, clipping; a folder of another run",
        "named, and refused or allowed by an option",
        "training/test_checkpoint.py data/test_resume_with_other_lengths.py "
        "callbacks/test_safe_checkpoint.py::test_a_folder_of_another_configuration_is_refused",
    ),
    Row(
        "an update leaves NaN in the weights, by options or arithmetic",
        "found in that step; never saved as complete; an older good checkpoint stays",
        "training/test_update.py algorithms/test_options.py utilities/test_modes.py callbacks/test_end_of_run.py",
    ),
    Row(
        "a policy folder lacks a weight, or has one of another shape",
        "refused with its name, unless allowed by name",
        "models/test_loading.py",
    ),
    Row(
        "the run ends between two periodic checkpoints, or by a signal during export",
        "the last step is in a checkpoint",
        "callbacks/test_end_of_run.py callbacks/test_stop_on_signal.py",
    ),
    Row(
        "prompts dropped, truncated or too long for the model",
        "counted in one line at the start, found for all rows at setup",
        "training/test_checks.py data/test_counts_and_facts.py integration/test_cli_data.py",
    ),
    Row(
        "disk full under a logger, a table, a plot, an export",
        "what observes warns with the path and training continues; an export is an error with path and remedy",
        "callbacks/test_full_disk.py algorithms/test_module.py",
    ),
    Row(
        "a rank frozen (SIGSTOP), hung or failed",
        "the others end after a stated time and name it",
        "utilities/test_rank_watchdog.py",
    ),
    Row(
        "a grader that forks, calls setsid, exits, allocates without end, opens sockets, reads secrets, cheats",
        "contained by limits of its child, killed with all it started; exit code 0 is no pass",
        "rewards/sandbox rewards/test_code_tests.py",
    ),
    Row(
        "1,000 random option sets",
        "each runs, or ends in an error that names an option",
        "attacks/test_fuzz_options.py integration/test_config_errors.py",
    ),
    Row(
        "security: floors of dependencies, loads without code, optional packages absent",
        "held by tests",
        "test_security.py integration/test_audit.py utilities/test_imports.py",
    ),
)
