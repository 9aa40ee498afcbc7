"""Does training on generated captions help on captions of people? A captioner by retrieval stands for a model.

    python benchmarks/generated_captions.py flickr8k-112 --cache features
    python benchmarks/generated_captions.py --show

No vision model could be run where this was written. The stand-in captions a photo with a caption of
a person for another photo: the nearest, by the frozen image towers, among photos that the user does
not have (--donors). So its captions are fluent and general, often wrong in details, and sometimes
wrong altogether; a language model makes other mistakes. `shuffled` gives photos the captions of random
other photos, as a control.

The user has a library, of which some photos have a caption that the user wrote. Heads are fitted to
the captions by CCA, as `m1clip train --recipe frozen` initializes them, and tested on all images and
all captions of people of the validation split (mean recall @1, @5, @10 in both directions).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
from label_order import T95, Features, apply_heads, fit_heads, principal, read_features, recall
from sides import RESULTS, machine, write

from m1clip.formatting import table

LIBRARY = 2_000  # photos of the user
OWN = (0, 50, 200, 500)  # of them with a caption that the user wrote
DONORS = 2_500  # captioned photos of other people, from which the stand-in takes its captions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", help="a folder with captions.csv")
    parser.add_argument("--cache", type=Path, default=Path("features"), help="of label_order.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, default=RESULTS / "generated_captions.json")
    parser.add_argument("--show", action="store_true", help="print the table of the file")
    options = parser.parse_args()
    if not options.show:
        train, evaluated = (
            read_features(options.data, split, options.cache) for split in ("train", "val")
        )
        vectors = principal(train.images)
        runs = [run for seed in options.seeds for run in measure(train, vectors, evaluated, seed)]
        about = {**machine(), "data": options.data.resolve().name}
        write(options.json, {"machine": about, "library": LIBRARY, "runs": runs})
    print(summary(json.loads(options.json.read_text(encoding="utf-8"))["runs"]))


def measure(
    train: Features, vectors: np.ndarray, evaluated: Features, seed: int
) -> list[dict[str, object]]:
    """Mean recall with each kind of captions, for one library."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(train.images))
    library = order[:LIBRARY]
    donors = order[LIBRARY : LIBRARY + DONORS]
    nearest = donors[(vectors[library] @ vectors[donors].T).argmax(axis=1)]
    written = rng.integers(0, train.captions.shape[1], len(train.images))
    person = train.captions[library, written[library]]
    captions = {
        "generated": train.captions[nearest, written[nearest]],
        "shuffled": person[rng.permutation(LIBRARY)],
    }
    runs = []
    for own in OWN:
        chosen = np.arange(own)
        rest = np.arange(own, LIBRARY)
        kinds = {"own alone": (chosen, person[chosen])}
        for name, texts in captions.items():
            kinds[f"own and {name}"] = (
                np.concatenate([chosen, rest]),
                np.concatenate([person[chosen], texts[rest]]),
            )
        if own == OWN[0]:
            kinds["a person captions all"] = (np.arange(LIBRARY), person)
        for name, (photos, texts) in kinds.items():
            if not len(photos):
                continue
            heads = fit_heads(train.images[library[photos]], texts)
            value = 100 * recall(*apply_heads(heads, evaluated))[0]
            runs.append(
                {"seed": seed, "own": own, "captions": name, "mean_recall": round(value, 2)}
            )
            print(runs[-1], flush=True)
    return runs


def summary(runs: list[dict[str, object]]) -> str:
    """The mean over the libraries, with its 95% interval if there are several."""
    rows = []
    for own, name in dict.fromkeys((run["own"], run["captions"]) for run in runs):
        values = [
            float(str(run["mean_recall"]))
            for run in runs
            if (run["own"], run["captions"]) == (own, name)
        ]
        mean = statistics.fmean(values)
        shown = f"{mean:.1f}"
        if len(values) > 1:
            half = T95.get(len(values), 1.96) * statistics.stdev(values) / len(values) ** 0.5
            shown += f" [{mean - half:.1f}, {mean + half:.1f}]"
        rows.append((str(own), str(name), shown))
    return table(("own captions", "trained on", "mean recall"), rows)


if __name__ == "__main__":
    main()
