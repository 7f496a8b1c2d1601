"""Write the golden files from transformers: `python -m tests.parity.make_golden [NAME ...]`.

Run it from the root of a checkout with the parity extra installed (`pip install -e '.[dev,parity]'`), after a
change of `golden.py` or of the transformers version, and read what it prints before committing: logits
must move for a reason. A file holds inputs and expected logits; the weights are a formula of name and seed.

What it checks before writing, so that agreement with a file means something:

* transformers gives each document the same logits alone, left-padded, right-padded and packed;
* float32 noise (against float64, and against `numpy_reference.py`) is far below the tolerance of 1e-4;
* logits have a standard deviation of 1 or more, and attention is far from uniform: its entropy is less than
  two thirds of that of a uniform one;
* no token is so close to choosing another expert that rounding could decide it (seeds are tried in turn);
* in V3 files with groups, experts with a negative biased score are chosen, so that masking losing groups with
  0 in place of -inf shows.
"""

import sys

import numpy as np

from mlaflax.convert.deepseek import model_config_from_hf, params_from_hf
from tests.parity import golden, numpy_reference, transformers_peer

NOISE = 2e-5
MARGIN = 2e-5
ENTROPY = 2 / 3


def entropy_ratio(trace: numpy_reference.Trace) -> list[float]:
    """Per layer, the mean of attention entropy over log(visible keys), of queries that see 16 or more."""
    ratios = []
    for probs in trace.attention:
        entropy = -(probs * np.log(np.maximum(probs, 1e-300))).sum(-1)[:, :, 15:]
        ratios.append(float((entropy / np.log(np.arange(16, probs.shape[2] + 1))).mean()))
    return ratios


def make(name: str) -> None:
    hf_config = golden.CONFIGS[name]
    config = model_config_from_hf(hf_config)
    shapes = transformers_peer.shapes(hf_config)
    for seed in range(100):
        documents = golden.make_documents(seed, config.vocab_size)
        weights = golden.make_weights(shapes, seed)
        params = params_from_hf(weights, config)
        trace = numpy_reference.Trace()
        exact = [numpy_reference.forward(params, config, d[None], trace=trace)[0] for d in documents]
        if trace.margin > MARGIN:
            break
    else:
        raise SystemExit(f"{name}: every seed has a token between two experts")

    model = transformers_peer.load_model(hf_config, weights)
    alone = [transformers_peer.alone(model, d) for d in documents]
    noise = {}
    for layout in ("left", "right", "packed"):
        batch = golden.lay_out(documents, layout)
        noise[layout] = batch.error(transformers_peer.logits(model, batch, layout), alone)
    batch = golden.lay_out(documents, "right")
    noise["float64"] = batch.error(transformers_peer.logits(model.double(), batch, "right"), alone)
    noise["numpy"] = max(float(np.abs(a - e).max()) for a, e in zip(alone, exact, strict=True))

    std = float(np.concatenate(alone).std())
    ratios = entropy_ratio(trace)
    negative = float(np.mean(trace.negative))
    print(
        f"{name}: seed {seed}, logits std {std:.2f}, entropy / log n by layer "
        f"{' '.join(f'{r:.2f}' for r in ratios[: config.num_layers])}, margin {trace.margin:.1e}, "
        f"negative scores chosen {negative:.0%}, noise " + ", ".join(f"{k} {v:.1e}" for k, v in noise.items())
    )
    assert max(noise.values()) < NOISE, noise
    assert std >= 1 and max(ratios) < ENTROPY
    assert config.moe.score == "softmax" or negative > 0.1
    golden.Golden(hf_config, shapes, seed, documents, alone).save(name)


if __name__ == "__main__":
    golden.DIRECTORY.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or golden.CONFIGS:
        make(chosen)
