"""Small random models with one batch each, in float64, for the tests of whole programs.

`make(name, rows, **changes)` gives `(model, inputs)`, the same on every call. Labels are ignored
unevenly: the first row has none that count, the second three, the others nearly all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from captures import mark
from torch import Tensor, nn

__all__ = ["HUGGING_FACE", "KINDS", "make"]

Made = tuple[nn.Module, dict[str, Any]]

VOCAB = 515  # odd: no mesh divides it
TIME = 16


def make(name: str, rows: int = 4, **changes: Any) -> Made:
    """A model in training mode and keyword arguments for one batch.

    Args:
        name: a key of `HUGGING_FACE` or `KINDS`.
        rows: batch size.
        changes: settings in place of the small ones, as the config or the class names them.
    """
    torch.manual_seed(0)
    build = (HUGGING_FACE | KINDS)[name]
    model, inputs = build(rows, changes)
    for p in model.parameters():  # ones and zeros would hide a scale or a bias left out
        if p.dim() < 2:
            torch.nn.init.normal_(p, mean=1.0 if bool(p.eq(1).all()) else 0.0, std=0.1)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    mark(model, (name, repr(sorted(changes.items()))))
    return model.double().train(), inputs


def tokens(rows: int, vocab: int = VOCAB, time: int = TIME) -> Tensor:
    """Token numbers, (rows, time)."""
    return torch.randint(0, vocab, (rows, time))


def labels(rows: int, vocab: int = VOCAB, time: int = TIME) -> Tensor:
    """Labels (rows, time): none in the first row, three in the second, most in the others."""
    found = tokens(rows, vocab, time)
    found[0] = -100
    found[1, 3:] = -100
    found[2:, :2] = -100
    return found


def mask(rows: int, time: int = TIME) -> Tensor:
    """Attention mask (rows, time) of rows with different lengths."""
    lengths = torch.tensor([time - (5 * r) % (time - 3) for r in range(rows)])
    return (torch.arange(time) < lengths[:, None]).long()


# --- models of transformers --------------------------------------------------------------------


def _library() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="transformers")
    return transformers


def _bert(rows: int, changes: dict[str, Any]) -> Made:
    t = _library()
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    config = t.BertConfig(**{**sizes, **changes})
    n = config.vocab_size
    batch = {"input_ids": tokens(rows, n), "attention_mask": mask(rows), "labels": labels(rows, n)}
    return t.BertForMaskedLM(config), batch


def _gpt2(rows: int, changes: dict[str, Any]) -> Made:
    t = _library()
    sizes = {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip
    config = t.GPT2Config(**{**sizes, **changes})
    n = config.vocab_size
    return t.GPT2LMHeadModel(config), {"input_ids": tokens(rows, n), "labels": labels(rows, n)}


def _llama(rows: int, changes: dict[str, Any]) -> Made:
    t = _library()
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32,
    }  # fmt: skip
    config = t.LlamaConfig(**{**sizes, **changes})
    n = config.vocab_size
    batch = {"input_ids": tokens(rows, n), "attention_mask": mask(rows), "labels": labels(rows, n)}
    return t.LlamaForCausalLM(config), batch


def _t5(rows: int, changes: dict[str, Any]) -> Made:
    t = _library()
    sizes = {
        "vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8,
        "decoder_start_token_id": 0, "dropout_rate": 0.0,
    }  # fmt: skip
    config = t.T5Config(**{**sizes, **changes})
    n = config.vocab_size
    batch = {
        "input_ids": tokens(rows, n),
        "attention_mask": mask(rows),
        "labels": labels(rows, n, 12),
    }
    return t.T5ForConditionalGeneration(config), batch


def _vit(rows: int, changes: dict[str, Any]) -> Made:
    t = _library()
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_labels": 10,
    }  # fmt: skip
    config = t.ViTConfig(**{**sizes, **changes})
    kinds = torch.randint(0, config.num_labels, (rows,))
    kinds[0] = -100
    pixels = torch.randn(rows, 3, config.image_size, config.image_size)
    return t.ViTForImageClassification(config), {"pixel_values": pixels, "labels": kinds}


def _resnet(rows: int, changes: dict[str, Any]) -> Made:
    t = _library()
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 10}
    config = t.ResNetConfig(**{**sizes, **changes})
    kinds = torch.randint(0, config.num_labels, (rows,))
    kinds[0] = -100
    pixels = torch.randn(rows, 3, 32, 32)
    return t.ResNetForImageClassification(config), {"pixel_values": pixels, "labels": kinds}


# --- written by hand ---------------------------------------------------------------------------


class GPT(nn.Module):
    """Fused query-key-value, tied embedding, dropout everywhere, smoothing and class weights."""

    def __init__(
        self, vocab: int = VOCAB, width: int = 32, heads: int = 4, layers: int = 2,
        dropout: float = 0.0, smoothing: float = 0.0, weighted: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.dropout, self.smoothing = heads, dropout, smoothing
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "project": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("weights", torch.rand(vocab) + 0.5 if weighted else None)

    def attend(self, block: Any, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = block["qkv"](x).split(width, -1)
        q, k, v = (p.view(batch, time, self.heads, -1).transpose(1, 2) for p in parts)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return block["project"](y.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        def drop(t: Tensor) -> Tensor:
            return F.dropout(t, self.dropout, self.training)

        y = drop(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            y = y + drop(self.attend(block, block["norm1"](y)))
            y = y + drop(block["down"](F.gelu(block["up"](block["norm2"](y)))))
        logits = self.head(self.norm(y))
        if targets is None:
            return logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), self.weights, label_smoothing=self.smoothing
        )
        return logits, loss


def _gpt(rows: int, changes: dict[str, Any]) -> Made:
    n = changes.get("vocab", VOCAB)
    return GPT(**changes), {"x": tokens(rows, n), "targets": labels(rows, n)}


class UNet(nn.Module):
    """Convolutions down and up again, group norms, a skip connection; a mean squared error."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, image: Tensor, noise: Tensor) -> dict[str, Tensor]:
        x = F.silu(self.norm1(self.first(image + noise)))
        y = F.silu(self.norm2(self.down(x)))
        y = F.interpolate(F.max_pool2d(y, 2), scale_factor=2.0, mode="nearest")
        guess = self.last(torch.cat([x, self.up(y)], 1))
        return {"guess": guess, "loss": F.mse_loss(guess, noise)}


