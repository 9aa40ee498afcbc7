"""python sentence_transformers_folder.py FOLDER IMAGE TEXT...: vectors of SentenceTransformer as JSON."""

import json
import sys
from pathlib import Path

from PIL import Image
from sentence_transformers import SentenceTransformer

folder, image, *texts = sys.argv[1:]
custom = any(Path(folder).glob("*_module.py"))
model = SentenceTransformer(folder, trust_remote_code=custom, device="cpu")
vectors = {"image": model.encode(Image.open(image)).tolist(), "text": model.encode(texts).tolist()}
vectors["prompted"] = model.encode(texts[1:], prompt=texts[0] + " ").tolist()
print(
    json.dumps(
        vectors
        | {
            "custom": custom,
            "cosine": model.similarity(vectors["text"], vectors["text"])[0, 0].item(),
        }
    )
)
