"""A dozen good models on the Hugging Face Hub, with what their authors published about them.

Nothing here was measured by m1clip. Every figure has its source; None means that none was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["openclip", "transformers"]
Loader = Literal["m1clip", "openclip"]

# Sources of more than one figure.
OPENCLIP_RESULTS = "github.com/mlfoundations/open_clip, docs/openclip_results.csv"
OPENCLIP_PROFILE = "github.com/mlfoundations/open_clip, docs/model_profile.csv"
TINYCLIP_README = "github.com/wkcn/TinyCLIP, README.md"
MOBILECLIP2_CARD = "huggingface.co/apple/MobileCLIP2-S0, README.md"
SIGLIP2_README = "github.com/google-research/big_vision, configs/proj/image_text/README_siglip2.md"
SIGLIP2_LANGUAGES = "109 languages (arXiv 2502.14786)"
HUB_FILES = "file list of the repository on the Hub"
FROM_SIZES = "computed from the sizes in its config"
FLOAT32 = "computed: 4 bytes per parameter"
ENGLISH = "English"


@dataclass(frozen=True)
class CatalogModel:
    """A model on the Hub that `m1clip download` knows by a short name."""

    name: str
    repository: str  # owner/name on the Hub
    layout: Layout  # whose files these are
    loader: Loader  # m1clip reads it by itself, or needs open_clip (the extra openclip)
    image_size: int  # side in pixels
    parameters: float  # millions, of both towers
    parameters_source: str
    megabytes: float  # of the weights file; `download` shows what the Hub reports
    megabytes_source: str
    license: str  # as its model card says; read it before you use the model commercially
    languages: str
    imagenet: float | None  # zero-shot top-1 accuracy on ImageNet, percent, as published
    imagenet_source: str
    note: str = ""


@dataclass(frozen=True)
class CatalogTower:
    """A tower on the Hub that --image-tower or --text-tower accepts by a short name."""

    name: str
    repository: str
    side: Literal["image", "text"]
    image_size: int  # side in pixels; 0 for texts
    parameters: float  # millions
    megabytes: float
    license: str
    note: str
    parameters_source: str = FROM_SIZES
    megabytes_source: str = FLOAT32


TOWER_CATALOG: dict[str, CatalogTower] = {
    tower.name: tower
    for tower in (
        CatalogTower(
            name="dinov2-small",
            repository="facebook/dinov2-with-registers-small",
            side="image",
            image_size=224,
            parameters=22.1,
            megabytes=88,
            license="Apache-2.0",
            note="DINOv2 ViT-S/14 with registers",
        ),
        CatalogTower(
            name="gte-small",
            repository="thenlper/gte-small",
            side="text",
            image_size=0,
            parameters=33.4,
            megabytes=134,
            license="MIT",
            note="a BERT of 12 layers, with the tokens of MiniLM; English",
        ),
    )
}

CATALOG: dict[str, CatalogModel] = {
    model.name: model
    for model in (
        CatalogModel(
            name="mobileclip2-s0",
            repository="timm/MobileCLIP2-S0-OpenCLIP",
            layout="openclip",
            loader="openclip",
            image_size=256,
            parameters=74.8,
            parameters_source=MOBILECLIP2_CARD,
            megabytes=300,
            megabytes_source=HUB_FILES,
            license="apple-amlr",
            languages=ENGLISH,
            imagenet=71.5,
            imagenet_source=MOBILECLIP2_CARD,
            note="small and fast; research license",
        ),
        CatalogModel(
            name="tinyclip-39m-16",
            repository="wkcn/TinyCLIP-ViT-39M-16-Text-19M-YFCC15M",
            layout="transformers",
            loader="m1clip",
            image_size=224,
            parameters=83.1,
            parameters_source=FROM_SIZES,
            megabytes=332,
            megabytes_source=FLOAT32,
            license="MIT",
            languages=ENGLISH,
            imagenet=63.5,
            imagenet_source=TINYCLIP_README,
            note="small, with a permissive license",
        ),
        CatalogModel(
            name="mobileclip2-s2",
            repository="timm/MobileCLIP2-S2-OpenCLIP",
            layout="openclip",
            loader="openclip",
            image_size=256,
            parameters=99.1,
            parameters_source=MOBILECLIP2_CARD,
            megabytes=398,
            megabytes_source=HUB_FILES,
            license="apple-amlr",
            languages=ENGLISH,
            imagenet=77.2,
            imagenet_source=MOBILECLIP2_CARD,
            note="best accuracy for its size; research license",
        ),
        CatalogModel(
            name="tinyclip-61m-32",
            repository="wkcn/TinyCLIP-ViT-61M-32-Text-29M-LAION400M",
            layout="transformers",
            loader="m1clip",
            image_size=224,
            parameters=115.5,
            parameters_source="computed from the size of its file",
            megabytes=462,
            megabytes_source=HUB_FILES,
            license="MIT",
            languages=ENGLISH,
            imagenet=62.4,
            imagenet_source=TINYCLIP_README,
            note="fast: patches of 32 pixels",
        ),
        CatalogModel(
            name="openai-vit-b-32",
            repository="timm/vit_base_patch32_clip_224.openai",
            layout="openclip",
            loader="m1clip",
            image_size=224,
            parameters=151.28,
            parameters_source=OPENCLIP_PROFILE,
            megabytes=605,
            megabytes_source=HUB_FILES,
            license="Apache-2.0",
            languages=ENGLISH,
            imagenet=63.3,
            imagenet_source=OPENCLIP_RESULTS,
            note="the original CLIP",
        ),
        CatalogModel(
            name="laion-vit-b-32",
            repository="laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
            layout="openclip",
            loader="m1clip",
            image_size=224,
            parameters=151.28,
            parameters_source=OPENCLIP_PROFILE,
            megabytes=605,
            megabytes_source=FLOAT32,
            license="MIT",
            languages=ENGLISH,
            imagenet=66.6,
            imagenet_source=OPENCLIP_RESULTS,
            note="fast: patches of 32 pixels",
        ),
        CatalogModel(
            name="openai-vit-b-16",
            repository="timm/vit_base_patch16_clip_224.openai",
            layout="openclip",
            loader="m1clip",
            image_size=224,
            parameters=149.62,
            parameters_source=OPENCLIP_PROFILE,
            megabytes=598,
            megabytes_source=FLOAT32,
            license="Apache-2.0",
            languages=ENGLISH,
            imagenet=68.3,
            imagenet_source=OPENCLIP_RESULTS,
            note="the original CLIP",
        ),
        CatalogModel(
            name="datacomp-vit-b-16",
            repository="laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K",
            layout="openclip",
            loader="m1clip",
            image_size=224,
            parameters=149.62,
            parameters_source=OPENCLIP_PROFILE,
            megabytes=598,
            megabytes_source=FLOAT32,
            license="MIT",
            languages=ENGLISH,
            imagenet=73.5,
            imagenet_source=OPENCLIP_RESULTS,
            note="a good default on a GPU",
        ),
        CatalogModel(
            name="dfn-vit-b-16",
            repository="apple/DFN2B-CLIP-ViT-B-16",
            layout="openclip",
            loader="m1clip",
            image_size=224,
            parameters=149.62,
            parameters_source=OPENCLIP_PROFILE,
            megabytes=598,
            megabytes_source=FLOAT32,
            license="Apple (model card)",
            languages=ENGLISH,
            imagenet=76.2,
            imagenet_source=OPENCLIP_RESULTS,
            note="best plain CLIP of this size",
        ),
        CatalogModel(
            name="siglip-b-16",
            repository="google/siglip-base-patch16-224",
            layout="transformers",
            loader="m1clip",
            image_size=224,
            parameters=203.16,
            parameters_source=OPENCLIP_PROFILE,
            megabytes=813,
            megabytes_source=HUB_FILES,
            license="Apache-2.0",
            languages=ENGLISH,
            imagenet=76.0,
            imagenet_source=OPENCLIP_RESULTS,
            note="SigLIP",
        ),
        CatalogModel(
            name="siglip2-b-32",
            repository="google/siglip2-base-patch32-256",
            layout="transformers",
            loader="m1clip",
            image_size=256,
            parameters=376.9,
            parameters_source=FROM_SIZES,
            megabytes=1507,
            megabytes_source=FLOAT32,
            license="Apache-2.0",
            languages=SIGLIP2_LANGUAGES,
            imagenet=74.0,
            imagenet_source=SIGLIP2_README,
            note="multilingual; fast: patches of 32 pixels",
        ),
        CatalogModel(
            name="siglip2-b-16",
            repository="google/siglip2-base-patch16-224",
            layout="transformers",
            loader="m1clip",
            image_size=224,
            parameters=375.2,
            parameters_source=FROM_SIZES,
            megabytes=1501,
            megabytes_source=FLOAT32,
            license="Apache-2.0",
            languages=SIGLIP2_LANGUAGES,
            imagenet=78.2,
            imagenet_source=SIGLIP2_README,
            note="multilingual, and best of its size",
        ),
        CatalogModel(
            name="datacomp-vit-l-14",
            repository="laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K",
            layout="openclip",
            loader="m1clip",
            image_size=224,
            parameters=427.62,
            parameters_source=OPENCLIP_PROFILE,
            megabytes=1710,
            megabytes_source=HUB_FILES,
            license="MIT",
            languages=ENGLISH,
            imagenet=79.2,
            imagenet_source=OPENCLIP_RESULTS,
            note="for a GPU",
        ),
    )
}
