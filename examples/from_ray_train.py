"""A training with Ray Train's TorchTrainer, as elasticstate has it. docs/guides/ray-train.md shows the original.

    python examples/from_ray_train.py --discovery ray

With ``--discovery ray``, the nodes of the cluster of Ray are the hosts. Without, the workers run on this machine. The
data set comes with scikit-learn.
"""

import argparse
import time

import elasticstate as elastic


def train_loop(config: dict) -> dict:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = elastic.ElasticDataLoader(dataset, batch_size=32)
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @elastic.run
    def train(state: elastic.TorchState) -> dict:
        model = DistributedDataParallel(state.model, init_sync=False)
        loss = torch.zeros(())
        for epoch in state.loader.epochs(config["epochs"]):
            for images, labels in state.loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                time.sleep(config["pace"])
                state.commit()
            if elastic.rank() == 0:
                print(f"epoch {epoch}: loss {loss:.4f}, {elastic.size()} workers", flush=True)
        with torch.no_grad():
            images, labels = dataset.tensors
            accuracy = (state.model(images).argmax(1) == labels).float().mean().item()
        return {"loss": loss.item(), "accuracy": accuracy}

    return train(state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, as for a larger model")
    parser.add_argument("--discovery", help="ray: train on the nodes of the cluster")
    args = parser.parse_args()
    options = {"discovery": args.discovery} if args.discovery else {}
    config = {"epochs": args.epochs, "pace": args.pace}
    results = elastic.launch(train_loop, (config,), np=3, min_np=1, **options)
    print(f"{len(results)} workers: accuracy {results[0]['accuracy']:.4f}")
