// y = x @ W.T for up to 64 rows of x and a bf16 weight on Hopper (sm_90a), at the speed of memory.
//
// x is the left operand of the tensor core's product, 64 rows whether x has them or not, and OUTPUTS rows of the weight
// are the right one: the fewer outputs a block has, the more blocks read a weight of few rows and many columns.
//
//   one thread   x and weight   memory -> ring in shared memory, whose slots hold TILES of 64 columns
//   four warps   multiply       ring -> sums -> y
//
// A block takes every gridDim.x-th tile of OUTPUTS rows of the weight; its ring runs on from one to the next. Rows of
// the left operand past x's are whatever lies there in shared memory: no row's sums see another's.
//
// A weight is constant while products run, so its first tiles are fetched while kernels before this one still run, as
// long as those that start others early (griddepcontrol) write no weights. x is read, and y written, after their end.
//
// Invariant: K is summed in ascending steps of 16 in one fp32 sum, as in dense.py.
//
// With GATE a block has as many gate rows of the weight as up rows that belong to them, and y is silu(gate) * up.
//
// Compile-time parameters: OUTPUTS, a multiple of 8, of 16 with GATE; GATE, 0 or 1; TILES; RESULT, float or unsigned short for bf16; and the text of an
// instruction with OUTPUTS / 2 sums: SUMS, its constraints, and OPERANDS, their names.
// Letters: N rows of the weight, M rows of x, K columns of both.

#include "hopper.cuh"

constexpr u32 W_BYTES = OUTPUTS * 128;  // of 64 columns
constexpr u32 STORED = GATE ? OUTPUTS / 2 : OUTPUTS;  // columns of y a tile
constexpr u32 SLOTS_AT = 1024;          // after the barriers

__device__ __forceinline__ void copy_tiles(u32 target, const TensorMap* map, u32 row, u32 tile, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(target),
      "l"(map), "r"(0), "r"(row), "r"(tile), "r"(barrier)
      : "memory");
}

// sums[64, OUTPUTS] += x[64, 16] @ w[OUTPUTS, 16].T, both by their descriptors in shared memory.
__device__ __forceinline__ void multiply(float* sums, u64 x, u64 w) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" EXPANDED_TEXT(OUTPUTS) "k16.f32.bf16.bf16 " OPERANDS
               ", 1, 1, 1, 0, 0;"
               : SUMS
               : "l"(x), "l"(w));
}

