"""Two workers whose values begin to differ by rank after the first world has begun."""

import elasticstate as elastic

state = elastic.ObjectState(step=0, seen=0)


@elastic.run
def train(state: elastic.ObjectState) -> None:
    while state.step < 3:
        state.step += 1
        state.seen += elastic.rank()
        state.commit()
    print(f"rank {elastic.rank()} has trained")


train(state)
