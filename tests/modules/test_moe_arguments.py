"""Arguments of the functions on experts' rows: Transformer Engine's names; what cannot be is refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch

import te_hal.modules as te

NEEDED = inspect.Parameter.empty
SIGNATURES = {
    te.moe_permute: {
        "inp": NEEDED,
        "routing_map": NEEDED,
        "num_out_tokens": -1,
        "max_token_num": -1,
        "map_type": "mask",
    },
    te.moe_permute_with_probs: {"inp": NEEDED, "probs": NEEDED, "routing_map": NEEDED, "num_out_tokens": -1},
    te.moe_permute_and_pad_with_probs: dict.fromkeys(
        ("inp", "probs", "routing_map", "tokens_per_expert", "align_size"), NEEDED
    ),
    te.moe_unpermute: {
        "inp": NEEDED,
        "row_id_map": NEEDED,
        "merging_probs": None,
        "restore_shape": None,
        "map_type": "mask",
        "probs": None,
        "pad_offsets": None,
    },
    te.moe_sort_chunks_by_index: dict.fromkeys(("inp", "split_sizes", "sorted_index"), NEEDED),
    te.moe_sort_chunks_by_index_with_probs: dict.fromkeys(("inp", "probs", "split_sizes", "sorted_index"), NEEDED),
    te.Fp8Padding: {"num_gemms": NEEDED, "align_size": None},
    te.Fp8Unpadding: {"num_gemms": NEEDED, "align_size": None},
    te.Fp8Padding.forward: {"inp": NEEDED, "m_splits": NEEDED},
    te.Fp8Unpadding.forward: {"inp": NEEDED, "m_splits": NEEDED},
    te.router.fused_topk_with_score_function: {
        **dict.fromkeys(("logits", "topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor"), NEEDED),
        **dict.fromkeys(("score_function", "expert_bias"), NEEDED),
        "routing_map_format": te.router.RoutingMapFormat.BYTEMAP,
        **dict.fromkeys(("topk_indices", "qb_histogram", "qb_bin_bounds", "qb_histogram_mode")),
    },
    te.router.fused_compute_score_for_moe_aux_loss: {
        **dict.fromkeys(("logits", "topk", "score_function"), NEEDED),
        "routing_map_format": te.router.RoutingMapFormat.BYTEMAP,
    },
    te.router.fused_moe_aux_loss: dict.fromkeys(
        ("probs", "tokens_per_expert", "total_num_tokens", "num_experts", "topk", "coeff"), NEEDED
    ),
    te.parallel_cross_entropy: {
        "inp": NEEDED,
        "target": NEEDED,
        "label_smoothing": 0.0,
        "reduce_loss": False,
        "dist_process_group": None,
        "ignore_idx": -100,
        "is_cg_capturable": False,
        "_input": None,
    },
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda of: of.__qualname__)
def test_arguments_their_order_and_defaults_are_those_of_transformer_engine(function):
    found = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}
    assert list(found.items()) == list(SIGNATURES[function].items())


X = torch.zeros(6, 8)
MASK = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [0, 1]], dtype=torch.bool)
INDEX = torch.tensor([[0], [1], [0], [-1], [0], [1]])
PROBS = torch.rand(6, 2)
_ROWS, MAP = te.moe_permute(X, MASK)
INDEX_MAP = te.moe_permute(X, INDEX, map_type="index")[1]


def changed(row_id_map: torch.Tensor, column: int, value: int) -> torch.Tensor:
    """The map with another number for its first token."""
    made = row_id_map.clone()
    made[0, column] = value
    return made


WRONG = {
    "rank": (te.moe_permute, {"inp": torch.zeros(2, 3, 8)}, r"inp: got shape \(2, 3, 8\)"),
    "dtype": (te.moe_permute, {"inp": torch.zeros(6, 8, dtype=torch.int32)}, "inp: got .*torch.int32"),
    "float64": (te.moe_permute, {"inp": X.double()}, "inp: got .*torch.float64"),
    "map's tokens": (te.moe_permute, {"routing_map": MASK[:5]}, r"routing_map: got shape \(5, 2\)"),
    "map's rank": (te.moe_permute, {"routing_map": MASK[:, 0]}, r"routing_map: got shape \(6,\)"),
    "map's dtype": (te.moe_permute, {"routing_map": MASK.float()}, "routing_map: got .*torch.float32"),
    "counts in a mask": (te.moe_permute, {"routing_map": MASK.int() * 3}, "routing_map: got values from 0 to 3"),
    "indices as a mask": (te.moe_permute, {"routing_map": INDEX}, 'routing_map: got values from -1 to 1.*"index"'),
    "index": (te.moe_permute, {"routing_map": INDEX - 1, "map_type": "index"}, "routing_map: got the index -2"),
    "bool index": (te.moe_permute, {"routing_map": MASK, "map_type": "index"}, "routing_map: got .*torch.bool"),
    "map type": (te.moe_permute, {"map_type": "masks"}, "map_type: got 'masks'; accepted: 'mask' or 'index'"),
    "no rows": (te.moe_permute, {"num_out_tokens": 0}, "num_out_tokens: got 0; accepted: -1 for all 6"),
    "rows": (te.moe_permute, {"num_out_tokens": -2}, "num_out_tokens: got -2"),
    "no int": (te.moe_permute, {"num_out_tokens": torch.tensor(6)}, "num_out_tokens: got tensor"),
    "workspace": (te.moe_permute, {"max_token_num": 64}, "max_token_num: got 64.*leave it out: "),
    "probs": (te.moe_permute_with_probs, {"probs": PROBS[:, :1]}, r"probs: got shape \(6, 1\)"),
    "probs' dtype": (te.moe_permute_with_probs, {"probs": PROBS.double()}, "probs: got .*torch.float64"),
    "counts": (
        te.moe_permute_and_pad_with_probs,
        {"tokens_per_expert": torch.tensor([2, 4])},
        r"tokens_per_expert: got \[2, 4\]; accepted: \[3, 3\]",
    ),
    "align": (te.moe_permute_and_pad_with_probs, {"align_size": 0}, "align_size: got 0"),
    "map back": (te.moe_unpermute, {"row_id_map": MAP[:, :4]}, r"row_id_map: got shape \(6, 4\)"),
    "map of more rows": (te.moe_unpermute, {"inp": X[:4]}, "row_id_map: got row 5; accepted: rows below 4"),
    "shape": (te.moe_unpermute, {"restore_shape": (5, 8)}, r"restore_shape: got \(5, 8\); accepted: \(6, 8\)"),
    "merging": (te.moe_unpermute, {"merging_probs": PROBS.T}, r"merging_probs: got shape \(2, 6\)"),
    "both names": (te.moe_unpermute, {"merging_probs": PROBS, "probs": PROBS}, "probs: got both"),
    "offsets": (te.moe_unpermute, {"pad_offsets": torch.zeros(3, dtype=torch.int64)}, r"pad_offsets: got shape \(3,\)"),
    "offsets of indices": (
        te.moe_unpermute,
        {"row_id_map": INDEX_MAP, "map_type": "index", "pad_offsets": torch.zeros(2)},
        "pad_offsets: got map_type=.index.",
    ),
    "mask's map as indices": (te.moe_unpermute, {"map_type": "index"}, r"row_id_map: got shape \(6, 5\).*map_type"),
    "map of indices as a mask's": (
        te.moe_unpermute,
        {"row_id_map": INDEX_MAP},
        "row_id_map: got shape .*same map_type",
    ),
    "tokens of indices": (
        te.moe_unpermute,
        {"row_id_map": INDEX_MAP, "map_type": "index", "merging_probs": PROBS[:4]},
        "row_id_map: got shape .*multiple of the 4 tokens",
    ),
    "a token's rows": (te.moe_unpermute, {"row_id_map": changed(MAP, -1, 3)}, "row_id_map: .*with 3 rows; .*0 to 2"),
    "a token's rows below 0": (
        te.moe_unpermute,
        {"row_id_map": changed(MAP, -1, -1)},
        "row_id_map: .* with -1",
    ),
    "experts": (
        te.moe_unpermute,
        {"row_id_map": changed(MAP, 2, 2)},
        "row_id_map: got expert 2; accepted: .* below",
    ),
    "one size": (te.moe_unpermute, {"restore_shape": 6}, r"restore_shape: got 6; accepted: \(tokens, hidden\)"),
    "no sizes": (
        te.moe_unpermute,
        {"row_id_map": INDEX_MAP, "map_type": "index", "restore_shape": ()},
        r"restore_shape: got \(\)",
    ),
    "chunks": (te.moe_sort_chunks_by_index, {"split_sizes": torch.tensor([2, 3])}, r"split_sizes: got \[2, 3\]"),
    "negative chunk": (
        te.moe_sort_chunks_by_index,
        {"split_sizes": torch.tensor([7, -1])},
        r"split_sizes: got \[7, -1\]",
    ),
    "order": (te.moe_sort_chunks_by_index, {"sorted_index": torch.tensor([1, 1])}, r"sorted_index: got \[1, 1\]"),
    "order's size": (te.moe_sort_chunks_by_index, {"sorted_index": torch.tensor([0])}, "sorted_index: got shape"),
    "chunk probs": (te.moe_sort_chunks_by_index_with_probs, {"probs": PROBS}, r"probs: got shape \(6, 2\)"),
}
GOOD = {
    te.moe_permute: {"inp": X, "routing_map": MASK},
    te.moe_permute_with_probs: {"inp": X, "probs": PROBS, "routing_map": MASK},
    te.moe_permute_and_pad_with_probs: {
        "inp": X,
        "probs": PROBS,
        "routing_map": MASK,
        "tokens_per_expert": MASK.sum(0),
        "align_size": 4,
    },
    te.moe_unpermute: {"inp": X, "row_id_map": MAP},
    te.moe_sort_chunks_by_index: {"inp": X, "split_sizes": torch.tensor([2, 4]), "sorted_index": torch.tensor([1, 0])},
    te.moe_sort_chunks_by_index_with_probs: {
        "inp": X,
        "probs": PROBS[:, 0],
        "split_sizes": torch.tensor([2, 4]),
        "sorted_index": torch.tensor([1, 0]),
    },
}


@pytest.mark.parametrize("which", WRONG)
def test_what_cannot_be_is_refused_by_name(which):
    function, arguments, message = WRONG[which]
    function(**GOOD[function])
    with pytest.raises((ValueError, NotImplementedError), match=f"{function.__name__}: {message}"):
        function(**{**GOOD[function], **arguments})


@pytest.mark.parametrize("function", GOOD, ids=lambda of: of.__name__)
def test_what_is_no_tensor_is_a_type_error(function):
    for name, value in GOOD[function].items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(TypeError, match=f"{function.__name__}.*got a list"):
                function(**{**GOOD[function], name: value.tolist()})


@pytest.mark.parametrize(("map_type", "row_id_map"), [("mask", MAP), ("index", INDEX_MAP)])
def test_probabilities_that_are_no_tensor_are_a_type_error(map_type, row_id_map):
    with pytest.raises(TypeError, match="moe_unpermute: merging_probs: got a list"):
        te.moe_unpermute(X, row_id_map, [[1.0]] * 6, map_type=map_type)
