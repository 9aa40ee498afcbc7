"""python immich.py MACHINE_LEARNING FOLDER NAME IMAGE TEXT...: vectors as Immich's service computes them, as JSON.

MACHINE_LEARNING is that folder of Immich's repository. Its CLIP code runs unchanged; the packages
that only its face and text recognition need are replaced by mocks.
"""

import importlib.machinery
import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

OTHERS = ("rapidocr", "insightface", "onnx", "aiocache", "rknnlite")


class Mocks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, Mocks())

from immich_ml.models import from_model_type  # noqa: E402
from immich_ml.schemas import ModelTask, ModelType  # noqa: E402

folder, name, image, *texts = sys.argv[2:]
visual, textual = (
    from_model_type(name, kind, ModelTask.SEARCH, cache_dir=folder)
    for kind in (ModelType.VISUAL, ModelType.TEXTUAL)
)
assert visual.cached
assert textual.cached
vectors = {"image": json.loads(visual.predict(Path(image).read_bytes()))}
vectors["text"] = [json.loads(textual.predict(text)) for text in texts]
print(json.dumps(vectors))
