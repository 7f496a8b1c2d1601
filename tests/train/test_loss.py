"""Cross-entropy in pieces equals cross-entropy at once, in less memory."""

import jax
import numpy as np
import pytest

from train.loss import token_losses

ROWS, LENGTH, WIDTH, VOCAB = 2, 13, 8, 50


@pytest.fixture
def inputs():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (ROWS, LENGTH, WIDTH))
    head = jax.random.normal(keys[1], (WIDTH, VOCAB))
    return hidden, head, jax.random.randint(keys[2], (ROWS, LENGTH), 0, VOCAB)


def losses(hidden, head, targets, chunk):
    return token_losses(lambda h: h @ head, hidden, targets, VOCAB, chunk)


@pytest.mark.parametrize("chunk", [1, ROWS * VOCAB * 4, ROWS * VOCAB * LENGTH])
def test_is_the_negative_log_softmax(inputs, chunk):
    hidden, head, targets = inputs
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses(*inputs, chunk), expected, rtol=2e-5, atol=1e-5)


def test_gradients_do_not_depend_on_the_pieces(inputs):
    hidden, head, targets = inputs

    def grads(chunk):
        return jax.grad(lambda h, w: losses(h, w, targets, chunk).sum(), argnums=(0, 1))(hidden, head)

    whole = grads(10**9)
    for chunk in (1, ROWS * VOCAB * 4):
        for a, b in zip(grads(chunk), whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_no_piece_of_logits_exceeds_the_chunk(inputs):
    hidden, head, targets = inputs
    chunk = ROWS * VOCAB * 4
    compiled = jax.jit(jax.grad(lambda h, w: losses(h, w, targets, chunk).sum(), argnums=(0, 1)))
    text = str(compiled.trace(hidden, head).jaxpr)
    assert f"f32[{ROWS},{LENGTH},{VOCAB}]" not in text
    assert f"f32[{ROWS},4,{VOCAB}]" in text
