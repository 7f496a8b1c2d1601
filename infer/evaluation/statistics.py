"""Means over tokens with standard errors that respect documents.

Tokens of one document are alike, so the number of independent observations is nearer to the number of documents
than to that of tokens. For tokens i of documents g = 1 .. G, N tokens in all, with mean m = sum x / N:

    s.e.(m) = sqrt( G / (G - 1) * sum_g ( sum_{i in g} (x_i - m) )^2 ) / N

the cluster-robust error of a mean (Liang and Zeger 1986) with the usual correction for few clusters. A mean
difference d of NLL is a relative change of perplexity of exp(d) - 1, whose error is exp(d) s.e.(d) to first order.
"""

import math
from typing import NamedTuple

import numpy as np


class Mean(NamedTuple):
    """A mean over tokens; `error` is its standard error clustered by document, None for a single document."""

    mean: float
    error: float | None
    tokens: int
    documents: int


def clustered_mean(values: np.ndarray, documents: np.ndarray) -> Mean:
    """The mean of `values` and its standard error.

    Args:
      values: `[rows, tokens]`.
      documents: int `[rows]`, the document that each row is of.
    """
    values = np.asarray(values, np.float64)
    mean = float(values.mean())
    names, which = np.unique(documents, return_inverse=True)
    sums = np.zeros(len(names))
    np.add.at(sums, which, (values - mean).sum(axis=1))
    g = len(names)
    error = math.sqrt(g / (g - 1) * float(np.sum(sums**2))) / values.size if g > 1 else None
    return Mean(mean, error, values.size, g)


class Change(NamedTuple):
    """A relative change of perplexity in percent, with its standard error."""

    percent: float
    error: float | None


def perplexity_change(difference: Mean) -> Change:
    """The change of perplexity that a mean difference of NLL, in nats per token, is."""
    ratio = math.exp(min(difference.mean, 700.0)) if math.isfinite(difference.mean) else difference.mean
    return Change(100 * (ratio - 1), None if difference.error is None else 100 * ratio * difference.error)
