import elasticstate as elastic


def train(steps):
    return steps


if __name__ == "__main__":
    print(elastic.launch(train, 5, np=2))
