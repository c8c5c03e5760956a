"""A small GPT, written for one device; nothing in it knows of autopar."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model; the defaults make about 0.8M parameters over bytes."""

    vocab: int = 256
    block: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) to the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each row."""
        batch, time, _ = x.shape
        query, key, value = (
            layer(x).view(batch, time, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """One layer, (batch, time, width) to the same."""
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Tokens (batch, time) to the mean cross-entropy, or to logits where there are no targets."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight  # tied
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("project.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * config.layers) if deep else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss, a scalar, or logits (batch, time, vocab)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
