"""How each family of `armature.components.models.families` is adapted, under the same names."""

from __future__ import annotations

from armature.components.adapters.joins import OffsetCat, cat, pad_cat
from armature.components.adapters.spec import FamilySpec
from armature.components.models.families import FAMILIES
from armature.components.registry import Registry

QWEN_VL = FamilySpec(
    feature_token=".image_token",
    joins={"pixel_values": cat, "image_grid_thw": cat},  # patches of all images; one grid per image
    type_ids="mm_token_type_ids",  # 3-D rotary positions come from them; Qwen2.5-VL falls back to 1-D in silence
    reserved=FAMILIES["qwen2-vl"].image_tokens,
)

LLAVA = FamilySpec(
    feature_token=".image_token",
    joins={"pixel_values": cat},  # one per image
    reserved=FAMILIES["llava"].image_tokens,
)

LLAVA_NEXT = FamilySpec(
    feature_token=".image_token",
    joins={"pixel_values": pad_cat, "image_sizes": cat},  # (images, most tiles, 3, H, W); original sizes
    reserved=FAMILIES["llava-next"].image_tokens,
)

PIXTRAL = FamilySpec(
    feature_token=".image_token",
    joins={"pixel_values": pad_cat, "image_sizes": cat},  # (images, 3, largest H, largest W); sizes before padding
    reserved=FAMILIES["pixtral"].image_tokens,
)

INTERNVL = FamilySpec(
    feature_token=".image_token",
    joins={"pixel_values": cat},  # tiles of all images
    reserved=FAMILIES["internvl"].image_tokens,
)

GEMMA3 = FamilySpec(
    feature_token=".tokenizer.image_token",  # the processor's own image_token is the one that begins an image
    joins={"pixel_values": cat},
    type_ids="token_type_ids",  # attention is bidirectional inside an image
    reserved=FAMILIES["gemma3"].image_tokens,
)

MOLMO2 = FamilySpec(
    feature_token="<im_patch>",
    joins={
        "pixel_values": cat,  # (crops of all images, patches, pixels)
        "image_token_pooling": OffsetCat("pixel_values", dims=2),  # each row: the patches that make one token
        "image_grids": cat,
        "image_num_crops": cat,
    },
    type_ids="mm_token_type_ids",  # attention is bidirectional inside an image
    typed_tokens=tuple(token for token in FAMILIES["molmo2"].image_tokens if not token.startswith("<|")),
    reserved=FAMILIES["molmo2"].image_tokens,
)

ENTRIES = Registry(
    "adapter entry",
    "armature.adapters",
    {
        "qwen2-vl": f"{__name__}:QWEN_VL",
        "qwen2.5-vl": f"{__name__}:QWEN_VL",
        "qwen3-vl": f"{__name__}:QWEN_VL",
        "llava": f"{__name__}:LLAVA",
        "llava-next": f"{__name__}:LLAVA_NEXT",
        "pixtral": f"{__name__}:PIXTRAL",
        "mistral3": f"{__name__}:PIXTRAL",
        "internvl": f"{__name__}:INTERNVL",
        "gemma3": f"{__name__}:GEMMA3",
        "molmo2": f"{__name__}:MOLMO2",
    },
)
