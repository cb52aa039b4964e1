"""An environment of the library verifiers, and GRPO training in it on a vLLM server.

The task: asked for letters, the model writes something, is asked for more, and is rewarded by the share of lowercase
letters in all that it wrote. Task, reward and metric are written as for verifiers. The harness runs in this process and
calls the model twice per episode; verifiers' own harnesses start a program per episode.

    pip install 'pl-grouprl[verifiers]'
    python examples/verifiers_environment.py prepare .cache/letters_model
    python -m pl_grouprl.rollout.vllm --model .cache/letters_model --dtype float32  # in an environment with vLLM
    python examples/verifiers_environment.py train .cache/letters_model --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2
import lightning.pytorch as pl
import torch
import verifiers.v1 as vf

from pl_grouprl import GRPO, PromptDataModule, SamplingConfig
from pl_grouprl.harnesses import Verifiers

__all__ = ["LettersHarness", "LettersTaskset"]  # by which verifiers finds them

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class LettersTask(vf.Task[vf.TaskData]):
    """Is rewarded by the share of lowercase letters."""

    @vf.reward
    async def share_of_letters(self, trace: vf.Trace) -> float:
        """Lowercase ASCII letters among all characters that the model wrote."""
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum("a" <= character <= "z" for character in text) / max(len(text), 1)

    @vf.metric
    async def num_characters(self, trace: vf.Trace) -> float:
        """Logged as `rewards/verifiers_environment/num_characters`."""
        return float(sum(len(message.content or "") for message in trace.assistant_messages))


class LettersTaskset(vf.Taskset[LettersTask]):
    """Twenty-six tasks, which differ in their first letter."""

    def load(self) -> Iterable[LettersTask]:
        """Build the tasks."""
        for letter in "abcdefghijklmnopqrstuvwxyz":
            yield LettersTask(vf.TaskData(prompt=f"Write letters, such as {letter}."), self.config.task)


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    """A conversation of two turns, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Call the model through verifiers' endpoint, which records the trace."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        async with httpx2.AsyncClient(trust_env=False, timeout=None) as client:
            for _ in range(2):
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages},
                )
                if answer.is_error:  # verifiers has recorded why
                    break
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "More."}]
        return vf.ProgramResult(0, "", "")


def prepare(folder: str | Path) -> None:
    """Write a tiny random model and a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: token for token, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM on CPUs needs heads of at least 32
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class RewardPrinter(pl.Callback):
    """Prints the mean reward of each step and keeps it."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Read the logged metrics."""
        metrics = trainer.callback_metrics
        self.rewards.append(metrics["reward"].item())
        print(f"step {trainer.global_step:3}  reward {self.rewards[-1]:.3f}  turns {metrics['episode/turns']:.1f}")


def train(model: str | Path, engine: Any, steps: int = 20) -> list[float]:
    """Train on a running server; return the mean reward of each step."""
    environment = Verifiers("verifiers_environment", {"agent": {"runtime": {"type": "subprocess"}}})
    module = GRPO(
        str(model),
        episodes={"harness": environment, "max_turn_tokens": 12},
        engine=engine,
        sampling=SamplingConfig(max_new_tokens=24),
        num_generations=8,
        optimizer={"learning_rate": 1e-2},
    )
    printer = RewardPrinter()
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[printer],
    )
    trainer.fit(module, datamodule=PromptDataModule(train=environment, batch_size=2))
    return printer.rewards


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "train"))
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the sampling server")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.model)
        return
    from pl_grouprl.rollout import VLLMServerRolloutEngine

    train(options.model, VLLMServerRolloutEngine(options.url), options.steps)


if __name__ == "__main__":
    main()
