// SPDX-License-Identifier: Apache-2.0
// conv2d by cooperative matrices: a workgroup takes 8 rows of 16 pixels and 64 output channels, a
// subgroup two of the rows. Of 16 input channels at a time the pixels with those around them are made
// halves in shared memory, then a row of the kernel's weights; a tap's pixels are where they lie there.
// Grid: w / 16, h / 8, output channels / 64.

const uint TALL = 8u, WIDE = 16u, OUTS = 64u, MOST = 5u;  // MOST: the largest kernel
const uint PIXEL = 4u, WEIGHTS_ROW = OUTS / 4u;           // units of four halves, from one to the next

shared f16vec4 pixels[(TALL + MOST - 1u) * (WIDE + MOST - 1u) * PIXEL];
shared f16vec4 weights_shared[MOST * 16u * WEIGHTS_ROW];
shared float results[PVR_WG_X / 32u * 256u];

void main() {
    const uint x0 = gl_WorkGroupID.x * WIDE, y0 = gl_WorkGroupID.y * TALL;
    const uint eighth0 = gl_WorkGroupID.z * OUTS / 8u, lane = gl_LocalInvocationID.x;
    const uint k = push.k, taps = k * k, wide = WIDE + k - 1u, tall = TALL + k - 1u;
    const uint quads = push.xl / 4u, n8 = (push.cout + 7u) / 8u;
    const uint corner = push.origin - k / 2u * (push.xs + 1u) + y0 * push.xs + x0;

    COOPMAT_SUM sums[8];
    [[unroll]] for (uint i = 0u; i < 8u; i++) sums[i] = COOPMAT_ZERO;
    const uint row = coopmat_subgroup() * 2u;
    for (uint c0 = 0u; c0 < push.cin; c0 += 16u) {
        barrier();
        for (uint u = lane; u < tall * wide * PIXEL; u += PVR_WG_X) {
            const uint pixel = u / PIXEL, c = c0 + u % PIXEL * 4u;
            // What lies beyond the block is of pixels that are not stored.
            const uint i = min(corner + pixel / wide * push.xs + pixel % wide, push.ps - 1u);
            const vec4 v = c < push.cin
                ? x[(c / push.xl * push.ps + i) * quads + c % push.xl / 4u] : vec4(0.0);
            pixels[u] = f16vec4(clamp(v, -65504.0, 65504.0));
        }
        for (uint a = 0u; a < k; a++) {
            barrier();
            for (uint u = lane; u < k * 128u; u += PVR_WG_X) {
                const uint eighth = eighth0 + u % 8u, c = c0 + u / 8u % 16u, b = u / 128u;
                vec4 low = vec4(0.0), high = low;
                if (eighth < n8 && c < push.cin) weights_of(eighth, a * k + b, c, low, high);
                const uint to = (u / 8u) * WEIGHTS_ROW + u % 8u * 2u;
                weights_shared[to] = f16vec4(low);
                weights_shared[to + 1u] = f16vec4(high);
            }
            barrier();
            for (uint b = 0u; b < k; b++) {
                COOPMAT_A left[2];
                [[unroll]] for (uint i = 0u; i < 2u; i++)
                    coopmat_load_a(left[i], pixels, ((row + i + a) * wide + b) * PIXEL, PIXEL);
                [[unroll]] for (uint j = 0u; j < 4u; j++) {
                    COOPMAT_B right;
                    coopmat_load_b_rows(right, weights_shared, b * 16u * WEIGHTS_ROW + j * 4u,
                                        WEIGHTS_ROW);
                    [[unroll]] for (uint i = 0u; i < 2u; i++)
                        coopmat_multiply(left[i], right, sums[i * 4u + j]);
                }
            }
        }
    }

    const uint place = coopmat_subgroup() * 256u;
    [[unroll]] for (uint i = 0u; i < 2u; i++) {
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            coopmat_store(sums[i * 4u + j], results, place, 16u);
            barrier();
            for (uint e = coopmat_lane(); e < 64u; e += 32u) {
                const uint from = place + e * 4u, column = x0 + e / 4u;
                const uint quad = (eighth0 / 2u + j) * 4u + e % 4u;
                const vec4 sum = vec4(results[from], results[from + 1u], results[from + 2u],
                                      results[from + 3u]);
                if (y0 + row + i < push.h && column < push.w) finish(sum, quad, y0 + row + i, column);
            }
            barrier();
        }
    }
}
