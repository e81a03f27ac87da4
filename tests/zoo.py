"""A zoo of models: every kind of model that people train, each in a size for CI and in a full one.

:data:`ZOO` is the table. Weights are random, drawn from configurations; models are in train mode, with
dropout where they have any. A step of the full size takes one to three seconds on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests import zoo_models as own
from tests.models import Built, fresh_batch


@dataclass(frozen=True)
class Entry:
    """One kind of model.

    Attributes:
        build: returns ``(model, sample)``. small, full: its keyword arguments.
        step, loss: as ``budgetopt.fit`` takes them.
        fresh: ``fresh(sample, seed)`` → other data of the same structure and sizes.
        routed: operators and sizes depend on the data.
    """

    build: Callable[..., Built]
    small: dict[str, Any]
    full: dict[str, Any]
    step: Callable[[Any, Any], Tensor] | None = None
    loss: Callable[[Any], Tensor] | None = None
    fresh: Callable[[Any, int], Any] = fresh_batch
    routed: bool = False

    @property
    def how(self) -> dict[str, Any]:
        """How to train it, as keyword arguments of ``fit``, ``profile`` and the tests' meters."""
        return {"step": self.step, "loss": self.loss}


def _seeded(model: Callable[[], Any], sample: Callable[[], Any]) -> Built:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model().train(), sample()


def _tokens(vocabulary: int, batch: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def vit(width: int, layers: int, pixels: int, patch: int, batch: int) -> Built:
    """``pixel_values`` of (batch, 3, pixels, pixels) and ``labels`` out of ten."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        image_size=pixels,
        patch_size=patch,
        num_labels=10,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return _seeded(
        lambda: ViTForImageClassification(config),
        lambda: {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(10, (batch,))},
    )


def bert(width: int, layers: int, vocabulary: int, batch: int, length: int) -> Built:
    """Masked language model; every row but the first is padded at its end, the labels there are -100."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
    )
    return _seeded(lambda: BertForMaskedLM(config), lambda: _padded(vocabulary, batch, length))


def _padded(vocabulary: int, batch: int, length: int) -> dict[str, Tensor]:
    lengths = torch.randint(length // 2, length, (batch, 1))
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    tokens = torch.randint(1, vocabulary, (batch, length))
    chosen = (torch.rand(batch, length) < 0.15) & (mask > 0)
    chosen[:, 0] = True
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.where(chosen, tokens, -100)}


def fresh_padded(sample: Any, seed: int) -> dict[str, Tensor]:
    """Other tokens, other lengths: permuting the mask would scatter the padding."""
    batch, length = sample["input_ids"].shape
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _padded(int(sample["input_ids"].max()) + 1, batch, length)


