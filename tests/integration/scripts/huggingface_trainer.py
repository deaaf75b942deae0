"""Trains a small Llama with the Trainer, and logs what test_huggingface.py checks."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from huggingface_log import args, is_last, note, note_commit, note_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import elasticstate as elastic
from elasticstate.huggingface import LogCallback, Trainer, TrainingState, run
from elasticstate.loggers import Log, TensorBoard

LENGTH, SAMPLES = 16, 253
text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
pieces = list({tuple(row): row for row in text[: 2 * SAMPLES * LENGTH].view(-1, LENGTH).tolist()}.values())[:SAMPLES]
assert len(pieces) == SAMPLES
number_of = {tuple(piece): number for number, piece in enumerate(pieces)}
dataset = [{"input_ids": piece, "labels": piece} for piece in map(torch.tensor, pieces)]
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=LENGTH, **sizes))


class Logger(TrainerCallback):
    def __init__(self, state: TrainingState) -> None:
        self.elastic = state

    def on_train_begin(self, _: Any, state: Any, control: Any, **objects: Any) -> None:
        note_model("enter", state.global_step, objects["model"], objects["optimizer"])

    def on_step_begin(self, _: Any, state: Any, control: Any, **objects: Any) -> None:
        note_commit(self.elastic, state.global_step)

    def on_step_end(self, _: Any, state: Any, control: Any, **objects: Any) -> None:
        control.should_training_stop |= is_last(state.global_step)

    def on_log(self, _: Any, state: Any, control: Any, logs: dict[str, Any], **objects: Any) -> None:
        if "loss" in logs:
            note("loss", step=state.global_step, loss=logs["loss"], lr=logs["learning_rate"], epoch=logs["epoch"])
        if "eval_loss" in logs:
            note("evaluated", step=state.global_step, loss=logs["eval_loss"])

    def on_save(self, _: Any, state: Any, control: Any, **objects: Any) -> None:
        note("saved", step=state.global_step)


class LoggedTrainer(Trainer):
    def get_batch_samples(self, *arguments: Any) -> tuple[list[Any], Any]:
        steps, items = super().get_batch_samples(*arguments)
        for parts in steps:
            rows = [row for part in parts if part.weight for row in part.batch["input_ids"].tolist()]
            ids = [number_of[tuple(row)] for row in rows]
            note("trained", step=self.state.global_step, epoch=self.elastic.loader.epoch, ids=ids, parts=len(parts))
        return steps, items


@run(workers=args.workers, log=Log(TensorBoard(args.log / "tensorboard")))
def main(state: TrainingState) -> None:
    training = TrainingArguments(
        output_dir=str(args.log / "checkpoints"),
        max_steps=3000,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=15,
        save_steps=40,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = LoggedTrainer(
        state,
        model=model,
        args=training,
        train_dataset=dataset,
        eval_dataset=dataset[:96],
        callbacks=[Logger(state), LogCallback(state)],
        commit_every=args.commit_every,
    )
    result = trainer.train()
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    assert list(losses) == list(range(1, result.global_step + 1))
    assert abs(result.training_loss - sum(losses.values()) / len(losses)) < 1e-3
    note_model("final", result.global_step, trainer.model, trainer.optimizer)
    if elastic.rank() == 0:
        trainer.save_model(str(args.log / "model"))


main()
