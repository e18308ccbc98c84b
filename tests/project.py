"""A whole project of its own for a test: this one with tiny params, and the real tools."""

import contextlib
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ruamel.yaml import YAML

from benchmarks.sandbox import Sandbox

PARAMS = """\
corpus:
  sources:
    - from: path:texts/*.txt
      licence: CC0-1.0
      slots:
        prose: ["**/*"]
  val_fraction: 0.3

tokens:
  vocab_size: 300

prompts:
  lookup: {records: 2, filler: 3, questions: 2, keys: 4, values: 3, fillers: 2}
  train: 16
  val: 6

model:
  hidden_size: 16
  intermediate_size: 24
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 1
  max_position_embeddings: 64

pretrain_lordo:
  training:
    ranks: 2
    steps: 12
    sequence_length: 16
    global_batch: 8
    warmup_steps: 2
    log_every: 2
    eval_every: 6
    eval_sequences: 8
    checkpoint_every: 5
  arms:
    ddp:
      optimizer:
        lr: 1.0e-2
    lordo_global:
      method: local
      inner: lordo
      optimizer: {lr: 3.0e-2}
      low_rank: {rank: 4}
      sync: {every: 3, momentum_every: 6, variance_every: 6}
  study:
    lordo_ns:
      method: local
      inner: lordo_ns
      optimizer: {lr: 3.0e-2}
      momentum: bf16
      low_rank: {rank: 4, projection: frozen}
      sync: {every: 3, outer: nesterov, outer_momentum: 0.7, wire: int4, residual: weights}

pretrain_async:
  model:
    tie_word_embeddings: false
  training:
    steps: 12
    sequence_length: 16
    global_batch: 8
    warmup_steps: 2
    log_every: 2
    eval_every: 6
    eval_sequences: 8
    checkpoint_every: 5
  arms:
    async:
      stages: 2
      optimizer:
        optimizer: {lr: 5.0e-3}
        rotation: {nu: 0.5}
  study:
    ours_p8:
      stages: 3
      executor: simulator
      optimizer:
        optimizer: {lr: 5.0e-3}
        rotation: {nu: 0.5}

post_train:
  policy:
    model:
      hidden_size: 16
      intermediate_size: 24
      num_hidden_layers: 2
      num_attention_heads: 2
      num_key_value_heads: 1
      max_position_embeddings: 64
    warm_start: {stages: [[1, 0]], further: [2, 0], further_steps: 1, most_steps: 10}
  training:
    ranks: 2
    steps: 4
    prompts: 3
    warmup_steps: 1
    log_every: 1
    eval_every: 2
    eval_prompts: 5
    checkpoint_every: 2
  arms:
    exact:
      optimizer: {lr: 2.0e-3}
      rollout: {max_tokens: 3}
      learner: {group: 4}

launch:
  deadline_minutes: 10
  stop_seconds: 5
"""

SECRET = "hf_of-nobodys-" + "concern"  # not in one piece: this file is searched too

WORDS = "a river of small stones under the bridge carries cold light past old mills and gardens"


class Project(Sandbox):
    """A clone with params that train in seconds."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (root / "params.yaml").write_text(PARAMS)
        self._forget_other_arms("params.gpu.yaml")
        generator = random.Random(0)
        (root / "texts").mkdir()
        for index in range(40):
            words = generator.choices(WORDS.split(), k=120)
            (root / "texts" / f"{index:02}.txt").write_text(" ".join(words) + "\n")
        self.commit()

    def _forget_other_arms(self, profile: str) -> None:
        """A profile says what differs, so it may only name arms that are there."""
        yaml = YAML()
        ours, theirs = yaml.load(PARAMS), yaml.load(self.root / profile)
        for group in ("arms", "study"):
            arms = theirs["pretrain_lordo"][group]
            for name in set(arms) - set(ours["pretrain_lordo"][group]):
                del arms[name]
        yaml.dump(theirs, self.root / profile)

    @contextlib.contextmanager
    def serving(self, command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """`flows ui` or `flows serve` in a terminal of its own, once all is up."""
        process = self.start("./run", "-m", "flows", command, **variables)
        last = {"ui": "Prefect: http://127.0.0.1:4200\n", "serve": "Ctrl-C ends all\n"}[command]
        try:
            assert process.stdout is not None
            said = ""
            while not said.endswith(last):
                line = process.stdout.readline()
                assert line, said
                said += line
            assert "MLflow:  http://127.0.0.1:5000\nPrefect: http://127.0.0.1:4200\n" in said
            yield process
        finally:
            self.kill()
            process.wait()

    def set(self, old: str, new: str) -> None:
        """Change one line of params.yaml."""
        path = self.root / "params.yaml"
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
