"""Trees of tokens, as the user gives them and as the engine runs them.

A node owns its tokens and is *fed* the last token before it and all of its own but the last, so
that every token's log-probability has exactly one owner, at each fork as well. The root is fed all
of its tokens but the last: a prompt x_1..x_P leaves the state of x_1..x_{P-1}, and x_P is the first
input of every branch.

Several prompts of equal length may stand at the root, to be run as one batch. Then there are only
leaves below, each of which says which prompt it follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from algorithms.branch_replay.config import ReplayConfig
from algorithms.common.errors import InputError


@dataclass
class Node:
    """Tokens int64 [n] and what may follow them; at the root also [prompts, n]. `scored`: its
    tokens' log-probabilities are part of the loss (a model's turn); a prompt or a user's turn is
    not scored."""

    tokens: Tensor
    children: list[Node] = field(default_factory=list)
    scored: bool = True
    behind: int | None = None
    """Of several prompts, which it follows."""


def group(prompt: Tensor, responses: Sequence[Tensor | Node]) -> Node:
    """The tree of a prompt and the responses to it, or the nodes below it."""
    children = [r if isinstance(r, Node) else Node(r) for r in responses]
    return Node(prompt, children, scored=False)


def copied(node: Node) -> Node:
    """A tree whose tokens nobody else writes to."""
    children = [copied(child) for child in node.children]
    return Node(node.tokens.clone(), children, node.scored, node.behind)


@dataclass
class Segment:
    """Inputs that are run at once: a piece of at most `chunk` tokens of a node."""

    start: int
    """Inputs before this one on the path from the root."""
    inputs: Tensor
    """int64 [n], of several prompts [prompts, n]."""
    targets: Tensor | None
    """int64 [n], of a scored node."""
    offset: int
    """Of its log-probabilities in the vector of all."""
    gradient: bool
    """Whether the loss is differentiated through it."""
    prompt: bool
    """Whether it is a piece of the root, whose state outlives a pass."""
    children: list[Segment] = field(default_factory=list)
    branches: int = 1
    """Leaves of the user's tree that it is a part of."""
    behind: int = 0
    """Of several prompts, which it follows."""

    @property
    def end(self) -> int:
        return self.start + self.inputs.shape[-1]

    @property
    def rows(self) -> Tensor:
        """Inputs of a node, int64 [prompts, n]."""
        return self.inputs.view(-1, self.inputs.shape[-1])


@dataclass
class Plan:
    """A tree as segments."""

    roots: list[Segment]
    """One, but for a root without inputs (a prompt of one token): then its children."""
    scored: int
    """How many log-probabilities there are."""
    paths: list[list[tuple[int, int]]]
    """For each leaf, from left to right: (offset, length) of the scored nodes on its path."""
    longest: int
    """Largest number of inputs that a branch has in front of it."""

    def branches(self, log_probs: Tensor) -> list[Tensor]:
        """Cut the vector of all log-probabilities into one of each leaf's path."""
        return [
            torch.cat([log_probs[offset : offset + n] for offset, n in path])
            if path
            else log_probs[:0]
            for path in self.paths
        ]


def plan(root: Node, config: ReplayConfig, offset: int = 0) -> Plan:
    """Cut `root` into segments; its log-probabilities start at `offset` of the vector of all.

    Raises `InputError` for a root without tokens, for a scored root, and for what cannot be below
    several prompts.
    """
    return _Planner(config, offset).plan(root)


class _Planner:
    def __init__(self, config: ReplayConfig, offset: int) -> None:
        self.config = config
        self.offset = offset
        self.paths: list[list[tuple[int, int]]] = []

    def plan(self, root: Node) -> Plan:
        if root.tokens.numel() == 0:
            raise InputError("prompt: must have at least one token")
        if root.scored:
            raise InputError("prompt: the root of a tree cannot be scored")
        first = self.offset
        n = root.tokens.shape[-1]
        below: list[Segment] = []
        if root.tokens.ndim == 2:
            below = self._behind(root, n - 1)
        elif any(child.behind is not None for child in root.children):
            raise InputError("responses: say which prompt they are behind, but there is one")
        elif root.children:
            below = self._children(root, n - 1, root.tokens[-1:], [])
        pieces = self._pieces(0, root.tokens[..., :-1], None, self._open_chunks(root), prompt=True)
        segments = _chain(pieces, below, len(self.paths))
        longest = max((s.start for s in walk(segments)), default=0)
        return Plan(segments, self.offset - first, self.paths, longest)

    def _open_chunks(self, root: Node) -> int:
        """How many of the prompt's last pieces the gradient passes through."""
        if self.config.mode == "exact":
            return root.tokens.shape[-1]
        return self.config.truncated_chunks

    def _behind(self, root: Node, start: int) -> list[Segment]:
        """What follows several prompts: leaves, each in one piece."""
        prompts = len(root.tokens)
        if self.config.aux_loss:
            raise InputError("aux_loss: must be 0 with several prompts in one")
        below = []
        for i, child in enumerate(root.children):
            if child.behind is None or child.behind not in range(prompts):
                said = f"behind is {child.behind}, must be one of {prompts} prompts"
                raise InputError(f"responses[{i}]: {said}, counted from 0")
            if child.children or len(child.tokens) > self.config.chunk:
                raise InputError(
                    f"responses[{i}]: behind several prompts a response has no nodes below and at "
                    f"most chunk ({self.config.chunk}) tokens"
                )
            for segment in self._node(child, start, root.tokens[child.behind, -1:], []):
                below.append(replace(segment, behind=child.behind))
        return below

    def _children(
        self, node: Node, start: int, last: Tensor, path: list[tuple[int, int]]
    ) -> list[Segment]:
        if not node.children:
            self.paths.append(path)
            return []
        return [s for child in node.children for s in self._node(child, start, last, path)]

    def _node(
        self, node: Node, start: int, last: Tensor, path: list[tuple[int, int]]
    ) -> list[Segment]:
        n = len(node.tokens)
        before = len(self.paths)
        pieces: list[Segment] = []
        if n:
            inputs = torch.cat([last, node.tokens[:-1]])
            pieces = self._pieces(start, inputs, node.tokens if node.scored else None, n)
            last = node.tokens[-1:]
            if node.scored:
                path = [*path, (pieces[0].offset, n)]
        below = self._children(node, start + n, last, path)
        return _chain(pieces, below, len(self.paths) - before)

    def _pieces(
        self,
        start: int,
        inputs: Tensor,
        targets: Tensor | None,
        open_chunks: int,
        prompt: bool = False,
    ) -> list[Segment]:
        chunk = self.config.chunk
        cuts = range(0, inputs.shape[-1], chunk)
        pieces = []
        for i, cut in enumerate(cuts):
            piece = Segment(
                start=start + cut,
                inputs=inputs[..., cut : cut + chunk],
                targets=None if targets is None else targets[cut : cut + chunk],
                offset=self.offset,
                gradient=len(cuts) - i <= open_chunks,
                prompt=prompt,
            )
            if targets is not None:
                self.offset += len(inputs[cut : cut + chunk])
            pieces.append(piece)
        return pieces


def _chain(pieces: list[Segment], below: list[Segment], branches: int) -> list[Segment]:
    """Hang each piece below the one before it, and `below` under the last."""
    for piece in pieces:
        piece.branches = branches
    for piece in reversed(pieces):
        piece.children = below
        below = [piece]
    return below


def walk(segments: list[Segment]) -> Iterator[Segment]:
    """All segments at and below `segments`."""
    stack = list(reversed(segments))
    while stack:
        segment = stack.pop()
        yield segment
        stack.extend(reversed(segment.children))