// The ring: slots of x_bytes and W_BYTES for each of TILES, a barrier each for full and empty.
struct Ring {
  u32 memory, x_bytes, slots, slot = 0, parity = 0;
  __device__ __forceinline__ u32 slot_bytes() const { return TILES * (x_bytes + W_BYTES); }
  __device__ __forceinline__ u32 full() const { return memory + slot * 8; }
  __device__ __forceinline__ u32 empty() const { return memory + (slots + slot) * 8; }
  __device__ __forceinline__ u32 x() const { return memory + SLOTS_AT + slot * slot_bytes(); }
  __device__ __forceinline__ u32 w() const { return x() + TILES * x_bytes; }
  __device__ __forceinline__ void advance() {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

// A block's steps along K, tile after tile of the weight.
struct Step {
  u32 steps, tile = blockIdx.x, step = 0;
  __device__ __forceinline__ void advance() {
    if (++step == steps) step = 0, tile += gridDim.x;
  }
};

// A slot's rows of the weight. up: the first of the up rows.
__device__ __forceinline__ void copy_weight(const TensorMap* w_map, const Ring& ring, const Step& step, u32 up) {
  if (!GATE) {
    copy_tiles(ring.w(), w_map, step.tile * OUTPUTS, step.step * TILES, ring.full());
    return;
  }
#pragma unroll
  for (u32 i = 0; i < TILES; ++i)
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
      copy_tiles(ring.w() + i * W_BYTES + half * (W_BYTES / 2), w_map, step.tile * STORED + half * up,
                 step.step * TILES + i, ring.full());
}

__device__ __forceinline__ void fetch(const TensorMap* x_map, const TensorMap* w_map, Ring ring, u32 tiles, u32 steps,
                                      u32 up) {
  Ring ahead = ring;
  Step of_w{steps}, of_x{steps};
  for (u32 i = 0; i < ring.slots && of_w.tile < tiles; ++i, of_w.advance(), ahead.advance()) {
    expect(ahead.full(), ring.slot_bytes());
    copy_weight(w_map, ahead, of_w, up);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for all that ran before on the stream
  for (u32 i = 0; i < ring.slots && of_x.tile < tiles; ++i, of_x.advance(), ring.advance())
    copy_tiles(ring.x(), x_map, 0, of_x.step * TILES, ring.full());
  for (; of_x.tile < tiles; of_x.advance(), ring.advance()) {
    wait(ring.empty(), ring.parity ^ 1);
    expect(ring.full(), ring.slot_bytes());
    copy_weight(w_map, ring, of_x, up);
    copy_tiles(ring.x(), x_map, 0, of_x.step * TILES, ring.full());
  }
}

__device__ __forceinline__ void store(float* y, float a, float b) { *reinterpret_cast<float2*>(y) = make_float2(a, b); }

__device__ __forceinline__ void store(unsigned short* y, float a, float b) {
  u32 pair;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  *reinterpret_cast<u32*>(y) = pair;
}

__device__ __forceinline__ void multiply_rows(Ring ring, RESULT* y, u32 rows, u32 outputs, u32 tiles, u32 steps) {
  const u32 lane = threadIdx.x & 31, first_m = threadIdx.x / 32 * 16 + lane / 4;
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sums[OUTPUTS / 2];
#pragma unroll
    for (u32 i = 0; i < OUTPUTS / 2; ++i)  // not moved past the fence that makes them the products' own
      asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sums[i]));
    u32 before = 0;  // the barrier of the slot before
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
      wait(ring.full(), ring.parity);
      const u64 x = descriptor(ring.x()), w = descriptor(ring.w());
      multiply_fence();
#pragma unroll
      for (u32 i = 0; i < TILES; ++i)
#pragma unroll
        for (u32 q = 0; q < 4; ++q) multiply(sums, x + i * (ring.x_bytes / 16) + q * 2, w + i * (W_BYTES / 16) + q * 2);
      multiply_commit();
      multiply_wait<1>();
      arrive(before, lane == 0 && step > 0);
      before = ring.empty();
      ring.advance();
    }
    multiply_wait<0>();
    arrive(before, lane == 0);
#pragma unroll
    for (u32 i = 0; i < STORED / 8; ++i) {
      const u32 n = tile * STORED + i * 8 + lane % 4 * 2;
      float values[4];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        const u32 at = 4 * i + j;
        values[j] = GATE ? gated(sums[at], sums[(at + OUTPUTS / 4) % (OUTPUTS / 2)]) : sums[at];
      }
      if (n < outputs) {
        RESULT* target = y + u64(first_m) * outputs + n;
        if (first_m < rows) store(target, values[0], values[1]);
        if (first_m + 8 < rows) store(target + u64(8) * outputs, values[2], values[3]);
      }
    }
  }
}

// outputs: columns of y. x_rows: of a box of x, a multiple of 8. steps: of TILES * 64 columns.
extern "C" __global__ void __launch_bounds__(160, 1)
    few_rows(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, RESULT* y, u32 rows,
             u32 outputs, u32 x_rows, u32 slots, u32 steps) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Ring ring{shared_base(), x_rows * 128, slots};
  const u32 tiles = (outputs + STORED - 1) / STORED;
  if (threadIdx.x == 128) {
    for (Ring r = ring; r.parity == 0; r.advance()) {
      init(r.full(), 1);
      init(r.empty(), 4);  // a lane of each warp
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  // The shuffle tells the compiler that a warp takes one way; else it makes products wait for each other.
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == 4) {
    if (elected()) fetch(&x_map, &w_map, ring, tiles, steps, outputs);
  } else {
    multiply_rows(ring, y, rows, outputs, tiles, steps);
  }
}
