"""InferenceParams: which sequences are being generated, and their keys and values, layer by layer."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.arguments import check_size, check_tensor
from te_hal.modules.inference.announced import check_announced, check_lengths
from te_hal.modules.inference.cache_settings import check_settings
from te_hal.modules.inference.layer_cache import LayerCache
from te_hal.modules.inference.slots import Pages, Rows, Slots
from te_hal.modules.inference.step import Step
from te_hal.schema.errors import ArgumentError, StateError

if TYPE_CHECKING:
    from collections.abc import Mapping


class InferenceParams:
    """The cache for generation, under Transformer Engine's arguments; pass it to every layer's forward.

    Before each forward of the model say by :meth:`pre_step` which sequences it holds, and how many new tokens of each.
    Sequences join by being named for the first time and leave by being left out, or by :meth:`evict`. The batch has the
    order of the step. Memory is taken as layers come by.

    Args:
        max_batch_size: the most sequences at once.
        max_sequence_length: the most tokens of a sequence.
        num_heads_kv: heads of keys and values.
        head_dim_k: channels of a head of keys.
        dtype: of keys and values: the activation dtype.
        head_dim_v: channels of a head of values; None: as of keys.
        is_paged: tokens lie in pages that sequences take as they grow, instead of rows of ``max_sequence_length``.
        total_num_pages: how many; None: enough for ``max_batch_size`` sequences of full length.
        page_size: tokens of a page; needed with ``is_paged``.
        max_ctx_len: the most new tokens of a sequence in a step; None: ``max_sequence_length``.
        qkv_format: of what layers are called with: "bshd" or "sbhd", which stand for both (new tokens at the front of
            each sequence's row), or "thd" (all new tokens in one row).
        custom_cache_manager: refused: the two layouts here are all there is.

    Attributes:
        sequences: tokens of each sequence, those of the step under way included, in batch order.

    Raises:
        ArgumentError: sizes that are none, an unknown format or dtype, pages without ``is_paged``.
        UnsupportedError: a ``custom_cache_manager``.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: object = None,
    ) -> None:
        kind = type(self).__name__
        given = dict(locals())
        check_settings(kind, given)
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv: int = given["num_heads_kv"]
        self.head_dim_k: int = given["head_dim_k"]
        self.head_dim_v: int = self.head_dim_k if head_dim_v is None else head_dim_v
        self.dtype: torch.dtype = given["dtype"]
        self.is_paged, self.page_size, self.qkv_format = is_paged, page_size, qkv_format
        self.max_ctx_len = max_sequence_length if max_ctx_len is None else max_ctx_len
        self.total_num_pages = total_num_pages
        if page_size is not None and total_num_pages is None:
            self.total_num_pages = max_batch_size * -(-max_sequence_length // page_size)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence, and free the memory."""
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()
        self._layers: dict[int, LayerCache] = {}
        self._owners: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._slots: Slots = (
            Pages(self.total_num_pages, self.page_size)
            if self.total_num_pages is not None and self.page_size is not None
            else Rows(self.max_batch_size, self.max_sequence_length)
        )
        self._step: Step | None = None
        self._steps = 0

    @property
    def batch_size(self) -> int:
        """Sequences of the step under way."""
        return len(self.sequences)

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Announce the next forward: the new tokens of each sequence, in the order of its batch.

        Sequences that are left out leave the cache. Nothing changes where this raises.

        Args:
            step_dict: from a sequence's id to its number of new tokens; 0 for one that waits.

        Raises:
            ArgumentTypeError: no mapping.
            ArgumentError: no sequence; a number that is none, or above ``max_ctx_len``.
            StateError: more sequences, longer ones, or more pages than there is room for; the step before was not
                read by any layer.
        """
        where = f"{type(self).__name__}.pre_step"
        self._check_step(where, step_dict)
        before = {sequence: self.sequences.get(sequence, 0) for sequence in step_dict}
        after = OrderedDict((sequence, old + step_dict[sequence]) for sequence, old in before.items())
        check_lengths(where, before, after, self.max_sequence_length)
        self._slots.check(after)
        taken = self._slots.take(after)
        for layer in self._layers.values():
            layer.clear(taken, self._slots.size)
        self.sequences = after
        self._step = Step(before, step_dict, self._slots)
        self._steps += 1

    def _check_step(self, where: str, step_dict: object) -> None:
        check_announced(where, step_dict, self.max_ctx_len, self.max_batch_size)
        if (
            self._step is not None
            and any(self._step.new)
            and all(c.steps != self._steps for c in self._layers.values())
        ):
            raise StateError(
                where,
                got="a second step before any layer has read the first",
                accepted="one pre_step, then one forward of the model with inference_params",
                todo="run the model in between, or reset()",
            )

    def evict(self, sequence: Hashable) -> None:
        """Have a sequence leave now, and its room free for the next step.

        Raises:
            StateError: it is not here: it was never named, or has left already.
        """
        if not isinstance(sequence, Hashable) or sequence not in self.sequences:
            raise StateError(
                f"{type(self).__name__}.evict",
                got=f"sequence {sequence!r}, which was never named or has left already",
                accepted=", ".join(repr(known) for known in self.sequences) or "no sequence: the cache is empty",
                todo="evict each sequence once; one that a step leaves out has left with it",
            )
        del self.sequences[sequence]
        self._slots.take(self.sequences)
        self._step = None

    @property
    def step_under_way(self) -> Step:
        """The step that :meth:`pre_step` announced.

        Raises:
            StateError: none.
        """
        if self._step is None:
            raise StateError(
                type(self).__name__,
                got="a forward that no pre_step announced",
                accepted="pre_step({sequence: new tokens, ...}) before each forward of the model",
                todo="call it",
            )
        return self._step

    def get_seqlens_pre_step(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int32 ``[b]``: tokens of each sequence before the step under way: the positions of its first new tokens."""
        return self.step_under_way.lengths("before", torch.device(device), torch.int32)

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """int32 ``[b + 1]`` on the CPU: cumulative new tokens of the step under way."""
        return _cumulative(self.step_under_way.new)

    @property
    def cu_seqlens_kv(self) -> torch.Tensor:
        """int32 ``[b + 1]`` on the CPU: cumulative tokens of the sequences, new ones included."""
        return _cumulative(self.step_under_way.after)

    def claim(self, layer_number: int, module: torch.nn.Module, label: str) -> None:
        """Have one module's cache be nobody else's.

        Args:
            layer_number: the module's.
            module: not kept alive.
            label: the module, for messages.

        Raises:
            StateError: another module with this number has come by since the last :meth:`reset`.
        """
        owner = self._owners.setdefault(layer_number, weakref.ref(module))()
        if owner is None:
            self._owners[layer_number] = weakref.ref(module)
        elif owner is not module:
            raise StateError(
                f"{label}: layer_number",
                got=f"{layer_number}, which another module with this cache has, too",
                accepted="a number for each attention of a model: two would write over each other's keys",
                todo="number the layers from 1, or give each model a cache of its own",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without the modules: a copy may serve a copy of the model."""
        return {**vars(self), "_owners": {}}

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values; what attention then reads.

        Each layer writes a step once.

        Args:
            layer_number: which layer.
            new_k: ``[b, s, g, d]``, ``[s, b, g, d]`` or ``[t, g, d]`` by ``qkv_format``.
            new_v: the same for values.
            qkv_format: of the two.

        Returns:
            Keys and values ``[b, longest, g, d]`` of whole sequences, 0 beyond their ends; views of the cache where it
            has them in such an order. They hold until the next step.

        Raises:
            ArgumentTypeError: keys or values are no tensors.
            ArgumentError: another format, dtype, shape or device than the cache is for; a layer's number that is none.
            StateError: no step under way; a gradient is needed; this layer has written the step, or missed one.
        """
        where = f"{type(self).__name__} of layer {layer_number}"
        step = self.step_under_way
        check_size(f"{where}: layer_number", layer_number)
        self._check_new(where, new_k, new_v, qkv_format, step)
        layer = self._layers.get(layer_number)
        if layer is None:
            channels = (self.head_dim_k, self.head_dim_v)
            layer = LayerCache(self._slots.tokens, self.num_heads_kv, channels, self.dtype, new_k.device)
        if layer.keys.device != new_k.device:
            raise ArgumentError(
                where,
                got=f"keys on {new_k.device}",
                accepted=f"{layer.keys.device}, where this layer's cache lies",
                todo="move the model before the first step, or reset()",
            )
        layer.check_turn(where, self._steps, begun=any(step.before))
        self._layers[layer_number] = layer
        if qkv_format == "sbhd":
            new_k, new_v = new_k.transpose(0, 1), new_v.transpose(0, 1)
        layer.write(step, new_k, new_v, packed=qkv_format == "thd")
        layer.steps = self._steps
        return layer.read(step)

    def _check_new(self, where: str, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str, step: Step) -> None:
        if (qkv_format == "thd") is not (self.qkv_format == "thd"):  # the others differ by a transpose alone
            accepted = repr(self.qkv_format) if self.qkv_format == "thd" else "'bshd' or 'sbhd'"
            raise ArgumentError(
                f"{where}: qkv_format", got=repr(qkv_format), accepted=accepted, todo="make both the same"
            )
        check_tensor(f"{where}: keys", new_k)
        check_tensor(f"{where}: values", new_v)
        if torch.is_grad_enabled() and (new_k.requires_grad or new_v.requires_grad):
            raise StateError(
                where,
                got="keys and values that need a gradient",
                accepted="generation without gradients",
                todo="run the model inside torch.no_grad() or torch.inference_mode()",
            )
        for name, tensor, channels in (("keys", new_k, self.head_dim_k), ("values", new_v, self.head_dim_v)):
            tail = (self.num_heads_kv, channels)
            rank = len(qkv_format)
            held = tensor.dim() == rank and tuple(tensor.shape[-2:]) == tail and step.fits(tensor, qkv_format)
            if tensor.dtype is not self.dtype or not held:
                raise ArgumentError(
                    f"{where}: {name}",
                    got=f"{tensor.dtype} {tuple(tensor.shape)} for new tokens {step.new}",
                    accepted=f"{self.dtype} [{step.lead(qkv_format)}, {tail[0]}, {tail[1]}]",
                    todo="feed the batch that pre_step announced, or make the cache for this model",
                )

    @property
    def nbytes(self) -> int:
        """Bytes that the caches of all layers take."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in (layer.keys, layer.values))

    def __repr__(self) -> str:
        pages = f", {self.total_num_pages} pages of {self.page_size}" if self.is_paged else ""
        return (
            f"InferenceParams({len(self.sequences)} of {self.max_batch_size} sequences of up to "
            f"{self.max_sequence_length} tokens{pages}, {len(self._layers)} layers, {self.dtype}, {self.qkv_format!r})"
        )


def _cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
