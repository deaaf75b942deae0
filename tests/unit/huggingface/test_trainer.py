"""The Trainer in a world of one: what it computes, how it continues, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from elasticstate import TorchState, UsageError
from elasticstate.huggingface import ElasticTrainer, Trainer, TrainingState

SAMPLES, BATCH = 46, 4


class Classifier(torch.nn.Module):
    """A model whose loss is the mean over its batch, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "scores": scores}


def dataset() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(SAMPLES, 8, generator=generator)
    return [{"x": row, "labels": int(row.sum() > 0)} for row in rows]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    common = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    return TrainingArguments(output_dir=str(folder), **{**common, **changes})


def first_world() -> TrainingState:
    state = TrainingState()
    state.sync()
    return state


def losses(trainer: transformers.Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


class Crash(TrainerCallback):
    """Ends the training after a step, before the step is committed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise ConnectionError


def test_it_computes_what_the_plain_trainer_computes(tmp_path: Path) -> None:
    args = arguments(tmp_path, train_sampling_strategy="sequential")
    plain = transformers.Trainer(model=Classifier(), args=args, train_dataset=dataset())
    expected = plain.train()
    state = first_world()
    args = arguments(tmp_path, train_sampling_strategy="sequential")
    trainer = Trainer(state, model=Classifier(), args=args, train_dataset=dataset())
    result = trainer.train()
    assert result.global_step == expected.global_step == 18
    # The plain Trainer gives the last batch of an epoch, with 2 samples, the weight of one with 4.
    whole = [i for i in range(18) if i % 6 != 5][:5]
    assert [losses(trainer)[i] for i in whole] == pytest.approx([losses(plain)[i] for i in whole], rel=1e-5)
    for mine, its in zip(trainer.state.log_history, plain.state.log_history, strict=True):
        assert mine.get("learning_rate", 0) == pytest.approx(its.get("learning_rate", 0), rel=1e-9)
        assert mine["epoch"] == pytest.approx(its["epoch"])


@pytest.mark.parametrize("keeps_model", [True, False], ids=["same_model", "new_model"])
def test_it_continues_after_a_failure_as_if_nothing_had_happened(tmp_path: Path, keeps_model: bool) -> None:
    """With dropout: the random numbers continue, too, although the Trainer sets seeds when it is built."""
    undisturbed = Trainer(first_world(), model=Classifier(0.3), args=arguments(tmp_path), train_dataset=dataset())
    expected = undisturbed.train()
    state, model = first_world(), Classifier(0.3)
    for crash in (9, 14, 0):
        if not keeps_model:
            model = Classifier(0.3)
        trainer = Trainer(
            state,
            model=model,
            args=arguments(tmp_path),
            train_dataset=dataset(),
            callbacks=[Crash(crash)],
            commit_every=3,
        )
        if crash:
            with pytest.raises(ConnectionError):
                trainer.train()
            state.restore()
            state.sync()
    result = trainer.train()
    assert losses(trainer) == losses(undisturbed)
    assert result.training_loss == pytest.approx(expected.training_loss, rel=1e-6)
    for mine, other in zip(trainer.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_finished_training_makes_no_more_steps(tmp_path: Path) -> None:
    """Also one that a callback has ended: the world may change behind train()."""
    state = first_world()
    for _ in range(2):
        stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0)
        args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, metric_for_best_model="loss")
        data = dataset()
        trainer = Trainer(
            state, model=Classifier(), args=args, train_dataset=data, eval_dataset=data[:8], callbacks=[stop]
        )
        result = trainer.train()
        assert result.global_step == 6
        assert stop.early_stopping_patience_counter == 2
        state.restore()
        state.sync()


def test_it_resumes_from_a_checkpoint_of_another_job(tmp_path: Path) -> None:
    state = first_world()
    args = arguments(tmp_path, save_strategy="steps", save_steps=8)
    undisturbed = Trainer(state, model=Classifier(), args=args, train_dataset=dataset())
    undisturbed.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-16", "checkpoint-18", "checkpoint-8"]
    state = first_world()
    trainer = Trainer(state, model=Classifier(), args=arguments(tmp_path), train_dataset=dataset())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert losses(trainer) == losses(undisturbed)


def test_a_constant_global_batch_comes_in_parts(tmp_path: Path) -> None:
    state = TrainingState(workers=3)
    state.sync()
    trainer = Trainer(state, model=Classifier(), args=arguments(tmp_path), train_dataset=dataset())
    assert len(trainer.get_train_dataloader()) == 2
    assert trainer.train().global_step == 6
    assert trainer.get_total_train_batch_size(trainer.args) == 24


def test_a_loss_function_without_number_of_labels_is_weighted_by_samples(tmp_path: Path) -> None:
    """The labels have another name, so the Trainer does not count them."""

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        assert num_items_in_batch is None
        return outputs["loss"]

    found = []
    for batch, accumulation in ((8, 1), (4, 2), (3, 1)):
        state = TrainingState(workers=24 // (batch * accumulation))
        state.sync()
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        trainer = Trainer(
            state,
            model=Renamed(),
            args=arguments(tmp_path, label_names=["y"], **sizes),
            train_dataset=[{"x": row["x"], "y": row["labels"]} for row in dataset()],
            compute_loss_func=loss,
        )
        trainer.train()
        found.append(losses(trainer))
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * 2


class Renamed(Classifier):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(x, y)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(dataset())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False is not supported"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length' is not supported"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not supported"),
        ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen='all' is not supported"),
        ({"neftune_noise_alpha": 0.1}, "neftune_noise_alpha is not supported"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True is not supported"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True is not supported"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_cannot_be_elastic_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    state = first_world()
    with pytest.raises(UsageError, match=message):
        Trainer(state, model=Classifier(), args=arguments(tmp_path, **changes), train_dataset=dataset())


class Weighted(transformers.Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)


class Subset(transformers.Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return SubsetRandomSampler(range(SAMPLES // 2))


class First(transformers.Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(range(10))


class Doubling(transformers.Trainer):
    class Loader(DataLoader):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch
                yield batch

    def get_train_dataloader(self) -> Any:
        return self.Loader(self.train_dataset, BATCH)


class InPairs(transformers.Trainer):
    """Two samples of each draw, as trainers that compare completions of one prompt have them."""

    class Pairs(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[i, i] for i in range(SAMPLES)])

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_sampler=self.Pairs(SequentialSampler(range(SAMPLES)), BATCH, False))


class Prepared(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, 2 * BATCH, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class Endless(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        return iter(transformers.Trainer.get_train_dataloader(self))


def derived(own: Any, is_above: bool) -> Any:
    """Return a Trainer with the methods of ``own``: in a class derived from ours, or in the one that it extends."""
    return type("Mine", (Trainer,), dict(vars(own))) if is_above else type("Mine", (ElasticTrainer, own), {})


@pytest.mark.parametrize("is_above", [True, False], ids=["above", "below"])
@pytest.mark.parametrize(
    ("own", "message"),
    [
        (Weighted, "WeightedRandomSampler and a BatchSampler, but elasticstate orders .* Remove what gives Mine"),
        (Subset, "SubsetRandomSampler and a BatchSampler, but elasticstate orders"),
        (First, "The SequentialSampler has 10 of the 46 samples of the data set. Use torch.utils.data.Subset"),
        (Doubling, r"Loader has an __iter__\(\) of its own, which elasticstate would not call"),
        (InPairs, "SequentialSampler and a Pairs, but elasticstate orders"),
        (Prepared, "with batches of 8 is not supported .* Set per_device_train_batch_size=8, which is 4"),
        (Endless, "which returns a generator, is not supported .* Return a DataLoader"),
    ],
)
def test_an_override_with_another_order_of_samples_is_refused(
    tmp_path: Path, own: Any, message: str, is_above: bool
) -> None:
    """Its samples would be replaced by all samples in elasticstate's order, without a word."""
    state, args = first_world(), arguments(tmp_path)
    mine = derived(own, is_above)(state, model=Classifier(), args=args, train_dataset=dataset())
    with pytest.raises(UsageError, match=message):
        mine.train()


@pytest.mark.parametrize("is_above", [True, False], ids=["above", "below"])
def test_an_override_keeps_its_data_set_collator_and_plain_order(tmp_path: Path, is_above: bool) -> None:
    seen = []

    class Reversed(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset[::-1], BATCH, drop_last=True, collate_fn=self.collated)

        def collated(self, rows: list[dict[str, Any]]) -> Any:
            seen.append([float(row["x"][0]) for row in rows])
            return self.data_collator(rows)

    state, args = first_world(), arguments(tmp_path, num_train_epochs=1, gradient_accumulation_steps=1)
    mine = derived(Reversed, is_above)(state, model=Classifier(), args=args, train_dataset=dataset())
    assert mine.train().global_step == SAMPLES // BATCH
    rows = [float(row["x"][0]) for row in dataset()][::-1]
    assert seen == [rows[first : first + BATCH] for first in range(0, SAMPLES - BATCH + 1, BATCH)]


def test_a_loss_that_is_a_sum_over_the_batch_is_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    convolution: dict[str, Any] = {"conv_dim": (8,), "conv_kernel": (10,), "conv_stride": (5,)}
    convolution |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}

    def trainer(kind: str, **changes: Any) -> Trainer:
        config = transformers.Wav2Vec2Config(vocab_size=8, **sizes, **convolution, **changes)
        model = getattr(transformers, f"Wav2Vec2For{kind}")(config)
        return Trainer(first_world(), model=model, args=arguments(tmp_path), train_dataset=dataset())

    with pytest.raises(UsageError, match=r'ctc_loss_reduction="sum", the default of this model, is not supported'):
        trainer("CTC")
    trainer("CTC", ctc_loss_reduction="mean")
    trainer("SequenceClassification")


