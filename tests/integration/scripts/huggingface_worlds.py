"""Trains with an Accelerator or a Trainer of two workers' global batch, in any world, and prints the result."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from elasticstate.huggingface import Accelerator, TrainingState, run

SAMPLES = 65  # the last step of an epoch has one sample: two of three ranks have none
torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(SAMPLES, 8)
rows = torch.randint(1, 64, (SAMPLES, 8))


def with_accelerator(state: TrainingState) -> None:
    """Call ``zero_grad()`` first, and not ``accumulate()``, as in Accelerate's README."""
    accelerator = Accelerator(state, cpu=True)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    net = torch.nn.Linear(8, 1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.1)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), loader)
    for _ in accelerator.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            state.commit()
    accelerator.print("result", [round(value, 5) for value in net.weight.flatten().tolist()])


def with_trainer(state: TrainingState, model: Any, data: list[dict[str, Any]]) -> None:
    from transformers import TrainingArguments

    from elasticstate.huggingface import Trainer

    torch.manual_seed(0)
    options = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    args = TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, **options
    )
    trainer = Trainer(state, model=model, args=args, train_dataset=data)
    trainer.train()
    if trainer.is_world_process_zero():
        lines = [line for line in trainer.state.log_history if "loss" in line]
        print("result", [(round(line["loss"], 4), round(line["grad_norm"], 4)) for line in lines], flush=True)


def bert() -> tuple[Any, list[dict[str, Any]]]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, **sizes, **dropout))
    return model, [{"input_ids": row, "labels": int(row[0] > 32)} for row in rows]


def t5() -> tuple[Any, list[dict[str, Any]]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0, **sizes))
    labels = [torch.where(torch.arange(8) < 2 + number % 7, row, -100) for number, row in enumerate(rows)]
    return model, [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


models = {"bert": bert, "t5": t5}


@run(workers=2)
def main(state: TrainingState) -> None:
    if objects is None:
        with_accelerator(state)
    else:
        with_trainer(state, *objects)


objects = models[sys.argv[1]]() if sys.argv[1] in models else None
main()
