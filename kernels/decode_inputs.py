"""Inputs of a captured decode step, made on its device from what the batch keeps there.

A token that the step before has drawn, and that the host does not know yet, is ~i: the i-th of
`drawn`. Rows beyond the D sequences are padding: context 1, in a scratch page.
"""

from dataclasses import dataclass

import torch

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kernels import backend


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """D sequences, one new token each; int64, all on the device. Triton's kernels also take the
    first three in pinned memory."""

    rows: torch.Tensor  # [D] of `tables`
    contexts: torch.Tensor  # [D] tokens after the step
    tokens: torch.Tensor  # [D] ids, or ~i
    drawn: torch.Tensor  # [S] ids
    tables: torch.Tensor  # [rows, page groups, blocks]: pages


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a graph reads, R rows; int64."""

    token_ids: torch.Tensor  # [R]
    positions: torch.Tensor  # [R]
    context_lens: torch.Tensor  # [R]
    slots: torch.Tensor  # [page groups, R]
    tables: torch.Tensor  # [page groups, R, blocks]; beyond a context: anything


def fill_inputs(inputs: DecodeInputs, decodes: DecodeRows, scratch_page: int) -> None:
    if backend.uses_triton(inputs.token_ids):
        from paceline.kernels.gpu import decode_inputs

        decode_inputs.fill_inputs(inputs, decodes, scratch_page)
    else:
        fill_inputs_torch(inputs, decodes, scratch_page)


def write_tables(tables: torch.Tensor, places: torch.Tensor, pages: torch.Tensor) -> None:
    """tables.view(-1)[places] = pages; see DecodeRows for where the last two may lie."""
    if not len(places):
        return
    if backend.uses_triton(tables):
        from paceline.kernels.gpu import decode_inputs

        decode_inputs.write_tables(tables.view(-1), places, pages)
    else:
        tables.view(-1).index_copy_(0, places, pages)


def fill_inputs_torch(inputs: DecodeInputs, decodes: DecodeRows, scratch_page: int) -> None:
    num = len(decodes.rows)
    last = decodes.contexts - 1
    width = min(inputs.tables.shape[2], decodes.tables.shape[2])
    tables = decodes.tables[:, :, :width][decodes.rows].transpose(0, 1)
    blocks = (last // PAGE_TOKENS).expand(len(tables), num)[:, :, None]
    slots = tables.gather(2, blocks)[:, :, 0] * PAGE_TOKENS + last % PAGE_TOKENS
    for place, values, padding in (
        (inputs.token_ids, known_tokens(decodes.tokens, decodes.drawn), 0),
        (inputs.positions, last, 0),
        (inputs.context_lens, decodes.contexts, 1),
    ):
        place[:num] = values
        place[num:] = padding
    inputs.slots[:, :num] = slots
    inputs.slots[:, num:] = scratch_page * PAGE_TOKENS
    inputs.tables[:, :num, :width] = tables
    inputs.tables[:, num:] = scratch_page


def known_tokens(tokens: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Ids, with those filled in that are ~i."""
    return torch.where(tokens < 0, drawn[(-1 - tokens).clamp_(min=0)], tokens)
