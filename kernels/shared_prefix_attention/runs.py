"""How rows of queries are folded, and which runs of keys they meet.

Groups of query heads and rows of the batch become query rows of one call on the single prefix. They
are folded position by position: a block of rows then spans few positions, and most blocks of a
window's band need no mask.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.shared_prefix_attention.blocks import Band
from kernels.shared_prefix_attention.prefix import Prefix


@dataclass(frozen=True)
class Fold:
    """The sizes of a query `[batch, heads, tokens, dim]`, to fold it, and tensors like it, to rows.

    `shared` rows meet the prefix, `own` rows their own keys. Unfolding gives a view
    `[batch, kv_heads, group, tokens, dim]`.
    """

    batch: int
    heads: int
    tokens: int
    kv_heads: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def shared(self, x: Tensor) -> Tensor:
        """Rows `[kv_heads, tokens batch group, dim]`."""
        x = self._by_group(x).permute(1, 3, 0, 2, 4)
        return x.reshape(self.kv_heads, -1, x.shape[-1]).contiguous()

    def own(self, x: Tensor) -> Tensor:
        """Rows `[batch kv_heads, tokens group, dim]`."""
        x = self._by_group(x).permute(0, 1, 3, 2, 4)
        return x.reshape(self.batch * self.kv_heads, -1, x.shape[-1]).contiguous()

    def unfold_shared(self, x: Tensor) -> Tensor:
        x = x.view(self.kv_heads, self.tokens, self.batch, self.group, x.shape[-1])
        return x.permute(2, 0, 3, 1, 4)

    def unfold_own(self, x: Tensor) -> Tensor:
        x = x.view(self.batch, self.kv_heads, self.tokens, self.group, x.shape[-1])
        return x.permute(0, 1, 3, 2, 4)

    def _by_group(self, x: Tensor) -> Tensor:
        return x.view(self.batch, self.kv_heads, self.group, self.tokens, x.shape[-1])


@dataclass(frozen=True)
class Run:
    """Keys and values `[groups, keys, dim]` that rows see through a band."""

    key: Tensor
    value: Tensor
    band: Band | None  # None: every row sees every key
    grads: tuple[Tensor, Tensor] | None  # what the gradients of key and value are added to

    def __len__(self) -> int:
        return self.key.shape[1]

    def cut(self, start: int, stop: int, band: Band | None) -> "Run":
        """The keys start..stop-1 as a run of their own, still adding to the same gradients."""
        grads = self.grads and (self.grads[0][:, start:stop], self.grads[1][:, start:stop])
        return Run(self.key[:, start:stop], self.value[:, start:stop], band, grads)


def prefix_runs(prefix: Prefix, fold: Fold, window: int | None) -> list[Run]:
    """The prefix as the keys that a window's edge crosses, and those that every row sees."""
    size = len(prefix)
    grads = None
    if prefix.key_grad is not None and prefix.value_grad is not None:
        grads = prefix.key_grad, prefix.value_grad
    whole = Run(prefix.key, prefix.value, None, grads)
    if window is None:
        return [whole] if size else []
    first = min(size, max(0, size + 1 - window))  # the first key that the first token sees
    common = min(size, max(0, size + fold.tokens - window))  # ... that the last token sees
    runs = []
    if first < common:
        band = Band(size - first, fold.batch * fold.group, window)
        runs.append(whole.cut(first, common, band))
    if common < size:
        runs.append(whole.cut(common, size, None))
    return runs


def own_run(
    key: Tensor,
    value: Tensor,
    fold: Fold,
    window: int | None,
    grads: tuple[Tensor, Tensor] | None = None,
) -> Run:
    """A row's own keys `[batch, kv_heads, tokens, dim]`, causal; grads `[batch kv_heads, ...]`."""
    inside = window if window is not None and window < fold.tokens else None
    band = Band(0, fold.group, inside)
    return Run(key.flatten(0, 1), value.flatten(0, 1), band, grads)