def _unet(rows: int, changes: dict[str, Any]) -> Made:
    shape = (rows, 3, 16, 16)
    return UNet(**changes), {"image": torch.randn(shape), "noise": torch.randn(shape)}


class Mixer(nn.Module):
    """Products along tokens and along channels, pooled to class scores."""

    def __init__(self, time: int = 9, width: int = 32, kinds: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.along = nn.ModuleList(nn.Linear(time, time) for _ in range(2))
        self.across = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 50), nn.GELU(), nn.Linear(50, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, kinds)

    def forward(self, image: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(image).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + self.along[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.across[i](self.norms[2 * i + 1](x))
        scores = self.head(x.mean(1))
        return F.cross_entropy(scores, kind, label_smoothing=0.1), scores


def _mixer(rows: int, changes: dict[str, Any]) -> Made:
    batch = {"image": torch.randn(rows, 3, 12, 12), "kind": torch.randint(0, 10, (rows,))}
    return Mixer(**changes), batch


class Waves(nn.Module):
    """One-dimensional convolutions with batch and instance norms; frozen and unused parameters."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, width, 5, padding=2)
        self.norm1 = nn.BatchNorm1d(width)
        self.second = nn.Conv1d(width, width, 3, padding=1, groups=4)
        self.norm2 = nn.InstanceNorm1d(width, affine=True)
        self.third = nn.Conv1d(width, width, 1)
        self.third.requires_grad_(False)
        self.norm3 = nn.BatchNorm1d(width, momentum=0.3)
        self.head = nn.Linear(width, 5)
        self.unused = nn.Linear(3, 3)

    def forward(self, wave: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.norm1(self.first(wave)))
        x = F.avg_pool1d(F.relu(self.norm2(self.second(x))), 2)
        x = self.norm3(self.third(x).mean(-1))
        scores = self.head(x)
        return F.nll_loss(scores.log_softmax(-1), kind), scores


def _waves(rows: int, changes: dict[str, Any]) -> Made:
    return Waves(**changes), {
        "wave": torch.randn(rows, 2, 24),
        "kind": torch.randint(0, 5, (rows,)),
    }


class Einsum(nn.Module):
    """Attention by einsum with an explicit softmax, and a KL divergence at the end."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        each = width // heads
        self.query = nn.Parameter(torch.randn(heads, width, each) * 0.2)
        self.key = nn.Parameter(torch.randn(heads, width, each) * 0.2)
        self.value = nn.Parameter(torch.randn(heads, width, each) * 0.2)
        self.out = nn.Parameter(torch.randn(heads, each, width) * 0.2)
        self.head = nn.Linear(width, 11)

    def forward(self, x: Tensor, teacher: Tensor) -> Tensor:
        q = torch.einsum("btw,hwe->bhte", x, self.query)
        k = torch.einsum("btw,hwe->bhte", x, self.key)
        v = torch.einsum("btw,hwe->bhte", x, self.value)
        weight = (torch.einsum("bhte,bhse->bhts", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        y = torch.einsum("bhts,bhse,hew->btw", weight, v, self.out)
        student = self.head(x + y).log_softmax(-1)
        return F.kl_div(student, teacher.softmax(-1), reduction="batchmean")


def _einsum(rows: int, changes: dict[str, Any]) -> Made:
    batch = {"x": torch.randn(rows, 8, 32), "teacher": torch.randn(rows, 8, 11)}
    return Einsum(**changes), batch


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over padded rows, a masked mean and binary labels."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 48, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 6)

    def forward(self, x: Tensor, keep: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        y = self.encoder(x, src_key_padding_mask=keep == 0)
        weight = keep.to(y.dtype).unsqueeze(-1)
        scores = self.head((y * weight).sum(1) / weight.sum(1))
        return F.binary_cross_entropy_with_logits(scores, wanted), scores


def _encoder(rows: int, changes: dict[str, Any]) -> Made:
    batch = {
        "x": torch.randn(rows, TIME, 32),
        "keep": mask(rows),
        "wanted": torch.randint(0, 2, (rows, 6)).float(),
    }
    return Encoder(**changes), batch


class Recommender(nn.Module):
    """Two towers from several inputs; the loss contrasts every row with every other."""

    def __init__(self, users: int = 101, items: int = 57, width: int = 16) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width, padding_idx=0)
        self.left = nn.Sequential(nn.Linear(width + 3, 24), nn.ReLU(), nn.Linear(24, width))
        self.right = nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, width))

    def forward(self, user: Tensor, about: Tensor, history: Tensor, item: Tensor) -> Tensor:
        seen = self.item(history).sum(1) / (history != 0).sum(1, keepdim=True).clamp(min=1)
        left = self.left(torch.cat([self.user(user) + seen, about], -1))
        right = self.right(self.item(item))
        scores = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T
        return F.cross_entropy(scores / 0.1, torch.arange(len(user), device=user.device))


def _recommender(rows: int, changes: dict[str, Any]) -> Made:
    history = torch.randint(1, 57, (rows, 7)) * mask(rows, 7)
    batch = {
        "user": torch.randint(0, 101, (rows,)),
        "about": torch.randn(rows, 3),
        "history": history,
        "item": torch.randint(1, 57, (rows,)),
    }
    return Recommender(**changes), batch


class Regression(nn.Module):
    """A perceptron for real targets with a weight decay in the loss itself."""

    def __init__(self, width: int = 30) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(7, width), nn.Softplus(), nn.Linear(width, width), nn.ELU(),
            nn.Linear(width, 2),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        decay = sum(p.square().sum() for p in self.parameters())
        return F.mse_loss(self.net(x), y) + F.huber_loss(self.net(-x), y) + 1e-3 * decay


def _regression(rows: int, changes: dict[str, Any]) -> Made:
    return Regression(**changes), {"x": torch.randn(rows, 7), "y": torch.randn(rows, 2)}


class Autoencoder(nn.Module):
    """A variational autoencoder: normal noise, a reconstruction and a divergence."""

    def __init__(self, width: int = 24, code: int = 6) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2 * code))
        self.decode = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        guess = self.decode(code)
        apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(guess, x) + 0.1 * apart, guess


def _autoencoder(rows: int, changes: dict[str, Any]) -> Made:
    return Autoencoder(**changes), {"x": torch.rand(rows, 20)}


HUGGING_FACE: dict[str, Callable[[int, dict[str, Any]], Made]] = {
    "bert": _bert, "gpt2": _gpt2, "llama": _llama, "t5": _t5, "vit": _vit, "resnet": _resnet,
}  # fmt: skip
KINDS: dict[str, Callable[[int, dict[str, Any]], Made]] = {
    "gpt": _gpt, "unet": _unet, "mixer": _mixer, "waves": _waves, "einsum": _einsum,
    "encoder": _encoder, "recommender": _recommender, "regression": _regression,
    "autoencoder": _autoencoder,
}  # fmt: skip