def llama(width: int, layers: int, vocabulary: int, batch: int, length: int) -> Built:
    """Four query heads share two heads of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=3 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        attention_dropout=0.1,
        use_cache=False,
    )
    return _seeded(lambda: LlamaForCausalLM(config), lambda: _tokens(vocabulary, batch, length))


def t5(width: int, layers: int, vocabulary: int, batch: int, length: int) -> Built:
    """Encoder and decoder; the labels are half as long as the input."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=4,
        vocab_size=vocabulary,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _seeded(
        lambda: T5ForConditionalGeneration(config),
        lambda: {
            "input_ids": torch.randint(vocabulary, (batch, length)),
            "labels": torch.randint(vocabulary, (batch, length // 2)),
        },
    )


def mixtral(width: int, layers: int, vocabulary: int, batch: int, length: int, experts: str) -> Built:
    """Eight experts, two per token; ``experts="eager"`` loops over those that were hit."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * width,
        vocab_size=vocabulary,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        use_cache=False,
        experts_implementation=experts,
    )
    return _seeded(lambda: MixtralForCausalLM(config), lambda: _tokens(vocabulary, batch, length))


def mamba(width: int, layers: int, vocabulary: int, batch: int, length: int) -> Built:
    """Selective state spaces, the recurrence a loop over the tokens."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        state_size=8,
        use_cache=False,
    )
    return _seeded(lambda: MambaForCausalLM(config), lambda: _tokens(vocabulary, batch, length))


def unet(channels: int, pixels: int, batch: int) -> Built:
    """A denoiser with attention at its lowest level; the sample has images, noise and times."""
    from diffusers import UNet2DModel

    return _seeded(
        lambda: UNet2DModel(
            sample_size=pixels,
            block_out_channels=(channels, 2 * channels),
            layers_per_block=2,
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            dropout=0.1,
        ),
        lambda: {
            "images": torch.randn(batch, 3, pixels, pixels),
            "noise": torch.randn(batch, 3, pixels, pixels),
            "times": torch.randint(1000, (batch,)),
        },
    )


def denoising_step(model: Any, sample: Any) -> Tensor:
    """Mean square of the error in the noise that the model finds in noisy images."""
    share = (sample["times"] / 1000).view(-1, 1, 1, 1)
    noisy = (1 - share) * sample["images"] + share * sample["noise"]
    return torch.nn.functional.mse_loss(model(noisy, sample["times"]).sample, sample["noise"])


def _text(width: int, layers: int, vocabulary: int, batch: int, length: int) -> dict[str, Any]:
    return {"width": width, "layers": layers, "vocabulary": vocabulary, "batch": batch, "length": length}


ZOO: dict[str, Entry] = {
    "vit": Entry(
        vit,
        {"width": 64, "layers": 2, "pixels": 32, "patch": 8, "batch": 8},
        {"width": 384, "layers": 8, "pixels": 128, "patch": 16, "batch": 32},
    ),
    "bert": Entry(bert, _text(64, 2, 128, 4, 32), _text(384, 8, 4000, 8, 256), fresh=fresh_padded),
    "llama": Entry(llama, _text(64, 2, 128, 4, 32), _text(384, 8, 4000, 8, 256)),
    "t5": Entry(t5, _text(64, 2, 128, 4, 32), _text(384, 5, 4000, 8, 256)),
    "mixtral": Entry(
        mixtral,
        _text(64, 2, 128, 4, 32) | {"experts": "grouped_mm"},
        _text(256, 6, 4000, 8, 256) | {"experts": "grouped_mm"},
    ),
    "mixtral eager": Entry(
        mixtral,
        _text(64, 2, 128, 4, 32) | {"experts": "eager"},
        _text(256, 6, 4000, 8, 256) | {"experts": "eager"},
        routed=True,
    ),
    "mamba": Entry(mamba, _text(32, 2, 64, 2, 10), _text(256, 6, 4000, 8, 64)),
    "unet": Entry(
        unet,
        {"channels": 16, "pixels": 16, "batch": 2},
        {"channels": 64, "pixels": 64, "batch": 2},
        step=denoising_step,
    ),
    "lstm": Entry(own.lstm, _text(32, 2, 64, 4, 24), _text(512, 3, 4000, 24, 128), step=own.next_token_step),
    "gan": Entry(
        own.gan,
        {"channels": 8, "doublings": 2, "latent": 16, "batch": 8},
        {"channels": 32, "doublings": 4, "latent": 64, "batch": 32},
        step=own.adversarial_step,
    ),
    "two towers": Entry(
        own.two_towers,
        {"width": 32, "depth": 2, "vocabulary": 64, "pixels": 32, "batch": 8, "length": 16},
        {"width": 384, "depth": 6, "vocabulary": 4000, "pixels": 64, "batch": 24, "length": 64},
        step=own.contrastive_step,
    ),
    "functions": Entry(
        own.functions,
        {"depth": 2, "width": 64, "heads": 4, "batch": 4, "length": 32},
        {"depth": 8, "width": 384, "heads": 6, "batch": 8, "length": 256},
        loss=own.squared_loss,
    ),
    "gpt2 adapted": Entry(
        own.gpt2_adapted,
        _text(64, 2, 128, 4, 32) | {"rank": 4},
        _text(384, 8, 4000, 8, 256) | {"rank": 8},
    ),
}
