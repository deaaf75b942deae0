"""A small Llama that learns the Python language reference with the Trainer of Transformers.

    elasticrun -np 3 --min-np 1 python examples/trainer.py

The text comes with Python (``pydoc_data.topics``). Workers may die, join and leave: the global batch, the order of the
samples and the losses stay those of the first world. Five lines differ from a script for torchrun.
"""

import argparse
import os
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from elasticstate.huggingface import Trainer, run

LENGTH, SAMPLES = 32, 640

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/trainer-{os.getuid()}", help="for the checkpoint")
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
pieces = [{"input_ids": piece, "labels": piece} for piece in text[: SAMPLES * LENGTH].view(SAMPLES, LENGTH)]
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=LENGTH, **sizes))


@run
def main(state):
    args = TrainingArguments(
        output_dir=options.folder,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(state, model=model, args=args, train_dataset=pieces)
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps: mean loss {result.training_loss:.4f}")


main()
