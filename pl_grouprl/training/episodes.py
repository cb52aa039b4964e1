"""Tools, environments and harness of a run: options, setup and teardown."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.chat import ChatFormat, make_chat_format
from pl_grouprl.chat.renderer_format import uses_renderers
from pl_grouprl.data.encoding import ChatOptions
from pl_grouprl.episodes.limits import EpisodeLimits
from pl_grouprl.episodes.loop import EpisodeLoop
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.harnesses import Verifiers
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.rewards.base import as_weighted
from pl_grouprl.rewards.environment import EnvironmentReward
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.training.run import Run
from pl_grouprl.utilities.options import check_options

RewrittenHistory = Literal["refuse", "new_row"]
Rewards = list[Weighted | RewardFunction] | RewardFunction


class Episodes:
    """Multi-turn episodes of a run; without tools, it only renders conversations.

    Args:
        run: Provides the tokenizer.
        tools: Functions that the model may call.
        environment_factory: Makes environments; one, or several by name.
        harness: Plays the episodes in place of this package's loop, without tools and environments.
        limits: Limits on an episode's length.
        chat_template: Used in place of the tokenizer's; see `ChatFormat`.
        tool_timeout: Time limit of a call in seconds; None is no limit.
        tool_workers: Processes per rank that run tools; 0 runs them in threads.
        rewritten_history: What to do with a chat template that changes earlier messages once others follow: `refuse`
            it, or begin a `new_row` of the episode.

    Attributes:
        runner: Runs tools and environments; None if there are none.
        harness: As passed.
        turn_end_ids: Tokens besides EOS with which the chat template ends the model's turns; empty before `set_up`.

    Raises:
        ValueError: If an option is out of range, or has no effect without tools.
    """

    def __init__(
        self,
        run: Run,
        tools: Sequence[Callable[..., Any]] | None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
        limits: EpisodeLimits,
        *,
        harness: Verifiers | None = None,
        chat_template: str | None = None,
        tool_timeout: float | None = None,
        tool_workers: int = 0,
        rewritten_history: RewrittenHistory = "refuse",
    ) -> None:
        known = "'refuse' or 'new_row'"
        check_options(
            {"rewritten_history": (rewritten_history, rewritten_history in get_args(RewrittenHistory), known)}
        )
        self._run, self._limits, self._chat_template = run, limits, chat_template
        self._may_rewrite = rewritten_history == "new_row"
        self.runner: ToolRunner | None = None
        self.harness = harness
        if harness is not None:
            _refuse_with_harness(
                tools=tools or None,
                environment_factory=environment_factory,
                max_tool_calling_iterations=limits.max_tool_calling_iterations,
                tool_timeout=tool_timeout,
                tool_workers=tool_workers or None,
                rewritten_history=rewritten_history if self._may_rewrite else None,
                chat_template=chat_template,
            )
        elif tools or environment_factory is not None:
            self.runner = ToolRunner(tools or (), environment_factory, timeout=tool_timeout, workers=tool_workers)
        else:
            _refuse_without_tools(
                **vars(limits),
                tool_timeout=tool_timeout,
                tool_workers=tool_workers or None,
                rewritten_history=rewritten_history if self._may_rewrite else None,
                chat_template=chat_template if uses_renderers(chat_template) else None,
            )
        self._template_kwargs: Mapping[str, Any] = {}
        self._split_special_tokens = True
        self.turn_end_ids: list[int] = []
        self._format: ChatFormat | None = None
        self._formats: list[ChatFormat] = []
        self._loop: EpisodeLoop | None = None

    def with_rewards(self, rewards: Rewards | None) -> Rewards:
        """Add the rewards of environments that have them, and of the harness, each with weight 1.

        Raises:
            ValueError: If there is no reward at all.
        """
        if self.harness is not None:
            return [*([] if rewards is None else as_weighted(rewards)), self.harness.reward()]
        names = [] if self.runner is None else self.runner.reward_names
        if not names:
            if rewards is None:
                raise ValueError("rewards is None; pass a reward function, or an environment that has get_reward.")
            return rewards
        return [*([] if rewards is None else as_weighted(rewards)), *map(EnvironmentReward, names)]

    @property
    def exposes_environments(self) -> bool:
        """Whether reward functions can receive environments: only those that live in this process."""
        return self.runner is not None and self.runner.has_environments and self.runner.workers == 0

    def check_branching(self, branching: Branching) -> None:
        """Check that the branch points suit the tools of this run.

        Raises:
            ValueError: Says what to change.
        """
        at_turns, runner = branching.points == "turn", self.runner
        if self.harness is not None:
            raise ValueError(
                "branching is set together with harness, whose episodes cannot be copied at a branch point; leave out "
                "branching."
            )
        if at_turns and runner is None:
            raise ValueError(
                "Branching.points is 'turn', but without tools a rollout has one turn; pass tools, or use 'every_n' or "
                "'entropy'."
            )
        if runner is not None and not at_turns:
            raise ValueError(
                f"Branching.points is {branching.points!r}, but with tools or environments rollouts can branch only "
                "between turns; use 'turn'."
            )
        if runner is not None and runner.has_environments:
            raise ValueError(
                "branching is set together with environment_factory, but an environment cannot be copied at a branch "
                "point; use stateless tools, or leave out branching."
            )
        if self._may_rewrite:
            raise ValueError(
                "branching is set together with rewritten_history='new_row', but branch points are indices into a "
                "single row; use a chat template that does not rewrite the history, or leave out branching."
            )

    @property
    def chat_options(self) -> ChatOptions:
        """How the data module renders conversations."""
        runner = self.runner
        if runner is None:
            return ChatOptions(self._template_options)
        return ChatOptions(
            self._template_options,
            needs_messages="tools and environments need a conversation",
            may_be_empty=runner.has_environments,
            writes_data=runner.has_environments and runner.environment_names is None,
        )

    def longest_completion(self, max_new_tokens: int, budget: int | None) -> int:
        """The most tokens that may follow a prompt.

        Args:
            max_new_tokens: Most tokens that the model writes.
            budget: `max_tokens_per_micro_batch`.

        Raises:
            ValueError: If there is a budget, but no limit on tool results.
        """
        if self.runner is None and self.harness is None:
            return max_new_tokens
        if self._limits.max_episode_tokens is None and budget is not None:
            raise ValueError(
                f"max_tokens_per_micro_batch is {budget}, but tool results may have any number of tokens; set "
                "max_episode_tokens."
            )
        return self._limits.max_episode_tokens or max_new_tokens

    def set_up(self, template_kwargs: Mapping[str, Any], split_special_tokens: bool = True) -> None:
        """Refuse a chat template that cannot work, find the end of its turns, and start the workers.

        Args:
            template_kwargs: What the data passes to the chat template.
            split_special_tokens: Whether control tokens in messages are text.

        Raises:
            ValueError: Says what to change.
        """
        self._template_kwargs, self._format, self._loop = template_kwargs, None, None
        self._split_special_tokens = split_special_tokens
        tokenizer = self._run.tokenizer
        chat = self._chat_format()
        self.turn_end_ids = [end for end in chat.turn_end_ids if end != tokenizer.eos_token_id]
        if chat.source and not chat.turn_end_ids:
            rank_zero_warn(
                "The chat template ends the model's turns without an end token: answers to messages may run past "
                f"the end of the turn, up to the EOS token {tokenizer.eos_token!r}; set sampling.stop, or use another "
                "template."
            )
        if self.turn_end_ids:
            rank_zero_info(
                f"The chat template ends the model's turns with {tokenizer.decode(self.turn_end_ids)!r}; "
                f"completions end there, as at the EOS token {tokenizer.eos_token!r}."
            )
        if self.runner is None:
            return
        if self.runner.has_tools:
            self._chat_format().check_tools(may_rewrite=self._may_rewrite)
        self.runner.open()

    def close(self) -> None:
        """Stop the workers and the harness, and drop the environments."""
        while self._formats:
            self._formats.pop().close()
        if self.runner is not None:
            self.runner.close()
        if self.harness is not None:
            self.harness.close()

    def loop(self) -> EpisodeLoop | None:
        """The loop that samples episodes; None without tools."""
        if self.runner is None:
            return None
        if self._loop is None:
            self._loop = EpisodeLoop(self._chat_format(), self.runner, self._limits, may_rewrite=self._may_rewrite)
        return self._loop

    def loop_for_threads(self) -> EpisodeLoop | None:
        """A loop for other threads than the main one, with its own tokenizer, which one of them uses at a time."""
        if self.runner is None:
            return None
        chat = self._make_format(copy.deepcopy(self._run.tokenizer))
        return EpisodeLoop(chat, self.runner, self._limits, may_rewrite=self._may_rewrite, lock=threading.Lock())

    def _template_options(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the chat template for a row, besides the messages."""
        options: dict[str, Any] = {}
        if self._chat_template is not None:
            options["chat_template"] = self._chat_format().chat_template
        if self.runner is not None:
            options["tools"] = self.runner.schemas(self.runner.kind_of(columns)) or None  # Llama's template renders []
        return options

    def _chat_format(self) -> ChatFormat:
        if self._format is None:
            self._format = self._make_format(self._run.tokenizer)
        return self._format

    def _make_format(self, tokenizer: Any) -> ChatFormat:
        chat = make_chat_format(tokenizer, self._chat_template, self._template_kwargs, self._split_special_tokens)
        self._formats.append(chat)
        return chat


def _refuse_with_harness(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name} is set together with harness, whose library has options of its own for it (Verifiers.config "
                "and Verifiers.renderer); leave it out."
            )


def _refuse_without_tools(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value}, which has no effect without tools; pass tools or environment_factory, or leave "
                "it out."
            )