def test_arguments_of_no_world_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    state = first_world()
    with pytest.raises(UsageError, match="TrainingArguments must be built in each world"):
        Trainer(state, model=Classifier(), args=args, train_dataset=dataset())


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    state = first_world()
    args = arguments(tmp_path)
    with pytest.raises(UsageError, match="is a TorchState, and must be the state that run passes"):
        Trainer(TorchState(step=0), model=Classifier(), args=args)
    with pytest.raises(UsageError, match="commit_every=0: must be at least 1"):
        Trainer(state, model=Classifier(), args=args, commit_every=0)
    with pytest.raises(UsageError, match="train_dataset is None"):
        Trainer(state, model=Classifier(), args=args).train()
    state = first_world()
    args = arguments(tmp_path, max_steps=3)
    with pytest.raises(UsageError, match="Stream has no length or no indices"):
        Trainer(state, model=Classifier(), args=args, train_dataset=Stream()).train()
    state = first_world()
    args = arguments(tmp_path)
    trainer = Trainer(state, model=Classifier(), args=args, train_dataset=dataset())
    trainer.train()
    with pytest.raises(UsageError, match="train\\(\\) was called a second time"):
        trainer.train()
    with pytest.raises(UsageError, match="There is a second model in this world"):
        Trainer(state, model=Classifier(), args=args, train_dataset=dataset())


