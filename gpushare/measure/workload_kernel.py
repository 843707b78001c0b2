"""The kernel of the built-in workload: C = A x B in single precision, 16 x 16 threads a block, as PTX text.

PTX, so that neither NVRTC nor a compiler is needed: any driver since 520 translates it for its GPU (Pascal and later).
It is this CUDA C, compiled once with NVRTC 11.8 for compute_60::

    #define T 16
    extern "C" __global__ void gpushare_matmul(const float *a, const float *b, float *c, int n)
    {
        __shared__ float as[T][T], bs[T][T];
        int row = blockIdx.y * T + threadIdx.y, column = blockIdx.x * T + threadIdx.x;
        float sum = 0.0f;
        for (int start = 0; start < n; start += T) {
            int k = start + threadIdx.x, m = start + threadIdx.y;
            as[threadIdx.y][threadIdx.x] = row < n && k < n ? a[(size_t)row * n + k] : 0.0f;
            bs[threadIdx.y][threadIdx.x] = m < n && column < n ? b[(size_t)m * n + column] : 0.0f;
            __syncthreads();
            #pragma unroll 4
            for (int i = 0; i < T; ++i) sum += as[threadIdx.y][i] * bs[i][threadIdx.x];
            __syncthreads();
        }
        if (row < n && column < n) c[(size_t)row * n + column] = sum;
    }
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 16
NAME: Final = "gpushare_matmul"
PTX: Final = """\
.version 7.8
.target sm_60
.address_size 64
.visible .entry gpushare_matmul(
 .param .u64 matrix_0,
 .param .u64 matrix_1,
 .param .u64 matrix_2,
 .param .u32 matrix_3
)
{
 .reg .pred %p<13>;
 .reg .f32 %f<29>;
 .reg .b32 %r<20>;
 .reg .b64 %rd<41>;
 .shared .align 4 .b8 tile_a[1024];
 .shared .align 4 .b8 tile_b[1024];
 ld.param.u64 %rd14, [matrix_0];
 ld.param.u64 %rd15, [matrix_1];
 ld.param.u64 %rd16, [matrix_2];
 ld.param.u32 %r11, [matrix_3];
 mov.u32 %r12, %ctaid.y;
 shl.b32 %r13, %r12, 4;
 mov.u32 %r1, %tid.y;
 add.s32 %r2, %r13, %r1;
 mov.u32 %r14, %ctaid.x;
 shl.b32 %r15, %r14, 4;
 mov.u32 %r3, %tid.x;
 add.s32 %r4, %r15, %r3;
 setp.lt.s32 %p1, %r11, 1;
 mov.f32 %f27, 0f00000000;
 @%p1 bra $L__BB0_9;
 mul.wide.s32 %rd1, %r11, %r2;
 mul.wide.u32 %rd17, %r1, 64;
 mov.u64 %rd18, tile_a;
 add.s64 %rd19, %rd18, %rd17;
 mul.wide.u32 %rd20, %r3, 4;
 add.s64 %rd2, %rd19, %rd20;
 cvt.s64.s32 %rd3, %r4;
 mov.u64 %rd21, tile_b;
 add.s64 %rd22, %rd21, %rd17;
 add.s64 %rd4, %rd22, %rd20;
 add.s64 %rd5, %rd19, 8;
 add.s64 %rd23, %rd21, %rd20;
 add.s64 %rd6, %rd23, 128;
 cvta.to.global.u64 %rd7, %rd14;
 mov.u32 %r18, 0;
 cvta.to.global.u64 %rd30, %rd15;
$L__BB0_2:
 add.s32 %r6, %r18, %r1;
 add.s32 %r7, %r18, %r3;
 setp.ge.s32 %p2, %r7, %r11;
 setp.ge.s32 %p3, %r2, %r11;
 mov.f32 %f26, 0f00000000;
 or.pred %p4, %p3, %p2;
 mov.f32 %f25, %f26;
 @%p4 bra $L__BB0_4;
 cvt.s64.s32 %rd24, %r7;
 add.s64 %rd25, %rd1, %rd24;
 shl.b64 %rd26, %rd25, 2;
 add.s64 %rd27, %rd7, %rd26;
 ld.global.f32 %f25, [%rd27];
$L__BB0_4:
 st.shared.f32 [%rd2], %f25;
 setp.ge.s32 %p5, %r6, %r11;
 setp.ge.s32 %p6, %r4, %r11;
 or.pred %p7, %p6, %p5;
 @%p7 bra $L__BB0_6;
 mul.wide.s32 %rd28, %r6, %r11;
 add.s64 %rd29, %rd28, %rd3;
 shl.b64 %rd31, %rd29, 2;
 add.s64 %rd32, %rd30, %rd31;
 ld.global.f32 %f26, [%rd32];
$L__BB0_6:
 st.shared.f32 [%rd4], %f26;
 bar.sync 0;
 mov.u32 %r19, 0;
 mov.u64 %rd39, %rd6;
 mov.u64 %rd40, %rd5;
$L__BB0_7:
 .pragma "nounroll";
 ld.shared.f32 %f13, [%rd39+-128];
 ld.shared.f32 %f14, [%rd40+-8];
 fma.rn.f32 %f15, %f14, %f13, %f27;
 ld.shared.f32 %f16, [%rd39+-64];
 ld.shared.f32 %f17, [%rd40+-4];
 fma.rn.f32 %f18, %f17, %f16, %f15;
 ld.shared.f32 %f19, [%rd39];
 ld.shared.f32 %f20, [%rd40];
 fma.rn.f32 %f21, %f20, %f19, %f18;
 ld.shared.f32 %f22, [%rd39+64];
 ld.shared.f32 %f23, [%rd40+4];
 fma.rn.f32 %f27, %f23, %f22, %f21;
 add.s64 %rd40, %rd40, 16;
 add.s64 %rd39, %rd39, 256;
 add.s32 %r19, %r19, 4;
 setp.ne.s32 %p8, %r19, 16;
 @%p8 bra $L__BB0_7;
 bar.sync 0;
 add.s32 %r18, %r18, 16;
 setp.lt.s32 %p9, %r18, %r11;
 @%p9 bra $L__BB0_2;
$L__BB0_9:
 setp.ge.s32 %p10, %r4, %r11;
 setp.ge.s32 %p11, %r2, %r11;
 or.pred %p12, %p11, %p10;
 @%p12 bra $L__BB0_11;
 mul.wide.s32 %rd33, %r11, %r2;
 cvt.s64.s32 %rd34, %r4;
 add.s64 %rd35, %rd33, %rd34;
 cvta.to.global.u64 %rd36, %rd16;
 shl.b64 %rd37, %rd35, 2;
 add.s64 %rd38, %rd36, %rd37;
 st.global.f32 [%rd38], %f27;
$L__BB0_11:
 ret;
}
"""
