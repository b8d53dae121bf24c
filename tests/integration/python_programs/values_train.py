"""A training without a framework: each step takes a while, and its loss is one over the step."""

import time


class State:
    def __init__(self):
        self.step = 0


class Trainer:
    def __init__(self):
        self.state = State()
        self.epoch = "first"
        self.loss = 1.0


def forward():
    time.sleep(0.02)


def train(trainer):
    while True:
        trainer.state.step += 1
        trainer.loss = 1 / trainer.state.step
        if trainer.state.step == 1:
            print("ready", flush=True)
        forward()


train(Trainer())
