"""Every rank ends with the same projection.

All ranks compute Q from the same pseudo-gradient, which costs no bytes; but another processor,
LAPACK or number of threads may give other signs or another basis where singular values are close,
and averaged moments would be corrupted silently. So ranks compare a hash of what they found, and
only if it differs anywhere, rank 0's is broadcast.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from algorithms.common.comm import Comm

log = logging.getLogger(__name__)

DIGEST_BYTES = 8


def same_on_all_ranks(comm: Comm, tag: str) -> Callable[[Tensor], Tensor]:
    """A function of a flat tensor, called by all ranks: it returns one that is equal on all."""

    def agree(flat: Tensor) -> Tensor:
        data = flat.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
        digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(comm.device)
        digests = comm.all_gather(mine, tag)
        if not all(torch.equal(other, digests[0]) for other in digests):
            if comm.rank == 0:
                log.warning("ranks found other projections; all take that of rank 0")
            flat = flat.clone()
            comm.broadcast(flat, 0, tag)
        return flat

    return agree
