"""Draft trees without a draft model: what the text so far and the last verify suggest.

Two drafters. ``ngram`` merges every earlier continuation of the text's last tokens into a trie and takes its
likeliest nodes; it comes short of the budget where the text has said nothing like it. ``best-first`` builds a
tree of a fixed budget with DDTree's heap over candidates that depend on depth alone: n-gram continuation
counts mixed with the top tokens of earlier verify rows (after the same token, else for the same position in
rejected branches, else anywhere in the last pass). Drafts only cost or save time: verification makes the
output the target model's own whatever they say.

Sources: DDTree's best-first heap (key: cumulative log-probability; a popped node offers its next sibling and
its first child), prompt lookup / n-gram speculation, and token recycling's top-k table per token.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_NGRAM = 4
MAX_DEPTH = 12
BEST_FIRST_DEPTH = 8
WIDTH = 16
_MATCH_WEIGHT = 6.0  # one more matching token counts as this many occurrences


@dataclass(frozen=True)
class DraftTree:
    """Root and draft tokens of one request, parent before child.

    Attributes
    ----------
    tokens : list of int
        Token of each node; node 0 is the root, the last token of the text, whose K and V are not in the cache
        yet.
    parents : list of int
        Parent of each node, -1 for the root.
    """

    tokens: list[int]
    parents: list[int]

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Return the edges from the root to each node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """Make the tree without branches."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)))


@dataclass
class NextTokens:
    """What the target model put on top in earlier verify passes.

    Attributes
    ----------
    table : dict
        Token to ``[(next token, probability), ...]``, best first, as last seen in the logits of any row with
        that input token.
    ahead : list of dict
        For each depth from 1 of the coming tree, the mean of what the last pass's rejected rows predicted for
        that same position.
    recent : dict
        The mean over all rows of the last pass.
    """

    table: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    ahead: list[dict[int, float]] = field(default_factory=list)
    recent: dict[int, float] = field(default_factory=dict)

    def update(
        self,
        tree: DraftTree,
        top_tokens: Sequence[Sequence[int]],
        top_log_probs: Sequence[Sequence[float]],
        accepted: Sequence[int],
    ) -> None:
        """Take in the rows of one pass.

        Parameters
        ----------
        tree : DraftTree
            What was verified; a prompt is a chain.
        top_tokens, top_log_probs : sequence of sequences
            The k best next tokens of each row and their log-probabilities.
        accepted : sequence of int
            Rows of the accepted path, the root first. Where a token occurs twice they win over rejected rows.
        """
        tops = [
            [(token, math.exp(p)) for token, p in zip(*row, strict=True)]
            for row in zip(top_tokens, top_log_probs, strict=True)
        ]
        for row in [*range(tree.num_nodes), *accepted]:
            self.table[tree.tokens[row]] = tops[row]
        by_depth: dict[int, list[list[tuple[int, float]]]] = defaultdict(list)
        for depth, top in zip(tree.depths(), tops, strict=True):
            by_depth[depth].append(top)
        # The row at depth e predicts depth e + 1 of this tree, and the bonus token, root of the next, is at
        # depth len(accepted).
        self.ahead = [_mean(by_depth[depth]) for depth in range(len(accepted), max(by_depth) + 1)]
        self.recent = _mean(tops)

    def after(self, token: int, depth: int) -> dict[int, float]:
        """Return the likely tokens after `token`, which stands at `depth` of the coming tree."""
        if token in self.table:
            return dict(self.table[token])
        return self.ahead[depth] if depth < len(self.ahead) else self.recent


def _mean(tops: Sequence[Sequence[tuple[int, float]]]) -> dict[int, float]:
    total: dict[int, float] = defaultdict(float)
    for top in tops:
        for token, probability in top:
            total[token] += probability / len(tops)
    return dict(total)


def _matches(text: Sequence[int], max_ngram: int) -> list[tuple[int, float]]:
    """Find earlier occurrences of the last token: (index after it, weight by the length of the match)."""
    found = []
    last = len(text) - 1
    for index in range(last):
        length = 0
        while length < max_ngram and length <= index and text[index - length] == text[last - length]:
            length += 1
        if length:
            found.append((index + 1, _MATCH_WEIGHT ** (length - 1)))
    return found


