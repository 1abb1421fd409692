// y = x @ W.T for a packed MXFP4 weight and more than 64 rows of x on Hopper (sm_90a): decoded once a block, between
// memory and tensor core.
//
// A block owns 64 rows of the weight and ROWS rows of x, and walks along K in steps of 128 columns:
//
//   one warp      packed words and exponents   memory -> ring of words
//   one warp      x, 64 columns at a time      memory -> ring of x
//   three groups  decode, each a third step    ring of words -> registers -> ring of bf16 tiles
//   one group     multiplies                   ring of tiles, ring of x -> sums in registers -> y
//
// Invariant: K is summed in ascending steps of 16 in one fp32 sum, as in dense.py.
//
// Compile-time parameters: ROWS of x a block (128 or 256); WORD_SLOTS, TILE_SLOTS, X_SLOTS of the rings. Slots of words
// are a multiple of the decoding groups, and slots of tiles no fewer: a group then waits for a slot's next use only
// after its last one, so that the parity of a barrier says enough.
// Letters: N rows of the weight, M rows of x, K columns of both.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

constexpr u32 TILES = 2;     // of 64 columns a step
constexpr u32 GROUPS = 3;    // that decode
constexpr u32 CHUNK = 128;   // rows of x a product
constexpr u32 X_SLOT_BYTES = ROWS * 128;
constexpr u32 WORD_BYTES = TILES * 2048;
constexpr u32 EXPONENT_BYTES = TILES * 128;
constexpr u32 TILE_BYTES = 64 * 128;
constexpr u32 TILE_SLOT_BYTES = TILES * TILE_BYTES;

constexpr u32 X_AT = 0;
constexpr u32 TILES_AT = X_AT + X_SLOTS * X_SLOT_BYTES;
constexpr u32 WORDS_AT = TILES_AT + TILE_SLOTS * TILE_SLOT_BYTES;
constexpr u32 EXPONENTS_AT = WORDS_AT + WORD_SLOTS * WORD_BYTES;
constexpr u32 BARRIERS_AT = EXPONENTS_AT + WORD_SLOTS * EXPONENT_BYTES;

constexpr u32 FULL_WORDS = 0, EMPTY_WORDS = FULL_WORDS + WORD_SLOTS, FULL_TILES = EMPTY_WORDS + WORD_SLOTS,
              EMPTY_TILES = FULL_TILES + TILE_SLOTS, FULL_X = EMPTY_TILES + TILE_SLOTS, EMPTY_X = FULL_X + X_SLOTS,
              BARRIERS = EMPTY_X + X_SLOTS;

__device__ __forceinline__ u32 shared_base() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return static_cast<u32>(__cvta_generic_to_shared(memory));
}

__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Predicated, since a branch amid products in flight makes the compiler wait for each of them.
__device__ __forceinline__ void arrive(u32 barrier, bool speaks) {
  asm volatile(
      "{\n.reg .pred speaks;\nsetp.ne.u32 speaks, %1, 0;\n"
      "@speaks mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(u32(speaks))
      : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void copy_x(u32 target, const TensorMap* map, u32 k, u32 m, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          target),
      "l"(map), "r"(k), "r"(m), "r"(barrier)
      : "memory");
}

// Eight codes of a word to the operand of one product: masks pick sign and magnitude of one column in each half word
// (packing.BITS says where they lie); upper and lower scale rows n and n + 8.
__device__ __forceinline__ void decode(u32 word, u32 upper, u32 lower, u32* operand) {
  asm volatile(
      "{\n.reg .b32 x0, x1, x2, x3, x4;\n"
      "and.b32 x0, %4, 0x81C081C0;\n"
      "shl.b32 x1, %4, 3;\nand.b32 x1, x1, 0x81C081C0;\n"
      "shl.b32 x2, %4, 6;\nand.b32 x2, x2, 0x81C081C0;\n"
      "shl.b32 x3, %4, 1;\nand.b32 x3, x3, 0x80008000;\n"
      "shr.b32 x4, %4, 3;\nlop3.b32 x3, x4, 0x01800180, x3, 0xEA;\n"
      "shr.b32 x4, %4, 7;\nlop3.b32 x3, x4, 0x00400040, x3, 0xEA;\n"
      "mul.bf16x2 %0, x0, %5;\nmul.bf16x2 %1, x1, %6;\nmul.bf16x2 %2, x2, %5;\nmul.bf16x2 %3, x3, %6;\n}"
      : "=r"(operand[0]), "=r"(operand[1]), "=r"(operand[2]), "=r"(operand[3])
      : "r"(word), "r"(upper), "r"(lower));
}

