"""The Trainer's loss and gradient depend neither on the parts of a step, nor on what a model does with their number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments

from elasticstate.errors import UsageError
from elasticstate.huggingface import ElasticTrainer, Trainer, TrainingState

SAMPLES, GLOBAL, LENGTH, WORDS = 22, 12, 6, 32
PARTS = ((12, 1), (2, 2), (5, 1), (1, 6))  # batch size and accumulation: the last step of an epoch has 10 samples
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(kind: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=WORDS, **sizes, **NO_DROPOUT, **changes)
    return getattr(transformers, f"BertFor{kind}")(config)


def t5() -> Any:
    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )


def bart() -> Any:
    sizes: dict[str, Any] = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    heads = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=WORDS, **sizes, **heads))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=1, n_head=2, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
        )
    )


def llama() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes))


def mixtral() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": False}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=WORDS, **sizes, **experts))


class Tagger(torch.nn.Module):
    """A model of the user's own, with a mean over its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(input_ids)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Ignoring(Tagger):
    """Accepts all arguments, and uses none."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return super().forward(input_ids, labels)


def tokens() -> list[dict[str, Any]]:
    """Return samples with different numbers of labels: some are -100, in a few samples all."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = rows.clone()
    for number, row in enumerate(labels):
        row[LENGTH - number % (LENGTH + 1) :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def translations() -> list[dict[str, Any]]:
    """Return samples that also have the decoder's input, as a data collator for translation makes it."""
    return [{**row, "decoder_input_ids": row["input_ids"]} for row in tokens()]


def classes(kind: type = int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": kind(row["input_ids"][0] > 16)} for row in tokens()]


def several_classes() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": (row["input_ids"][:3] > 16).float()} for row in tokens()]


def spans() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "start_positions": 1, "end_positions": 3} for row in tokens()]


class Mean(Trainer):
    """The most frequent override: a loss function of the user's own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**{name: value for name, value in inputs.items() if name != "num_items_in_batch"})
        loss = cross_entropy(outputs["logits"].flatten(0, 1), inputs["labels"].flatten())
        return (loss, outputs) if return_outputs else loss


class Sum(Trainer):
    """An override that divides by the number of labels of the whole step, and says so."""

    loss_is_scaled_for_ga = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = cross_entropy(outputs["logits"].flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
        return (loss / num_items_in_batch, outputs) if return_outputs else loss / num_items_in_batch


class OwnStep(Trainer):
    """An override of the whole step of a batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class LongerStep(Trainer):
    """An override that reads the batch, and adds to it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs = {**inputs, "labels": inputs["labels"].clone()}
        return super().training_step(model, inputs, num_items_in_batch)


class ShortStep(Trainer):
    """An override from the time before Transformers passed the number of labels."""

    def training_step(self, model: Any, inputs: Any) -> Any:
        return super().training_step(model, inputs)


class AnyStep(Trainer):
    """An override that passes on what it gets, as in TRL."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert (len(args), kwargs) == (3, {})
        return super().training_step(*args, **kwargs)


class ReplacedStep(Trainer):
    """A Trainer whose step a library has replaced in the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls, step = 0, self.training_step

        def counted(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self.calls += 1
            return step(model, inputs, num_items_in_batch)

        self.training_step = counted

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        assert self.calls >= self.state.global_step > 0
        return result


class UnweightedStep(Trainer):
    """An override from the time before Transformers averaged over the batches of a step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class Seq2Seq(ElasticTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """A Trainer of Transformers with arguments of its own."""


def mean_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def sum_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs["logits"][:, :-1], labels[:, 1:]
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_items_in_batch


def curve(
    folder: Path, make: Callable[[], Any], data: list[Any], parts: tuple[int, int], kind: Any, **options: Any
) -> list[float]:
    """Return losses, gradient norms and losses of evaluations of a training whose batches are ``parts``."""
    batch, accumulation = parts
    state = TrainingState()
    state.sync()
    torch.manual_seed(0)
    model = make()
    common: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True}
    common |= {
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "save_strategy": "no",
        "learning_rate": 0.01,
        "eval_strategy": "epoch",
    }
    common |= {"per_device_eval_batch_size": 4, "label_smoothing_factor": options.pop("label_smoothing_factor", 0.0)}
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    arguments = transformers.Seq2SeqTrainingArguments if kind is Seq2Seq else TrainingArguments
    first = [state] if issubclass(kind, ElasticTrainer) else []
    trainer = kind(
        *first,
        model=model,
        args=arguments(output_dir=str(folder), **common, **sizes),
        train_dataset=data,
        eval_dataset=data,
        **options,
    )
    trainer._global_batch = GLOBAL  # the batches of other worlds need not fill it
    trainer.train()
    return [
        line[name] for line in trainer.state.log_history for name in ("loss", "grad_norm", "eval_loss") if name in line
    ]