def ngram_tree(text: Sequence[int], budget: int, max_ngram: int = MAX_NGRAM, max_depth: int = MAX_DEPTH) -> DraftTree:
    """Build a tree from a trie of the text's earlier continuations.

    Parameters
    ----------
    text : sequence of int
        Prompt and generated tokens; the last one becomes the root.
    budget : int
        Most draft nodes beside the root; fewer where the trie has fewer.
    max_ngram, max_depth : int
        Longest suffix compared, longest continuation taken.
    """
    children: list[dict[int, int]] = [{}]
    weights = [0.0]
    for start, weight in _matches(text, max_ngram):
        node = 0
        weights[0] += weight
        for token in text[start : start + max_depth]:
            if token not in children[node]:
                children[node][token] = len(children)
                children.append({})
                weights.append(0.0)
            node = children[node][token]
            weights[node] += weight
    tokens, parents = [text[-1]], [-1]
    heap: list[tuple[float, int, int, int]] = []

    def offer(node: int, row: int, cost: float) -> None:
        for token, child in children[node].items():
            # The 1 stands for a continuation never seen, so that a chain seen once is not certain to any
            # depth.
            step = math.log(weights[child] / (weights[node] + 1.0))
            heapq.heappush(heap, (cost - step, child, token, row))

    offer(0, 0, 0.0)
    while heap and len(tokens) <= budget:
        cost, node, token, parent = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        offer(node, len(tokens) - 1, cost)
    return DraftTree(tokens, parents)


def heap_tree(root: int, candidates: Sequence[Sequence[tuple[int, float]]], budget: int) -> DraftTree:
    """Build DDTree's best-first tree: the nodes whose path has the largest product of probabilities.

    Parameters
    ----------
    root : int
        Token of the root.
    candidates : sequence of sequences
        For each depth from 1, ``(token, log-probability)`` best first, distinct tokens; the same whatever the
        parent.
    budget : int
        Most draft nodes beside the root; fewer only where the candidates make fewer.

    Notes
    -----
    Nodes come in pop order: a parent and the better siblings precede a node, depth is not monotone, and the
    tree of a smaller budget is a prefix of the tree of a larger one.
    """
    tokens, parents = [root], [-1]
    # (cost of the node, order of entry, depth, rank among siblings, parent row, cost of the parent)
    heap: list[tuple[float, int, int, int, int, float]] = []
    entered = 0

    def offer(depth: int, rank: int, row: int, cost: float) -> None:
        nonlocal entered
        if depth < len(candidates) and rank < len(candidates[depth]):
            heapq.heappush(heap, (cost - candidates[depth][rank][1], entered, depth, rank, row, cost))
            entered += 1

    offer(0, 0, 0, 0.0)
    while heap and len(tokens) <= budget:
        cost, _, depth, rank, parent, parent_cost = heapq.heappop(heap)
        tokens.append(candidates[depth][rank][0])
        parents.append(parent)
        offer(depth, rank + 1, parent, parent_cost)
        offer(depth + 1, 0, len(tokens) - 1, cost)
    return DraftTree(tokens, parents)


def depth_candidates(
    text: Sequence[int],
    next_tokens: NextTokens,
    depths: int = BEST_FIRST_DEPTH,
    width: int = WIDTH,
    max_ngram: int = MAX_NGRAM,
) -> list[list[tuple[int, float]]]:
    """Mix n-gram continuation counts and the next-token table into candidates for each depth.

    At each depth the counts of tokens seen that far after the text's suffix are one distribution, the last
    depth's mixture pushed through :meth:`NextTokens.after` is the other; the counts weigh ``w / (w + 4)`` for
    a total match weight w.

    Returns
    -------
    list
        For each depth, up to `width` pairs ``(token, log-probability)``, best first, ties by token id.
    """
    matches = _matches(text, max_ngram)
    current = {text[-1]: 1.0}
    result = []
    for depth in range(depths):
        counts: dict[int, float] = defaultdict(float)
        for start, weight in matches:
            if start + depth < len(text):
                counts[text[start + depth]] += weight
        pushed: dict[int, float] = defaultdict(float)
        for token, probability in current.items():
            for following, conditional in next_tokens.after(token, depth).items():
                pushed[following] += probability * conditional
        total = sum(counts.values())
        share = total / (total + 4.0) if pushed else 1.0
        mixed: dict[int, float] = defaultdict(float)
        for token, weight in counts.items():
            mixed[token] += share * weight / total
        for token, probability in pushed.items():
            mixed[token] += (1.0 - share) * probability
        best = sorted(((t, p) for t, p in mixed.items() if p > 0.0), key=lambda pair: (-pair[1], pair[0]))[:width]
        if not best:
            break
        result.append([(token, math.log(min(probability, 1.0))) for token, probability in best])
        current = dict(best)
    return result


def best_first_tree(text: Sequence[int], next_tokens: NextTokens, budget: int) -> DraftTree:
    """Build a tree of `budget` draft nodes from :func:`depth_candidates` with :func:`heap_tree`."""
    return heap_tree(text[-1], depth_candidates(text, next_tokens), budget)