// sum[64, CHUNK] += tile[64, 16] @ x[CHUNK, 16].T, both by their descriptors in shared memory.
__device__ __forceinline__ void multiply(float* d, u64 a, u64 x) {
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                 "+f"(d[i + 6]), "+f"(d[i + 7])
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
               "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,"
               "%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
               "%64,%65,1,1,1,0,0;"
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
               : "l"(a), "l"(x));
}

__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Rows of 128 bytes, swizzled; 1024 bytes from eight rows to the next.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return u64(1) << 62 | u64(64) << 32 | 1 << 16 | address >> 4;
}

// A place in a ring, and the parity of its barriers.
struct Place {
  u32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance(u32 slots, u32 steps = 1) {
    slot += steps;
    if (slot >= slots) slot -= slots, parity ^= 1;
  }
};

__device__ __forceinline__ void fetch_words(const u32* words, const u32* exponents, u32 memory, u32 barriers,
                                            u32 steps) {
  Place place;
  for (u32 step = 0; step < steps; ++step, place.advance(WORD_SLOTS)) {
    u32 full = barriers + (FULL_WORDS + place.slot) * 8;
    wait(barriers + (EMPTY_WORDS + place.slot) * 8, place.parity ^ 1);
    expect(full, WORD_BYTES + EXPONENT_BYTES);
    copy(memory + WORDS_AT + place.slot * WORD_BYTES, words + u64(step) * (WORD_BYTES / 4), WORD_BYTES, full);
    copy(memory + EXPONENTS_AT + place.slot * EXPONENT_BYTES, exponents + u64(step) * (EXPONENT_BYTES / 4),
         EXPONENT_BYTES, full);
  }
}

// box: rows of x a copy, which divide ROWS. Copies without a row of x are left out, since zeros come slowly. Shared
// memory keeps what it held there: it reaches sums of such rows alone, which nobody stores.
__device__ __forceinline__ void fetch_x(const TensorMap* x_map, u32 memory, u32 barriers, u32 first_m, u32 rows,
                                        u32 box, u32 steps) {
  u32 end = rows - first_m < ROWS ? rows - first_m : ROWS;
  u32 bytes = (end + box - 1) / box * box * 128;
  Place place;
  for (u32 tile = 0; tile < steps * TILES; ++tile, place.advance(X_SLOTS)) {
    u32 full = barriers + (FULL_X + place.slot) * 8;
    wait(barriers + (EMPTY_X + place.slot) * 8, place.parity ^ 1);
    expect(full, bytes);
    for (u32 row = 0; row < end; row += box)
      copy_x(memory + X_AT + place.slot * X_SLOT_BYTES + row * 128, x_map, tile * 64, first_m + row, full);
  }
}

__device__ __forceinline__ void decode_tiles(u32 group, u32 memory, u32 barriers, u32 steps) {
  const u32 thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
  // Where stmatrix puts a lane's row of eight values: four matrices (n, n + 8) x (k, k + 8) of a 16 x 16 operand.
  u32 targets[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u32 row = (lane >> 3 & 1) * 8 + (lane & 7), part = 2 * i + (lane >> 4);
    targets[i] = memory + TILES_AT + warp * 2048 + row * 128 + (part ^ row & 7) * 16;
  }
  Place words_place, place;
  words_place.advance(WORD_SLOTS, group), place.advance(TILE_SLOTS, group);
  for (u32 step = group; step < steps; step += GROUPS) {
    u32 words[TILES][4], exponents[TILES];
    u32 words_at = memory + WORDS_AT + words_place.slot * WORD_BYTES + thread * 16;
    u32 exponents_at = memory + EXPONENTS_AT + words_place.slot * EXPONENT_BYTES + thread / 4 * 4;
    wait(barriers + (FULL_WORDS + words_place.slot) * 8, words_place.parity);
#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[tile][0]), "=r"(words[tile][1]), "=r"(words[tile][2]), "=r"(words[tile][3])
                   : "r"(words_at + tile * 2048)
                   : "memory");
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(exponents[tile]) : "r"(exponents_at + tile * 128) : "memory");
    }
    wait(barriers + (EMPTY_TILES + place.slot) * 8, place.parity ^ 1);
#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        // An exponent in both halves of a word is a power of two in bf16x2.
        u32 upper = (exponents[tile] >> (i / 2 * 8) & 0xFF) * 0x00800080;
        u32 lower = (exponents[tile] >> (16 + i / 2 * 8) & 0xFF) * 0x00800080;
        u32 operand[4];
        decode(words[tile][i], upper, lower, operand);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         targets[i] + place.slot * TILE_SLOT_BYTES + tile * TILE_BYTES),
                     "r"(operand[0]), "r"(operand[1]), "r"(operand[2]), "r"(operand[3])
                     : "memory");
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    arrive(barriers + (EMPTY_WORDS + words_place.slot) * 8, lane == 0);
    arrive(barriers + (FULL_TILES + place.slot) * 8, lane == 0);
    words_place.advance(WORD_SLOTS, GROUPS), place.advance(TILE_SLOTS, GROUPS);
  }
}

