"""Names of torch's operators by class, without the underscores and the ``special_`` around them: see `oracle.opclass`."""

from __future__ import annotations

EXACT_NAMES = frozenset(
    """
    abs adaptive_max_pool2d adaptive_max_pool3d alias alias_copy all amax amin aminmax any arange argmax argmin argsort
    as_strided_copy as_strided_scatter bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor broadcast_tensors bucketize cat ceil channel_shuffle clamp clamp_max clamp_min clone collapse complex conj
    conj_physical constant_pad_nd copy copy_strided copy_to copysign count_nonzero cummax cummin detach detach_copy
    device_put diag_embed diagonal_copy diagonal_scatter embedding empty empty_like empty_permuted empty_strided eq equal
    expand expand_copy eye fill flip floor fmax fmin fmod fractional_max_pool2d fractional_max_pool3d frexp full full_like
    gather ge gt hardtanh hardtanh_backward heaviside im2col index index_copy index_fill index_put index_select is_nonzero
    isclose isfinite isin isinf isnan isneginf isposinf isreal item kthvalue le lift lift_fresh lift_fresh_copy
    linalg_diagonal local_scalar_dense logical_and logical_not logical_or logical_xor lt masked_fill masked_fill_backward
    masked_scatter masked_select max max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d maximum
    median min minimum mode nan_to_num nanmedian narrow narrow_copy ne neg new_empty new_empty_strided new_full new_ones
    new_zeros nextafter nonzero nonzero_static one_hot ones ones_like permute_copy pixel_shuffle pixel_unshuffle positive
    put real reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d reshape reshape_alias reshape_copy resize resolve_conj rev roll rot90 round
    scalar_tensor scatter searchsorted select_backward select_copy select_scatter sgn sign signbit slice_backward slice_copy
    slice_scatter sort split split_copy split_with_sizes split_with_sizes_copy squeeze_copy stack t_copy take threshold
    threshold_backward to_dense topk trace_backward transpose_copy tril tril_indices triu triu_indices trunc unbind
    unbind_copy unfold unfold_copy unique unique2 unique_consecutive unsafe_index unsafe_index_put unsafe_view
    unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest_exact1d
    upsample_nearest_exact2d upsample_nearest_exact3d value_selecting_reduction_backward view_as_real_copy view_copy where
    zero zeros zeros_like
    """.split()  # noqa: SIM905 - one a line would be longer than the code that reads them
)
"""Operators that move or select what is there, compare, or make what their arguments say."""

CORRECTLY_ROUNDED_NAMES = frozenset(
    """
    add div mul reciprocal rsub square sub to_copy true_divide
    """.split()  # noqa: SIM905 - one a line would be longer than the code that reads them
)
"""IEEE 754's operations, and casts; but for the square root, which MKL's vectors give to within one unit in the last place."""

SPECIAL_NAMES = frozenset(
    """
    airy_ai bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t
    chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w digamma dirichlet_grad entr erf_inv erfcx erfinv
    hermite_polynomial_h hermite_polynomial_he i0 i0e i1 i1e igamma igammac laguerre_polynomial_l legendre_polynomial_p
    lgamma log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 mvlgamma ndtri polygamma
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 standard_gamma_grad zeta
    """.split()  # noqa: SIM905 - one a line would be longer than the code that reads them
)
"""Functions that are approximated less closely than elementary ones."""

WIDE_SUMS = frozenset(
    """
    cosine_similarity cumsum linalg_vector_norm logsumexp mean nanmean nansum norm std std_mean sum var var_mean
    """.split()  # noqa: SIM905 - one a line would be longer than the code that reads them
)
"""Reductions of which every kernel adds up in float32, whatever the dtype of what it adds."""

ELEMENTARY = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erfc erfinv exp exp2 expm1 log log10 log1p log2 pow rsqrt
    sigmoid sin sinc sinh sqrt tan tanh
    """.split()  # noqa: SIM905 - one a line would be longer than the code that reads them
)
"""One function of a number each, of which kernels round nothing but the result."""