CASES: dict[str, tuple[Any, ...]] = {
    "bert_classes": (lambda: bert("SequenceClassification"), classes(), Trainer),
    "bert_regression": (lambda: bert("SequenceClassification", num_labels=1), classes(float), Trainer),
    "bert_several_classes": (
        lambda: bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        several_classes(),
        Trainer,
    ),
    "bert_tags": (lambda: bert("TokenClassification", num_labels=WORDS), tokens(), Trainer),
    "bert_masked": (lambda: bert("MaskedLM"), tokens(), Trainer),
    "bert_spans": (lambda: bert("QuestionAnswering"), spans(), Trainer),
    "t5": (t5, tokens(), Trainer),
    "t5_seq2seq": (t5, tokens(), Seq2Seq),
    "t5_smoothing": (t5, translations(), Seq2Seq, {"label_smoothing_factor": 0.1}),
    "bart": (bart, tokens(), Trainer),
    "gpt2": (gpt2, tokens(), Trainer),
    "gpt2_mean": (gpt2, tokens(), Trainer, {"compute_loss_func": mean_of}),
    "gpt2_smoothing": (gpt2, tokens(), Trainer, {"label_smoothing_factor": 0.1}),
    "llama": (llama, tokens(), Trainer),
    "llama_sum": (llama, tokens(), Trainer, {"compute_loss_func": sum_of}),
    "mixtral": (mixtral, tokens(), Trainer),
    "own": (Tagger, tokens(), Trainer),
    "ignoring": (Ignoring, tokens(), Trainer),
    "own_mean": (Tagger, tokens(), Mean),
    "ignoring_mean": (Ignoring, tokens(), Mean),
    "ignoring_sum": (Ignoring, tokens(), Sum),
    "own_step": (llama, tokens(), OwnStep),
    "longer_step": (lambda: bert("SequenceClassification"), classes(), LongerStep),
    "longer_step_of_sums": (gpt2, tokens(), LongerStep),
    "short_step": (llama, tokens(), ShortStep),
    "short_step_of_classes": (lambda: bert("SequenceClassification"), classes(), ShortStep),
    "any_step": (llama, tokens(), AnyStep),
    "replaced_step": (llama, tokens(), ReplacedStep),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_a_step_change_neither_loss_nor_gradient(tmp_path: Path, name: str) -> None:
    make, data, kind, *options = CASES[name]
    whole, *others = (curve(tmp_path, make, data, parts, kind, **dict(*options)) for parts in PARTS)
    assert others == [pytest.approx(whole, rel=1e-4)] * len(others)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_models_that_count_labels_have_the_losses_of_the_plain_trainer(tmp_path: Path, make: Callable[[], Any]) -> None:
    plain, found = (curve(tmp_path, make, tokens(), (6, 2), kind) for kind in (transformers.Trainer, Trainer))
    assert found == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("make", [gpt2, Ignoring])
def test_a_step_of_the_users_own_gets_what_transformers_passes(tmp_path: Path, make: Callable[[], Any]) -> None:
    def kind(base: Any) -> Any:
        class Noted(base):  # type: ignore[misc]
            def training_step(self, model: Any, *given: Any, **named: Any) -> Any:
                inputs, items = given
                what = {name: (value.tolist(), value.dtype) for name, value in inputs.items()}
                count = None if items is None else (type(items), items.dtype, items.shape, items.item())
                found.append((type(model), type(inputs), what, count, named))
                return super().training_step(model, *given, **named)

        return Noted

    both = []
    for base in (transformers.Trainer, Trainer):
        found: list[Any] = []
        curve(tmp_path, make, tokens(), (GLOBAL, 1), kind(base))
        both.append(found)
    assert both[0] == both[1]


def test_a_step_of_the_users_own_must_weigh_its_loss(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="UnweightedStep does not divide the loss by self"):
        curve(tmp_path, gpt2, tokens(), (6, 2), UnweightedStep)