__device__ __forceinline__ void multiply_tiles(u32 memory, u32 barriers, unsigned short* y, u32 first_n, u32 first_m,
                                               u32 rows, u32 outputs, u32 steps) {
  const u32 thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
  float sums[ROWS / CHUNK][CHUNK / 2];
#pragma unroll
  for (u32 i = 0; i < ROWS / 2; ++i)  // not moved past the fence that makes them the products' own
    asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sums[i / (CHUNK / 2)][i % (CHUNK / 2)]));

  auto release = [&](u32 first_barrier, u32 slot) { arrive(barriers + (first_barrier + slot) * 8, lane == 0); };

  Place tiles_place, x_place;
  auto multiply_tile = [&](u32 tile) {
    wait(barriers + (FULL_X + x_place.slot) * 8, x_place.parity);
    if (tile == 0) wait(barriers + (FULL_TILES + tiles_place.slot) * 8, tiles_place.parity);
    u64 a = descriptor(memory + TILES_AT + tiles_place.slot * TILE_SLOT_BYTES + tile * TILE_BYTES);
    u64 x = descriptor(memory + X_AT + x_place.slot * X_SLOT_BYTES);
    multiply_fence();
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
#pragma unroll
      for (u32 chunk = 0; chunk < ROWS / CHUNK; ++chunk)
        multiply(sums[chunk], a + i * 2, x + chunk * (CHUNK * 128 / 16) + i * 2);
    multiply_commit();
  };
  u32 tile_slot = 0, x_slot = 0;  // of the tile in flight
  auto next_tile = [&](u32 tile) {
    u32 next_x_slot = x_place.slot;
    multiply_tile(tile);
    multiply_wait<1>();
    release(EMPTY_X, x_slot);
    x_slot = next_x_slot;
    x_place.advance(X_SLOTS);
  };
  // One tile stays in flight. The first stands apart, so that the compiler sees as many at each turn of the loop.
  multiply_tile(0);
  x_place.advance(X_SLOTS);
  next_tile(1);
  tiles_place.advance(TILE_SLOTS);
#pragma unroll 1
  for (u32 step = 1; step < steps; ++step) {
    next_tile(0);
    release(EMPTY_TILES, tile_slot);
    next_tile(1);
    tile_slot = tiles_place.slot;
    tiles_place.advance(TILE_SLOTS);
  }
  multiply_wait<0>();
  // Rounded at once: where the compiler finds sums read further away, it makes each product wait for the one before.
  u32 values[ROWS / 4];
#pragma unroll
  for (u32 i = 0; i < ROWS / 4; ++i)
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;"
                 : "=r"(values[i])
                 : "f"(sums[2 * i / (CHUNK / 2)][2 * i % (CHUNK / 2) + 1]),
                   "f"(sums[2 * i / (CHUNK / 2)][2 * i % (CHUNK / 2)])
                 : "memory");

  u32 n = first_n + warp * 16 + lane / 4, m = first_m + lane % 4 * 2;
#pragma unroll
  for (u32 i = 0; i < ROWS / 2; ++i) {
    u32 m_i = m + i / 4 * 8 + (i & 1), n_i = n + (i & 2) * 4;
    if (m_i < rows && n_i < outputs) y[u64(m_i) * outputs + n_i] = values[i / 2] >> (i & 1) * 16;
  }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 2), 1)
    mxfp4_mm(const __grid_constant__ TensorMap x_map, const u32* words, const u32* exponents, unsigned short* y,
             u32 rows, u32 box, u32 outputs, u32 steps) {
  const u32 memory = shared_base(), barriers = memory + BARRIERS_AT;
  const u32 first_n = blockIdx.x * 64, first_m = blockIdx.y * ROWS;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < BARRIERS; ++i) {
      bool by_copy = i < EMPTY_WORDS || (i >= FULL_X && i < EMPTY_X);
      init(barriers + i * 8, by_copy ? 1 : 4);  // else a lane of each warp of one group
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  // The shuffle tells the compiler that a warp takes one way; else it makes products wait for each other.
  u32 group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  // The registers of a launch, 96 a thread, are divided anew.
  if (group == GROUPS + 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x % 32 == 0) {
      u64 first_tile = u64(blockIdx.x) * steps * TILES;
      if (warp == 4 * GROUPS + 4)
        fetch_words(words + first_tile * 512, exponents + first_tile * 32, memory, barriers, steps);
      if (warp == 4 * GROUPS + 5) fetch_x(&x_map, memory, barriers, first_m, rows, box, steps);
    }
  } else if (group == GROUPS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    multiply_tiles(memory, barriers, y, first_n, first_m, rows, outputs, steps);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    decode_tiles(group, memory, barriers, steps);
  }
}