def test_the_private_names_exist() -> None:
    source = Path(transformers.trainer.__file__).read_text(encoding="utf-8")
    assert callable(transformers.Trainer._init_training_state)  # overridden: it returns the epoch of the loop's begin
    assert "self._init_training_state(" in source
    for name in ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"):
        assert f"self.{name} = " in source  # of the position of the loop


def test_the_model_has_the_values_of_the_state_before_train(tmp_path: Path) -> None:
    state = first_world()
    Trainer(state, model=Classifier(), args=arguments(tmp_path), train_dataset=dataset()).train()
    trained = {name: value.clone() for name, value in state.model.state_dict().items()}
    state.restore()
    state.sync()
    trainer = Trainer(state, model=Classifier(), args=arguments(tmp_path), eval_dataset=dataset())
    assert all(torch.equal(value, trained[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.evaluate()["eval_loss"] < 1


def test_a_new_process_gets_the_values_of_a_commit(tmp_path: Path) -> None:
    """The state of a new worker has no objects yet: it keeps copies of the commit until the Trainer makes them."""
    state = first_world()
    trainer = Trainer(
        state, model=Classifier(), args=arguments(tmp_path), train_dataset=dataset(), callbacks=[Crash(9)]
    )
    with pytest.raises(ConnectionError):
        trainer.train()
    state.restore()
    values = {name: copied(value) for name, value in state.capture().items()}
    newcomer = TrainingState()
    newcomer.apply(values)
    newcomer.sync()
    for value in values.values():
        if isinstance(value, torch.Tensor):
            value.zero_()  # memory of the commit: nothing may point there
    ends = []
    for each in (newcomer, state):
        each.sync()
        again = Trainer(each, model=Classifier(), args=arguments(tmp_path), train_dataset=dataset())
        again.train()
        ends.append((losses(again), [parameter.tolist() for parameter in again.model.parameters()]))
    assert ends[0] == ends[1]
    assert len(ends[0][0]) == 18


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
