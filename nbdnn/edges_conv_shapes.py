"""Shapes on which a convolution's kernels have edges, each with its reason; `edges_conv.py` makes problems of them."""

from __future__ import annotations

from typing import NamedTuple


class Edge(NamedTuple):
    """A convolution that breaks a careless kernel: its shape (a problem text less op, dtype, mode, layout), and why."""

    shape: str
    why: str


# One below, at and one above every tile extent that a kernel here uses (4, 6, 8, 12, 16, 32, 48, 64).
TILE_LADDER = (3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)


def _tile_edges() -> tuple[Edge, ...]:
    """Every rung once as a width, once as input and once as output channels; extents that meet differ in their rung."""
    rungs = len(TILE_LADDER)
    edges = []
    for i, w in enumerate(TILE_LADDER):
        c, k, h = TILE_LADDER[(i + 15) % rungs], TILE_LADDER[(i + 8) % rungs], TILE_LADDER[(i * 5) % 12]
        shape = f"n1c{c}h{h}w{w}:k{k}r3s3:p1x1:u1x1:d1x1:g1"
        edges.append(Edge(shape, f"tile remainders: {h}x{w} outputs, {c} to {k} channels"))
    return tuple(edges)


# Few and different: what every dtype, both modes and every epilogue are tried on.
CORE_2D = (
    Edge("n2c5h9w11:k7r3s3:p1x1:u1x1:d1x1:g1", "odd and prime everywhere, two images"),
    Edge("n1c16h8w24:k32r3s3:p1x1:u1x1:d1x1:g1", "whole vectors and tiles everywhere"),
    Edge("n2c19h7w13:k18r3s3:p1x1:u2x2:d1x1:g1", "stride 2, more than a vector of channels and a remainder"),
    Edge("n2c33h5w7:k17r1s1:p0x0:u1x1:d1x1:g1", "1x1: a plain matrix product, nothing divides anything"),
    Edge("n2c24h9w10:k24r3s3:p1x1:u1x1:d1x1:g24", "depthwise"),
    Edge("n1c6h8w9:k4r3s2:ba1.2x0.3:u2x1:d1x2:g2", "asymmetric in every parameter, groups of unequal width"),
    Edge("n2c3h23w25:k20r7s7:p3x3:u2x2:d1x1:g1", "the first layer of a network: three channels, 7x7"),
    Edge("n2c32h9w10:k32r3s3:p1x1:u1x1:d1x1:g4", "ResNeXt: eight channels a group"),
)
CORE_3D = (
    Edge("n1c5d5h6w7:k6t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1", "odd extents in 3-D"),
    Edge("n2c8d4h5w9:k17t3r3s3:p1x1x1:u2x2x2:d1x1x1:g1", "stride 2 in 3-D, a remainder of filters"),
    Edge("n2c4d5h6w7:k6t2r3s1:ba1.0x0.2x1.1:u1x2x1:d2x1x1:g2", "asymmetric in every parameter, grouped, 3-D"),
)
ODD_GROUPS = Edge("n2c36h9w12:k36r3s3:p1x1:u2x2:d1x1:g9", "groups of four, an odd number of them: no vector is full")
EDGES_2D = (
    *CORE_2D,
    *_tile_edges(),
    Edge("n1c1h1w1:k1r1s1:p0x0:u1x1:d1x1:g1", "one product"),
    Edge("n3c4h1w1:k5r3s3:p1x1:u1x1:d1x1:g1", "one pixel: eight of nine taps read padding"),
    Edge("n2c7h6w5:k9r6s5:p0x0:u1x1:d1x1:g1", "the filter is the image: one output"),
    Edge("n2c7h8w7:k9r6s5:p0x0:u1x1:d1x1:g1", "3x3 outputs, what a forward as a Winograd bwd_filter is for"),
    Edge("n1c17h12w14:k18r10s12:p0x0:u1x1:d1x1:g1", "the same with a remainder of channels"),
    Edge("n1c9h1w70:k10r1s3:p0x1:u1x1:d1x1:g1", "one row: a 1-D convolution"),
    Edge("n2c10h1w907:k6r1s5:p0x9:u1x3:d1x4:g2", "a long row, in parts, with stride, dilation and groups"),
    Edge("n1c9h70w1:k10r3s1:p1x0:u1x1:d1x1:g1", "one column: every row has a single output"),
    Edge("n1c3h5w301:k4r3s3:p1x1:u1x1:d1x1:g1", "wider than the longest transform of an FFT, rows in unequal parts"),
    Edge("n1c2h520w3:k3r5s3:p2x1:u1x1:d1x1:g1", "taller than any tile or transform"),
    Edge("n1c6h7w9:k8r3s3:p0x0:u1x1:d1x1:g1", "border valid"),
    Edge("n1c6h7w9:k8r3s3:p2x2:u1x1:d1x1:g1", "border full"),
    Edge("n2c17h10w14:k18r3s3:p2x2:u1x1:d1x1:g1", "border full, what a forward as bwd_data is for"),
    Edge("n1c3h4w4:k5r3s3:p5x4:u1x1:d1x1:g1", "outputs wholly in the padding are zero"),
    Edge("n1c5h8w12:k6r2s2:p0x0:u3x3:d1x1:g1", "stride beyond the filter: inputs nobody reads, a zero gradient"),
    Edge("n1c5h10w12:k6r3s3:p0x0:u2x2:d1x1:g1", "stride 2 that leaves the last row and column unread"),
    Edge("n2c18h9w7:k33r1s1:p0x0:u2x2:d1x1:g1", "1x1 with stride: three of four inputs unread"),
    Edge("n1c5h6w6:k7r1s1:p1x1:u1x1:d1x1:g1", "1x1 with padding: a border of zeros"),
    Edge("n1c4h11w13:k5r3s3:p2x2:u1x1:d2x2:g1", "dilation keeps the extents"),
    Edge("n1c4h20w21:k5r3s3:p3x3:u2x2:d3x3:g1", "dilation and stride, coprime"),
    Edge("n1c3h29w31:k9r11s11:p2x2:u4x4:d1x1:g1", "11x11 with stride 4"),
    Edge("n1c9h34w40:k6r11s9:p5x4:u1x1:d1x1:g1", "11x9 with stride 1, what transforms of large tiles are for"),
    Edge("n1c8h9w10:k8r5s5:p2x2:u1x1:d1x1:g1", "5x5: an FFT's and a larger Winograd's home"),
    Edge("n2c3h22w37:k5r17s14:p8x7:u1x1:d1x1:g1", "a filter as large as a tile"),
    Edge("n1c2h45w33:k3r33s35:p16x20:u1x1:d1x1:g1", "a filter too large for tiles"),
    Edge("n1c6h9w8:k7r1s7:p0x3:u1x1:d1x1:g1", "a row filter"),
    Edge("n1c6h9w8:k7r7s1:p3x0:u1x1:d1x1:g1", "a column filter"),
    Edge("n1c7h9w9:k6r2s2:p1x1:u1x1:d1x1:g1", "an even filter: half padding grows the output"),
    Edge("n2c12h7w8:k18r3s3:p1x1:u1x1:d1x1:g3", "groups of four to six channels"),
    Edge("n1c32h6w9:k32r3s3:p1x1:u1x1:d1x1:g8", "ResNeXt: four channels a group"),
    Edge("n1c33h9w11:k40r3s3:p4x4:u1x1:d4x4:g1", "dilated: tiles all of whose pixels meet a tap beside the image"),
    Edge("n2c40h13w9:k32r3s3:p5x5:u2x2:d5x5:g1", "the same with stride 2, of which a gradient leaves out phases"),
    ODD_GROUPS,
    Edge("n1c22h7w9:k22r3s2:ba0.2x1.0:u1x2:d2x1:g11", "groups of two, asymmetric in every parameter"),
    Edge("n1c16h5w9:k16r1s1:p0x0:u1x1:d1x1:g4", "groups of four, 1x1"),
    Edge("n1c33h10w11:k33r3s3:p1x1:u2x2:d1x1:g33", "depthwise, stride 2, an odd number of channels"),
    Edge("n1c5h8w9:k10r3s3:p1x1:u1x1:d1x1:g5", "depthwise with two outputs a channel"),
    Edge("n1c17h12w13:k17r7s7:p3x3:u1x1:d1x1:g17", "depthwise 7x7"),
    Edge("n2c16h9w9:k16r5s5:p2x2:u2x2:d1x1:g16", "depthwise 5x5, stride 2"),
    Edge("n1c3h9w75:k3r5s5:p2x2:u2x2:d1x1:g3", "depthwise 5x5, stride 2, rows of several vectors"),
    Edge("n1c2h14w40:k2r11s11:p5x5:u1x1:d1x1:g2", "depthwise 11x11: more taps than registers"),
    Edge("n1c2h9w2:k2r7s7:p3x3:u1x1:d1x1:g2", "depthwise, columns of taps that no output reaches"),
    Edge("n2c3h3w3:k3r11s11:p5x5:u2x2:d1x1:g3", "the same with stride 2"),
    Edge("n1c18h15w14:k18r3s3:p2x2:u1x1:d2x2:g18", "depthwise, dilated"),
    Edge("n2c32h9w17:k32r3s3:p1x1:u1x1:d1x1:g32", "depthwise in whole vectors of channels"),
    Edge("n2c40h13w21:k40r3s2:ba0.2x1.0:u2x3:d2x1:g40", "depthwise, stride beyond the filter: inputs no tap reaches"),
    Edge(
        "n1c72h11w23:k72r5s5:p2x2:u4x4:d2x2:g72",
        "depthwise, stride 4: three, two or no taps a row in bwd_data",
    ),
    Edge("n1c330h3w15:k330r3s3:p1x1:u1x1:d1x1:g330", "depthwise in so many channels that few pixels fit into a tile"),
    Edge("n1c1h5w1:k2r3s1:p0x0:u3x1:d2x1:g1", "bwd_data of one tap a row, for more rows than dy has"),
    Edge("n2c70h30w35:k70r3s3:p1x1:u1x1:d1x1:g1", "several tiles and a remainder on every axis"),
    Edge("n1c520h5w6:k9r3s3:p1x1:u1x1:d1x1:g1", "a reduction over channels longer than any block"),
    Edge("n2c300h5w6:k260r3s3:p1x1:u1x1:d1x1:g1", "few pixels and more filter than a second-level cache holds"),
    Edge(
        "n2c130h18w19:k70r3s3:p1x1:u1x1:d1x1:g1", "sums of 7 stages, which even shares of a GPU's blocks cut anywhere"
    ),
    Edge("n1c9h4w5:k520r1s1:p0x0:u1x1:d1x1:g1", "more filters than any block; the long reduction of bwd_data"),
    Edge("n3c5h41w43:k6r3s3:p1x1:u1x1:d1x1:g1", "the long reduction of bwd_filter"),
    Edge("n3c5h14w15:k16r1s1:p0x0:u1x1:d1x1:g1", "1x1: blocks of 49 pixels, which no two tiles of 13 or 14 make up"),
    Edge("n1c40h7w7:k42r1s1:p0x0:u1x1:d1x1:g1", "1x1: 49 pixels in equal tiles, three vectors of channels"),
    Edge("n2c40h9w11:k72r1s1:p0x0:u1x1:d1x1:g1", "1x1: channels in whole vectors, more pixels than a stage or a tile"),
)
EDGES_3D = (
    *CORE_3D,
    Edge("n1c16d4h8w16:k32t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1", "whole vectors and tiles everywhere, 3-D"),
    Edge("n1c9d3h4w33:k33t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1", "tile remainders in 3-D"),
    Edge("n1c7d3h5w4:k9t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1", "1x1x1: a plain matrix product"),
    Edge("n1c5d6h6w8:k4t2r2s2:p0x0x0:u2x2x2:d1x1x1:g1", "2x2x2 with stride 2: a U-Net's way up"),
    Edge("n1c1d1h1w1:k1t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1", "one product in 3-D"),
    Edge("n1c4d6h7w8:k5t1r3s3:p0x1x1:u1x1x1:d1x1x1:g1", "planes: no reach along the depth"),
    Edge("n1c4d6h5w5:k5t3r1s1:p1x0x0:u1x1x1:d1x1x1:g1", "a filter along the depth only"),
    Edge("n1c4d7h8w9:k5t3r3s3:p2x2x2:u1x1x1:d2x2x2:g1", "dilation in 3-D"),
    Edge("n2c3d5h2w3:k2t3r1s1:p0x0x0:u3x1x1:d2x1x1:g1", "the same along the depth"),
    Edge("n1c9d4h6w7:k9t3r3s3:p1x1x1:u1x1x1:d1x1x1:g9", "depthwise in 3-D"),
    Edge("n1c32d5h5w6:k33t3r3s3:p3x3x3:u1x1x1:d3x3x3:g1", "dilated in 3-D: depths beside the image"),
    Edge("n1c24d4h6w9:k24t3r3s3:p1x1x1:u1x1x1:d1x1x1:g6", "groups of four in 3-D"),
    Edge("n1c9d4h6w7:k9t1r3s3:p0x1x1:u1x1x1:d1x1x1:g9", "depthwise, every depth by itself"),
    Edge("n2c5d4h6w7:k6t1r3s3:p0x1x1:u2x1x1:d1x1x1:g1", "every other depth by itself"),
    Edge("n1c6d5h4w6:k7t3r1s1:p1x0x0:u1x1x1:d1x1x1:g1", "depths only"),
    Edge("n1c40d3h6w6:k34t3r3s3:p1x0x0:u1x1x1:d1x1x1:g1", "whole tiles of channels and pixels at depths of padding"),
)
# Channels in multiples of 8, which matrix units take; posed in float32, bfloat16 and, in mixed layouts, float16.
EDGES_MATRIX = (
    Edge("n2c72h5w6:k40r3s3:p1x1:u2x2:d1x1:g1", "channels beyond a stage with a remainder, stride 2"),
    Edge("n1c16h7w9:k32r3s2:ba1.2x0.3:u2x1:d1x2:g2", "asymmetric in every parameter, groups of unequal width"),
    Edge("n1c8h9w8:k8r2s2:p0x0:u3x3:d1x1:g1", "stride beyond the filter: gradients that no tap reaches"),
    Edge("n1c16h10w11:k8r3s3:p2x2:u2x4:d2x2:g1", "stride and dilation with a common factor: every second tap or none"),
    Edge("n1c136h5w5:k72r1s1:p1x1:u1x1:d1x1:g1", "1x1 with padding, a remainder behind several tiles"),
    Edge("n1c256h3w4:k24r3s3:p1x1:u1x1:d1x1:g1", "few outputs of a long reduction, which is cut into parts"),
    Edge("n1c64h17w19:k248r3s3:p1x1:u1x1:d1x1:g1", "several tiles on every axis"),
    Edge("n2c16h6w8:k24r3s3:p1x1:u1x1:d1x1:g1", "planes whose pixels are stored four at a time"),
    Edge("n1c24d3h4w5:k16t3r3s3:p1x1x1:u2x2x2:d1x1x1:g1", "stride 2 in 3-D"),
    Edge("n2c16d5h6w7:k32t2r3s1:ba1.0x0.2x1.1:u1x2x1:d2x1x1:g2", "asymmetric in every parameter, grouped, 3-D"),
)
# Depthwise of stride 1, what kernels of large filters take; posed in 16 bits and float32, in both layouts.
EDGES_BANDS = (
    Edge("n2c40h14w14:k40r7s7:p3x3:u1x1:d1x1:g40", "7x7, a tile that is not full and a slab of channels that is not"),
    Edge("n2c24h19w36:k24r5s5:p2x2:u1x1:d1x1:g24", "5x5, several tiles on both axes with remainders"),
    Edge("n1c17h12w13:k17r7s7:p3x3:u1x1:d1x1:g17", "odd extents: planar rows that no vector divides"),
    Edge("n3c16h5w6:k16r7s7:p6x6:u1x1:d1x1:g16", "border full: a filter larger than the image"),
    Edge("n1c8h35w40:k8r9s9:p4x4:u1x1:d1x1:g8", "the longest row of taps in one product"),
    Edge("n2c8h13w20:k8r15s11:ba3.9x7.2:u1x1:d1x1:g8", "rows of taps in two products, asymmetric"),
    Edge("n1c8h34w33:k8r4s8:p1x3:u1x1:d1x1:g8", "an even filter of 8 taps a row"),
    Edge("n1c8h4w4:k8r3s3:p5x4:u1x1:d1x1:g8", "outputs wholly in the padding are zero"),
    Edge("n1c8h3w20:k8r3s3:p20x9:u1x1:d1x1:g8", "the same for tiles before and behind the image"),
    Edge("n4c72h1w1:k72r3s3:p1x1:u1x1:d1x1:g72", "one pixel, channels beyond a block's with a remainder"),
    Edge("n1c8h9w48:k8r1s7:p0x3:u1x1:d1x1:g8", "a row filter"),
    Edge("n1c8h9w20:k8r1s7:p1x0:u2x1:d1x3:g8", "the same, dilated, over every other row, not the first"),
)
# First layers whose rows are whole words; posed in both layouts, in float32 and bfloat16.
EDGES_FIRST = (
    Edge("n2c3h21w24:k32r3s3:p1x1:u2x2:d1x1:g1", "rows of whole 16 bytes, half a group of eight outputs at their end"),
    Edge("n1c3h23w300:k40r7s7:p3x3:u2x2:d1x1:g1", "rows of outputs that are cut, a remainder of filters"),
    Edge("n3c1h9w40:k16r5s5:p2x2:u2x2:d1x1:g1", "one channel, an odd number of groups of eight outputs"),
    Edge("n1c4h17w18:k72r3s3:p1x1:u1x1:d1x1:g1", "four channels, stride 1, more filters than a block has"),
    Edge("n1c3h9w42:k64r3s3:p1x1:u1x1:d1x1:g1", "three channels, stride 1: every second window begins within a word"),
    Edge("n2c4h27w36:k24r11s11:p2x2:u4x4:d1x1:g1", "11x11, four channels: more words of a window than a block sums"),
    Edge("n1c2h13w22:k8r3s2:ba0.2x1.0:u3x2:d2x1:g1", "asymmetric in every parameter, rows of taps that are dilated"),
)
# Last layers, of few filters, and bwd_data of first ones; posed in both layouts, in float32, bfloat16 and float16.
EDGES_LAST = (
    Edge("n2c19h11w14:k3r3s3:p1x1:u1x1:d1x1:g1", "three filters, channels that are no whole quads"),
    Edge("n1c64h9w24:k1r5s5:p2x2:u1x1:d1x1:g1", "one filter, rows of whole 16 bytes, outputs in whole vectors"),
    Edge("n2c16h7w10:k2r1s1:p0x0:u1x1:d1x1:g1", "1x1: a product with two columns"),
    Edge("n1c24h10w12:k4r2s3:ba1.0x0.1:u1x1:d2x1:g1", "four filters, asymmetric in every parameter, dilated"),
    Edge("n1c8h6w9:k3r1s1:p1x1:u1x1:d1x1:g1", "1x1 with padding: gradients of windows that begin within dy"),
    Edge("n1c40h21w36:k13r3s3:p1x1:u2x2:d1x1:g1", "thirteen filters, stride 2, several tiles"),
    Edge("n1c3h8w20:k40r3s3:p1x1:u1x1:d1x1:g1", "the first layer of a network, whose dx has three channels"),
    Edge("n1c6h5w6:k4r3s3:p3x3:u1x1:d1x1:g1", "padding beyond the reach: windows of dy begin within it"),
)
# Channels that no vector divides, taps that become channels; posed in both layouts, in float32, bfloat16 and float16.
EDGES_FOLDED = (
    Edge("n2c3h16w24:k26r8s8:p0x0:u8x8:d1x1:g1", "patches, a remainder of filters"),
    Edge("n2c20h8w9:k50r5s5:p0x0:u1x1:d1x1:g1", "channels and filters that no vector divides"),
    Edge("n1c3h22w31:k16r4s4:p0x0:u4x4:d1x1:g1", "patches that leave rows and columns unread"),
    Edge("n1c5h13w15:k12r3s4:ba0.2x3.1:u2x3:d1x1:g1", "strides that do not divide the filter, asymmetric"),
    Edge("n1c2d9h14w17:k20t7r7s7:p3x3x3:u2x2x2:d1x1x1:g1", "the first layer of a network in 3-D"),
    Edge("n2c2d4h8w13:k10t2r4s4:p0x0x0:u2x4x4:d1x1x1:g1", "patches in 3-D, one column unread"),
)
# Over three axes, of which the filter sees two or one, or windows side by side; in both layouts, f32 and bf16, on GPUs.
EDGES_FLAT = (
    Edge("n2c64d3h9w11:k72t1r3s3:p0x1x1:u1x1x1:d1x1x1:g1", "every depth an image, a remainder of filters"),
    Edge("n2c32d9h3w5:k24t3r1s1:p1x0x0:u1x1x1:d2x1x1:g1", "every depth a row, dilated"),
    Edge("n2c40d3h7w8:k40t1r3s3:p0x1x1:u1x1x1:d1x1x1:g40", "depthwise, every depth an image"),
    Edge("n1c3d4h13w24:k32t1r7s7:p0x3x3:u1x2x2:d1x1x1:g1", "a first layer, every depth an image"),
    Edge("n2c16d3h5w6:k16t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1", "1x1x1: rows of all pixels of a depth"),
    Edge("n2c24d2h6w20:k40t2r2s2:p0x0x0:u2x2x2:d1x1x1:g1", "a way up, columns as channels"),
    Edge("n3c12d1h9w24:k72t1r3s4:p0x1x0:u1x2x4:d1x1x1:g1", "windows side by side that overlap in rows"),
)
# Posed in bfloat16 in both layouts on CPUs, some of which multiply pairs of channels or pixels.
EDGES_PAIRS = (
    Edge("n1c70h9w11:k66r3s3:p4x4:u1x1:d4x4:g1", "dilated, so many pairs that taps beside the image are left out"),
    Edge("n2c64h6w7:k48r1s1:p0x0:u1x1:d1x1:g1", "pairs that are read where they lie, vectors of outputs"),
    Edge("n1c17h5w9:k33r2s3:p1x1:u2x1:d1x1:g1", "an odd channel at the end of either side"),
    Edge("n1c3h9w301:k20r3s3:p1x1:u2x2:d1x1:g1", "pairs of pixels in parts of rows, the last of an odd number"),
    Edge("n1c8h5w5:k17r3s5:p1x4:u1x3:d1x1:g1", "pairs of pixels of which either or both lie beside the image"),
    Edge("n1c34h6w7:k18r3s3:p2x2:u1x1:d1x1:g1", "border 'full': many taps meet no pixel"),
    Edge("n2c9h4w5:k21r5s5:p2x2:u1x1:d1x1:g1", "an image as small as the filter, an odd number of channels"),
    Edge("n2c256h4w6:k18r1s1:p0x0:u1x1:d1x1:g1", "pairs of pixels 1 KiB apart, of which a copy has gaps"),
)
# What CPUs take in strips of rows, or copy with gaps; posed in both layouts, in float32.
EDGES_STRIPS = (
    Edge("n1c20h21w130:k3r3s3:p1x1:u1x1:d1x1:g1", "few outputs, channels that pass by in steps, a remainder"),
    Edge("n1c3h41w262:k20r3s3:p1x1:u2x2:d1x1:g1", "the same of a gradient whose columns are every second one"),
    Edge("n1c2d4h20w70:k18t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1", "the same in 3-D"),
    Edge("n1c256h5w7:k24r3s2:p1x0:u1x1:d1x1:g2", "pixels 1 KiB apart, of which a copy has gaps"),
    Edge("n2c128h6w8:k17r2s2:p0x0:u2x2:d1x1:g1", "the same of every second pixel, none beyond a border"),
    Edge("n1c24h37w29:k20r3s3:p3x2:u1x1:d3x2:g1", "dilated: tiles of every third row, of which the last strip has one"),
)
# Windows side by side that fill the image, of whose gradient a CPU makes one product; posed in every way.
EDGES_JOINED = (
    Edge("n2c11h26w34:k21r2s2:p0x0:u2x2:d1x1:g1", "2x2: a network's way up, tiles of pixels across two rows"),
    Edge("n2c3h16w24:k26r8s8:p0x0:u8x8:d1x1:g1", "patches of 8x8, all rows of a register tile in one run"),
    Edge("n1c10h12w27:k14r3s3:p0x0:u3x3:d1x1:g2", "3x3 of two groups, runs that divide few tiles"),
    Edge("n1c3h32w48:k19r16s16:p0x0:u16x16:d1x1:g1", "patches of 16x16, runs of whole vectors"),
    Edge("n1c33h7w20:k70r7s5:p0x0:u7x5:d1x1:g1", "one row of windows, runs that no tile divides"),
    Edge("n1c5h6w72:k9r1s4:p0x0:u1x4:d1x1:g1", "windows along one axis"),
    Edge("n1c6d4h9w10:k7t2r3s2:p0x0x0:u2x3x2:d1x1x1:g1", "over three axes"),
)
# Groups of as many channels out as in, which share lines of pixels on GPUs.
EDGES_GROUPS = (
    Edge("n2c72h9w18:k72r3s3:p1x1:u1x1:d1x1:g9", "groups of 8, one of them in a second line"),
    Edge("n3c24h7w7:k24r3s3:p1x1:u1x1:d1x1:g6", "groups of 4, an odd number of small images"),
    Edge("n2c80h11w10:k80r3s3:p1x1:u1x1:d1x1:g5", "groups of 16, five of them"),
    Edge("n1c96h6w21:k96r3s3:p1x1:u1x1:d1x1:g3", "groups of 32, columns beyond a tile"),
    Edge("n2c72h9w13:k72r3s3:p1x1:u1x1:d1x1:g3", "groups of 24, two of a line of 64"),
    Edge("n2c96h7w10:k96r3s3:p1x1:u2x2:d1x1:g2", "groups of 48, stride 2"),
    Edge("n2c64h9w13:k64r3s3:p1x1:u2x2:d1x1:g8", "stride 2"),
    Edge("n3c16h7w14:k16r3s4:ba1.0x2.1:u2x2:d1x1:g4", "asymmetric, stride 2, groups of 4"),
    Edge("n2c16h9w10:k16r2s4:ba1.2x0.1:u1x1:d2x1:g4", "asymmetric, an even number of taps, groups of 4"),
    Edge("n1c40h5w35:k40r5s5:p2x2:u1x1:d1x1:g5", "5x5 over three strips"),
    Edge("n2c32h8w17:k32r1s1:p0x0:u1x1:d1x1:g2", "1x1"),
)
# 1x1 layers in float32, whose lanes have four pixels or channels each, on GPUs.
EDGES_POINTWISE = (
    Edge("n2c20h6w10:k36r1s1:p0x0:u1x1:d1x1:g1", "five and nine vectors of channels, planes that no tile divides"),
    Edge("n3c68h10w10:k40r1s1:p0x0:u1x1:d1x1:g1", "channels of two lines and a vector"),
    Edge("n2c16h3w72:k30r1s1:p0x0:u1x1:d1x1:g1", "output channels that are no vectors"),
    Edge("n1c300h4w4:k12r1s1:p0x0:u1x1:d1x1:g1", "more input channels than a box, fewer pixels than a warp has lanes"),
    Edge("n1c300h4w4:k30r1s1:p0x0:u1x1:d1x1:g1", "the same with output channels that are no vectors"),
    Edge("n1c12h8w37:k280r1s1:p0x0:u1x1:d1x1:g1", "more output channels than a box"),
    Edge("n2c72h32w33:k96r1s1:p0x0:u1x1:d1x1:g1", "more tiles of pixels than one, the last one of a plane in part"),
    Edge("n2c24d3h4w6:k20t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1", "1x1x1"),
)
# 1x1 of whole chunks of 16 bytes, of 16 bits, in both layouts: factors that TMA brings to matrix units.
EDGES_CHUNKS = (
    Edge(
        "n2c24h6w20:k40r1s1:p0x0:u1x1:d1x1:g1", "fewer channels than a line, rows that are no sectors, a part of a tile"
    ),
    Edge("n3c136h8w12:k72r1s1:p0x0:u1x1:d1x1:g1", "two lines and a chunk, output channels of one and a chunk"),
    Edge("n2c16h3w72:k30r1s1:p0x0:u1x1:d1x1:g1", "of planes, output channels that are no chunks"),
    Edge("n1c320h4w8:k264r1s1:p0x0:u1x1:d1x1:g1", "few pixels, more output channels than a tile"),
    Edge("n2c64h32w34:k200r1s1:p0x0:u1x1:d1x1:g1", "many tiles, the last one of a plane in part"),
    Edge("n2c24d3h4w6:k16t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1", "1x1x1"),
)
EPILOGUES = ("bias", "bias+relu", "bias+swish", "sigmoid", "tanh", "res+beta", "bias+relu+res+beta")
