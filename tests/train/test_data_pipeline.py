"""Batches: what is in them, and that they continue exactly."""

import dataclasses
import json
import random
from collections import Counter

import numpy as np
import pytest

from mlaflax.config import ConfigError
from mlaflax.tokenizer import Tokenizer
from train.data import DataConfig, pipeline, prepare
from train.data.tokens import TokenFile

FIELDS = ["loss_mask", "positions", "segment_ids", "targets", "tokens"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bcdfg" for b in "aeiou" for c in ("n", "st", "l")]
    for i in range(120):
        text = " ".join(rng.choice(words) for _ in range(min(int(rng.paretovariate(1) * 20), 400)))
        (root / f"{i}.txt").write_text(f"{i} {text}.\n")
    return root


@pytest.fixture(scope="module")
def data(files, tmp_path_factory):
    config = DataConfig(
        paths=(str(files),),
        sequence_length=32,
        batch_size=4,
        held_out_fraction=0.1,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )
    return prepare(config, 300)


def change(data, **fields):
    return dataclasses.replace(data, config=dataclasses.replace(data.config, **fields))


def numbered(lengths):
    """A token file whose ids are all different, so that a token says where it comes from."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenFile(np.arange(offsets[-1], dtype=np.uint32), offsets, 0, "numbered")


def segments(batch):
    """(tokens, targets, positions) of every segment of every row; checks that padding is empty."""
    for row in range(len(batch["tokens"])):
        ids = batch["segment_ids"][row]
        assert (np.sort(ids[ids > 0]) == ids[ids > 0]).all() and set(ids[ids > 0]) == set(
            range(1, ids.max() + 1)
        )
        for name in FIELDS:
            assert not batch[name][row][ids == 0].any()
        for i in range(1, ids.max() + 1):
            yield tuple(batch[name][row][ids == i] for name in ("tokens", "targets", "positions"))


def test_shapes_and_types(data):
    batch = next(data.train_iterator())
    assert sorted(batch) == FIELDS
    for array in batch.values():
        assert isinstance(array, np.ndarray) and array.dtype == np.int32 and array.shape == (4, 32)
        assert array.flags.c_contiguous


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_an_epoch_gives_every_token_once_and_targets_stay_in_their_document(data, hosts):
    file = numbered([2, 5, 32, 33, 34, 64, 65, 200, 1000, *range(2, 60)])
    epochs = change(dataclasses.replace(data, train=file), batch_size=2 * hosts, prefetch=0)
    pieces = pipeline.Pieces(file, 32)
    ends = set(file.offsets[1:] - 1)
    seen = Counter()
    longest = 0
    for host in range(hosts):
        # A host's share of two epochs, and the few rows that may still be held back for packing.
        count = 2 * len(range(host, len(pieces), hosts))
        got = 0
        for batch in epochs.train_iterator(host_index=host, host_count=hosts):
            for tokens, targets, positions in segments(batch):
                np.testing.assert_array_equal(targets, tokens + 1)  # the next token, of the same document
                np.testing.assert_array_equal(positions, np.arange(len(tokens)))
                assert not ends & set(tokens) and not set(file.offsets[:-1]) & set(targets)
                longest = max(longest, len(tokens))
                seen.update(tokens)
                got += 1
            if got >= count + 400:
                break
    assert longest == 32
    inputs = set(range(file.offsets[-1])) - ends
    assert set(seen) == inputs
    # Rows are drawn in epochs, so no token can be far ahead of another.
    assert max(seen.values()) - min(seen.values()) <= 2 + 400 * hosts // len(pieces) + 1


def test_one_epoch_is_exactly_one_of_each(data):
    file = numbered([2, 5, 32, 33, 34, 64, 65, 200, 1000, *range(2, 60)])
    for shuffle in (1, 2):
        import grain

        source = grain.MapDataset.source(pipeline.Pieces(file, 32)).shuffle(seed=shuffle)
        rows = pipeline._rows(source, 32, seed=shuffle).batch(4).map(pipeline._to_batch)
        got = [s for batch in rows for s in segments(batch)]
        tokens = np.sort(np.concatenate([s[0] for s in got]))
        targets = np.sort(np.concatenate([s[1] for s in got]))
        everything = np.arange(file.offsets[-1])
        np.testing.assert_array_equal(tokens, np.setdiff1d(everything, file.offsets[1:] - 1))
        np.testing.assert_array_equal(targets, np.setdiff1d(everything, file.offsets[:-1]))


def test_epochs_and_seeds_have_their_own_order(data):
    # 512 documents of a row each: an epoch is 128 batches of 4 rows, known by their first tokens.
    file = numbered([33] * 512)

    def epochs(seed):
        it = change(dataclasses.replace(data, train=file), seed=seed).train_iterator()
        drawn = np.concatenate([next(it)["tokens"][:, 0] for _ in range(256)])
        it.close()
        return drawn[:512], drawn[512:]

    (first, second), (other, _), (again, _) = epochs(0), epochs(1), epochs(0)
    np.testing.assert_array_equal(first, again)
    for a, b in ((first, second), (first, other), (second, other)):
        np.testing.assert_array_equal(np.sort(a), np.sort(b))
        assert (a == b).sum() < 20  # two random orders agree in one place
    assert abs(np.corrcoef(first, np.arange(512))[0, 1]) < 0.2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resume_is_exact_wherever_it_is_interrupted(data, prefetch):
    # 60 documents of up to 3 rows: 100 batches of 4 rows are several epochs and several packings.
    file = numbered(np.random.default_rng(1).integers(2, 90, size=60))
    data = change(dataclasses.replace(data, train=file), prefetch=prefetch)
    assert len(pipeline.Pieces(file, 32)) < 150
    iterator, states, batches = data.train_iterator(), [], []
    for _ in range(100):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    iterator.close()
    rng = random.Random(prefetch)
    for at in [0, 1, *rng.sample(range(2, 98), 20)]:
        resumed = data.train_iterator(json.loads(states[at]))
        for i in range(at, min(at + rng.randrange(1, 8), 100)):
            assert json.dumps(resumed.get_state()) == states[i]
            batch = next(resumed)
            for name in FIELDS:
                np.testing.assert_array_equal(batch[name], batches[i][name])
        resumed.close()


def test_state_does_not_depend_on_prefetching(data):
    ahead, plain = change(data, prefetch=3).train_iterator(), change(data, prefetch=0).train_iterator()
    for _ in range(20):
        next(ahead), next(plain)
    assert ahead.get_state() == plain.get_state()
    ahead.close()


def test_rewinding_a_running_iterator(data):
    iterator = data.train_iterator()
    for _ in range(7):
        next(iterator)
    state = iterator.get_state()
    want = [next(iterator)["tokens"] for _ in range(5)]
    for _ in range(3):
        iterator.set_state(state)
        for tokens in want:
            np.testing.assert_array_equal(next(iterator)["tokens"], tokens)
    iterator.close()


def test_another_run_s_position_is_refused(data):
    state = data.train_iterator().get_state()
    for fields, match in [
        ({"batch_size": 8}, r"data\.batch_size = 8: cannot resume"),
        ({"sequence_length": 16}, r"data\.sequence_length = 16: cannot resume"),
        ({"seed": 5}, r"data\.seed = 5: cannot resume"),
    ]:
        with pytest.raises(ConfigError, match=match):
            change(data, **fields).train_iterator(state)
    with pytest.raises(ConfigError, match=r"data = '.*': cannot resume"):
        dataclasses.replace(data, train=data.held_out).train_iterator(state)
    with pytest.raises(ConfigError, match=r"batch_size = 4: must divide among 3 hosts"):
        data.train_iterator(host_count=3)
    with pytest.raises(ConfigError, match=r"host_index = 2: must lie in 0 to 1"):
        data.train_iterator(host_index=2, host_count=2)


@pytest.mark.parametrize("batch, length, hosts", [(4, 32, 1), (6, 50, 2), (3, 7, 3), (64, 4096, 1)])
def test_evaluation_covers_every_target_once(data, batch, length, hosts):
    shares = [list(data.eval_batches(batch, length, host, hosts)) for host in range(hosts)]
    assert len({len(s) for s in shares}) == 1
    got = [b for share in shares for b in share]
    assert all(b["tokens"].shape == (batch // hosts, length) for b in got)
    targets = np.concatenate([b["targets"][b["loss_mask"] == 1] for b in got])
    want = np.concatenate([d[1:] for d in data.held_out_documents])
    np.testing.assert_array_equal(np.sort(targets), np.sort(want))
    again = list(data.eval_batches(batch, length, 0, hosts))
    for a, b in zip(shares[0], again, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])


def test_tokens_spell_the_documents(data, files):
    texts = {p.read_text() for p in files.iterdir()}
    for part in (data.train_documents, data.held_out_documents):
        for ids in part:
            assert ids[-1] == data.tokenizer.eos_id and data.tokenizer.eos_id not in ids[:-1]
            assert data.tokenizer.decode(ids) in texts
    assert len(data.train) + len(data.held_out) == len(texts)
    assert data.train.text_bytes + data.held_out.text_bytes == sum(len(t.encode()) for t in texts)


def test_little_is_padding_and_nothing_is_lost_to_it(data):
    file = numbered(np.random.default_rng(0).integers(2, 400, size=3000))
    it = change(dataclasses.replace(data, train=file), sequence_length=256, prefetch=0).train_iterator()
    filled = np.mean([next(it)["loss_mask"].mean() for _ in range(200)])
    assert filled > 0.93


def test_the_second_preparation_reads_the_cache(data, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("made again")

    monkeypatch.setattr(Tokenizer, "train", never)
    monkeypatch.setattr(Tokenizer, "encode_batch", never)
    again = prepare(data.config, 300)
    assert again.train.fingerprint == data.train.fingerprint
    assert isinstance(again.train.tokens, np.memmap)
    np.testing.assert_array_equal(again.train.tokens, data.train.tokens)


def test_a_damaged_cache_is_made_again(data, tmp_path):
    config = dataclasses.replace(data.config, cache_dir=str(tmp_path))
    prepare(config, 300)
    for name, content in [
        ("tokens.bin", b""),
        ("tokens.bin", b"12"),
        ("offsets.npy", b""),
        ("about.json", b"{"),
    ]:
        for directory in (tmp_path / "tokens").iterdir():
            (directory / name).write_bytes(content)
        np.testing.assert_array_equal(prepare(config, 300).train.tokens, data.train.tokens)
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache_dir = '.*file': must be a directory to write to"):
        prepare(dataclasses.replace(config, cache_dir=str(tmp_path / "file")), 300)


def test_the_first_held_out_batches_are_a_sample_of_all(data):
    # Tokens are numbered through the corpus: a few batches must reach from its beginning to its end.
    held_out = numbered([100] * 200)
    first = next(dataclasses.replace(data, held_out=held_out).eval_batches(16, 64))
    tokens = first["tokens"][first["loss_mask"] == 1]
    assert tokens.min() < 4000 and tokens.max() > 16_000 and 7000 < tokens.mean() < 13_000


def test_large_vocabularies_take_wider_tokens(files, tmp_path):
    # A word-level tokenizer with 70,000 entries, two bytes too few to name them.
    import tokenizers
    from tokenizers import models, pre_tokenizers

    inner = tokenizers.Tokenizer(
        models.WordLevel({"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 70_000)})
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"w69999 w{i + 1} w65536")
    config = DataConfig(
        paths=(str(tmp_path / "*.txt"),), tokenizer=str(tmp_path), cache_dir=str(tmp_path / "c")
    )
    config = dataclasses.replace(config, held_out_fraction=0.2)
    data = prepare(config, 70_000)
    assert data.train[0].dtype == np.uint32
    assert list(data.train[0][[0, 2, 3]]) == [69_999, 65_536, 0]
    with pytest.raises(ConfigError, match=r"vocab_size = 69999: must be at least 70000"):
        prepare(config, 69_999)
