"""What the side-by-side programs stand on: workers that fail are told, ratios are right, shapes are the models'."""

import json
import os
import sys

import jax
import pytest
from flax import nnx

from benchmarks.peers import compare, shapes
from benchmarks.peers.compare import Contestant, Turns
from benchmarks.peers.protocol import Peer, PeerError
from configs.demo import config as demo
from mlaflax.convert.deepseek import model_config_to_hf
from mlaflax.model import Transformer


def make_peer(name="test", timeout=30.0, threads=1) -> Peer:
    return Peer(name, sys.executable, "tests.benchmarks.worker", threads=threads, timeout=timeout)


def test_a_worker_answers_whatever_its_libraries_print_and_keeps_to_its_cores():
    peer = make_peer()
    try:
        assert peer.setup(threads=1) == {"parameters": 7, "cores": 1, "threads": 1}
        assert peer.step(n=3) == {"seconds": [0.01] * 3}
        assert peer.release() == {}
    finally:
        peer.quit()
    assert "a library that talks to stdout" in peer.log.read_text()


def test_refusal_death_and_silence_are_told_and_the_next_request_starts_anew():
    peer = make_peer(timeout=5.0)
    try:
        with pytest.raises(PeerError, match="test at setup: ValueError: no such shape"):
            peer.setup(threads=1, fail="setup")
        peer.setup(threads=1, fail="die")
        with pytest.raises(PeerError, match=r"test died \(status 3\) at step"):
            peer.step(n=1)
        peer.setup(threads=1, fail="hang")
        with pytest.raises(PeerError, match="test gave no answer in 5 s at step"):
            peer.step(n=1)
        assert peer.setup(threads=1)["parameters"] == 7
    finally:
        peer.quit()
    missing = Peer("nowhere", "/no/such/python", "tests.benchmarks.worker")
    with pytest.raises(
        PeerError, match=r"cannot start: .*; benchmarks/peers/setup.sh makes the environments"
    ):
        missing.setup(threads=1)


def test_turns_give_a_ratio_per_round_and_a_failure_costs_only_its_own_figures():
    peers = [make_peer(f"test-{i}") for i in range(3)]
    ours = Contestant("ours", "f32", peers[0], {"seconds": 0.02})
    slow = Contestant("slow", "f32", peers[1], {"seconds": 0.06})
    broken = Contestant("broken", "f16", peers[2], {"fail": "setup"})
    rounds = []
    try:
        compare.run([ours, slow, broken], Turns(rounds=3, seconds=0.05, threads=1), lambda: rounds.append(1))
    finally:
        for peer in peers:
            peer.quit()
    assert len(rounds) == 3
    assert compare.ratios(ours.rounds, slow.rounds) == pytest.approx([3.0] * 3)
    assert broken.error == "test-2 at setup: ValueError: no such shape" and not broken.rounds
    assert (ours.width, broken.width) == (4, 2)


def test_groups_fit_into_memory():
    contestants = [
        Contestant(name, "f32", None, {}, need) for name, need in zip("abcd", (5, 4, 3, 9), strict=True)
    ]
    ours, peers = contestants[:1], contestants[1:]
    groups = compare.in_groups(ours, peers, budget=12)
    assert [[c.name for c in group] for group in groups] == [["b", "c"], ["d"]]


def test_the_end_of_a_program_tells_the_truth(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert compare.finish({"rows": []}, "Twice as fast: met.", True, str(path), check=True) == 0
    assert json.loads(path.read_text()) == {"rows": [], "summary": "Twice as fast: met.", "met": True}
    assert compare.finish({}, "Half as fast: missed.", False, None, check=True) == 1
    assert compare.finish({}, "Half as fast: missed.", False, None, check=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Half as fast: missed."


@pytest.mark.parametrize("config", [demo.model, shapes.mla_config()], ids=["moe", "dense"])
def test_peers_get_the_model_that_a_conversion_would_write(config):
    written = model_config_to_hf(config)
    mine = shapes.deepseek_v3(config)
    shared = set(mine) & set(written)
    if not config.moe.num_experts:  # unused then, and only peers want them sound
        shared -= {"norm_topk_prob", "moe_intermediate_size", "n_routed_experts"}
    assert {"hidden_size", "kv_lora_rank", "rope_parameters", "q_lora_rank"} <= shared
    assert {name: mine[name] for name in shared} == {name: written[name] for name in shared}


def test_the_floor_counts_the_weights_of_the_model():
    config = shapes.mla_config()
    params = nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))), nnx.Param)
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.size > 12 * 768 + 1)
    hf = shapes.deepseek_v3(config)
    # Tied: the embedding is the head.
    assert config.tie_embeddings and shapes.step_parameters(hf) == matrices
    moved, flops = shapes.decode_floor(hf, context=4096, batch=2, itemsize=4)
    assert moved == 4 * (matrices + 2 * 4096 * 12 * (256 + 32))
    assert flops == 2 * 2 * (matrices + 4096 * 12 * 12 * (256 + 32 + 256))


def test_both_models_have_as_many_parameters():
    gqa = shapes.GQA
    d, heads, kv, dim = 768, 12, 4, 64
    layer = d * heads * dim * 2 + d * kv * dim * 2 + 3 * d * gqa["intermediate_size"]
    total = gqa["num_hidden_layers"] * layer + gqa["vocab_size"] * d
    assert total == pytest.approx(shapes.step_parameters(shapes.deepseek_v3(shapes.mla_config())), rel=2e-3)


def test_the_environment_variable_names_the_peers_python(monkeypatch):
    monkeypatch.setenv("SOME_VENV", "/somewhere")
    assert str(compare.environment_python("SOME_VENV", ".venv-x")) == os.path.join(
        "/somewhere", "bin", "python"
    )
